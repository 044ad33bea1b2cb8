"""One look for all figures, and SVG that can stand in a page: inline, themed, free of collisions.

matplotlib draws; `to_svg` then makes its file a part of a page. Black becomes `currentColor`, so
text and axes follow the page's theme; series have the colours of Okabe and Ito (2008), which the
colour-blind can tell apart, with an outline in the page's ink, since no colour stands out enough
against both white and a dark page. A series differs by marker or hatch as well.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from flashdig.report.figures.picture import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK = "#000000"
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, VERMILLION, PURPLE, YELLOW = "#E69F00", "#D55E00", "#CC79A7", "#F0E442"

# colour -> path of its hatch on a square of _HATCH_SIZE; blue is plain
_HATCH_SIZE = 8
_HATCHES = {
    VERMILLION: "M0 8L8 0M-2 2L2 -2M6 10L10 6",
    GREEN: "M0 0L8 8M-2 6L2 10M6 -2L10 2",
    PURPLE: "M0 8L8 0M0 0L8 8",
    SKY: "M0 4H8",
    YELLOW: "M4 0V8",
    ORANGE: "M2 2h.01M6 6h.01",
}

SMALL = 9.5  # size of labels beside marks
WIDTH = 9.0  # inches: 648 units of the view box

# for the page's style sheet; a figure stands in an element of this class
FIGURES_CSS = """\
.picture { overflow-x: auto; }
.picture svg { display: block; width: 100%; min-width: 540px; max-width: 860px; height: auto; }
@media print { .picture svg { min-width: 0; break-inside: avoid; } }
"""

_SVG = "http://www.w3.org/2000/svg"
_LOOK: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "flashdig",
    "text.parse_math": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the layout is the same everywhere
    "font.size": 11.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 11.0,
    "xtick.labelsize": 10.0,
    "ytick.labelsize": 10.0,
    "legend.fontsize": 10.0,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "patch.edgecolor": INK,
    "patch.linewidth": 0.7,
    "axes.axisbelow": True,
    "figure.constrained_layout.use": True,
}


def to_svg(
    name: str, alt: str, draw: Callable[[Figure], None], *, height: float, width: float = WIDTH
) -> str:
    """What `draw` draws, as one inline `<svg>`; the same text for the same drawing.

    Args:
        name: every id begins with it.
        alt: becomes the image's label; without characters that XML refuses.
        width, height: inches; 72 units of the view box each.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_LOOK)
        figure = Figure(figsize=(width, height))
        draw(figure)
        file = io.BytesIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        with warnings.catch_warnings():
            # the browser has the letters that matplotlib's font lacks
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure.savefig(file, format="svg", metadata=metadata)
    return _for_a_page(file.getvalue(), name, alt)


def picture(
    name: str,
    title: str,
    alt: str,
    caption: str,
    draw: Callable[[Figure], None],
    *,
    height: float,
) -> Picture:
    """A picture of what `draw` draws; `height` in inches."""
    alt = plain(alt)
    return Picture(name, title, to_svg(name, alt, draw, height=height), alt, plain(caption))


def _for_a_page(document: bytes, name: str, alt: str) -> str:
    root = ElementTree.fromstring(plain(document.decode()))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"):
                parent.remove(child)
    _draw_hatches(root)
    names = _new_ids(root, name)
    for element in root.iter():
        # white space between elements is half of the file
        element.tail = None
        if not element.tag.endswith("}text"):
            element.text = None
        element.tag = element.tag.partition("}")[2]
        for key in list(element.attrib):
            value = element.attrib.pop(key)
            plain_key = key.partition("}")[2] or key
            if plain_key == "id":
                if value in names:
                    element.set("id", names[value])
                continue
            element.set(plain_key, _attribute(value, names))
    _flatten(root)
    _leave_out_the_invisible(root)
    view_box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib |= {
        "xmlns": _SVG,
        "viewBox": view_box,
        "role": "img",
        "aria-label": alt,
        "fill": "currentColor",
        # where matplotlib has a style sheet, which would reach the rest of the page
        "style": "font-family: system-ui, sans-serif; stroke-linejoin: round",
    }
    return ElementTree.tostring(root, encoding="unicode")


def _flatten(element: ElementTree.Element) -> None:
    """Groups that say nothing give way to what they hold."""
    for child in list(element):
        _flatten(child)
        if child.tag in ("g", "defs") and not child.attrib:
            place = list(element).index(child)
            element.remove(child)
            # definitions must not be drawn where they stand
            if child.tag == "defs" and len(child):
                element.insert(place, child)
                continue
            for number, inner in enumerate(list(child)):
                element.insert(place + number, inner)


def _leave_out_the_invisible(root: ElementTree.Element) -> None:
    """Backgrounds without colour, and what changes nothing: a part of the file's size."""
    for parent in root.iter():
        for child in list(parent):
            if child.tag == "path" and child.get("style") == "fill:none":
                parent.remove(child)
            elif child.tag == "text" and child.get("transform", "").startswith("rotate(-0 "):
                del child.attrib["transform"]
            elif child.tag == "path":
                child.set("d", re.sub(r" ?([A-Za-z]) ?", r"\1", child.get("d", "")))


def _draw_hatches(root: ElementTree.Element) -> None:
    """matplotlib's hatches, which take 10 KB a pattern, drawn anew: each colour has its own."""
    for pattern in root.iter(f"{{{_SVG}}}pattern"):
        background = pattern.find(f"{{{_SVG}}}rect")
        colour = None if background is None else background.get("fill", "").upper()
        tile = _HATCHES[next(known for known in _HATCHES if known.upper() == colour)]
        for child in list(pattern):
            pattern.remove(child)
        side = str(_HATCH_SIZE)
        pattern.attrib |= {"x": "0", "y": "0", "width": side, "height": side}
        whole = {"width": side, "height": side, "fill": colour or "none"}
        ElementTree.SubElement(pattern, f"{{{_SVG}}}rect", whole)
        style = "fill: none; stroke: #000000; stroke-width: 0.8"
        if "h.01" in tile:
            style = "fill: none; stroke: #000000; stroke-width: 1.6; stroke-linecap: round"
        ElementTree.SubElement(pattern, f"{{{_SVG}}}path", {"d": tile, "style": style})


def bar_style(colour: str) -> dict[str, Any]:
    """Colour, hatch and outline of a bar or patch."""
    hatch = "/" if colour in _HATCHES else ""  # which one, `_draw_hatches` knows
    return {"facecolor": colour, "hatch": hatch, "edgecolor": INK, "linewidth": 0.7}


def hollow_style(colour: str) -> dict[str, Any]:
    """Of what was not measured: an outline alone."""
    return {"facecolor": "none", "edgecolor": colour, "linewidth": 1.6}


def _new_ids(root: ElementTree.Element, name: str) -> dict[str, str]:
    """Ids that something refers to -> new ones; matplotlib names many more."""
    used = []
    for element in root.iter():
        for key, value in element.attrib.items():
            if key.endswith("href"):
                used.append(value.removeprefix("#"))
            used += _REFERENCE.findall(value)
    return {old: f"{name}-{number}" for number, old in enumerate(dict.fromkeys(used), 1)}


_REFERENCE = re.compile(r"url\(#([^)]*)\)")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
# fonts are the page's, and mitred corners look the same as the root's round ones
_NOT_NEEDED = re.compile(r"font-family:[^;]*;\s*|;\s*stroke-linejoin: miter")


def _attribute(value: str, names: dict[str, str]) -> str:
    if value.startswith("#") and value[1:] in names:
        return f"#{names[value[1:]]}"
    value = _REFERENCE.sub(lambda match: f"url(#{names[match[1]]})", value)
    value = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value)
    value = _NOT_NEEDED.sub("", value).replace(INK, "currentColor").strip()
    return re.sub(r"\s*([;:]) +", r"\1", re.sub(r"  +", " ", value))


def plain(text: str) -> str:
    """Text without the characters that XML refuses."""
    return _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def shortened(text: str, most: int) -> str:
    """At most so many characters, the last of them an ellipsis where some were left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def light_grid(axes: Axes, axis: str = "both") -> None:
    """Faint lines behind the data at the major ticks."""
    axes.grid(True, axis=axis, color=INK, alpha=0.13, linewidth=0.7)  # type: ignore[arg-type]


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places for labels that want `positions` (rising): at least `gap` apart, inside [low, high].

    Where they cannot all fit, they come evenly over the whole range.
    """
    count = len(positions)
    if count > 1 and gap * (count - 1) > high - low:
        gap = (high - low) / (count - 1)
    places: list[float] = []
    for position in positions:
        places.append(max(position, places[-1] + gap) if places else max(position, low))
    limit = high
    for index in range(count - 1, -1, -1):
        places[index] = min(places[index], limit)
        limit = places[index] - gap
    return places


def log_range(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a log axis that shows these values (> 0), with a part of a decade around them."""
    return 0.6 * min(values), 1.2 * max(values)


def log_ticks(axis: Axis, low: float, high: float, words: Callable[[float], str]) -> None:
    """Ticks of a log axis from `low` to `high`: decades, with 2 and 5 between them if few."""
    wide = math.log10(high / low) > 2.2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [
        float(f"{digit}e{decade}")
        for decade in decades
        for digit in ((1,) if wide else (1, 2, 5))
        if low <= float(f"{digit}e{decade}") <= high
    ]
    axis.set_ticks(ticks, [words(tick) for tick in ticks])
    axis.set_ticks([], minor=True)
