"""Figures as parts of a page: safe, small, themed, and never in each other's way."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from flashdig.costs.units import with_unit
from flashdig.generations.walk import walk
from flashdig.hardware.devices import find_device
from flashdig.report.figures import Missing, Picture
from flashdig.report.figures import style as looks
from flashdig.report.figures.ladder import ladder
from flashdig.report.figures.memory_ledger import memory_ledger
from flashdig.report.figures.roofline import roofline
from flashdig.report.figures.steps import steps
from flashdig.report.figures.waves import waves
from tests.figure_cases import (
    archaeology_rows,
    default_rows,
    pictures_of,
    rows_where,
    step_rows,
    without_a_gpu,
)

SVG = "{http://www.w3.org/2000/svg}"
H200 = find_device("h200")
HOSTILE = '<script>alert("x")</script>&amp;\x00\x1b $\\frac{1}{2}$ \u6f22 ' + "n" * 300


def hostile_rows():
    names = {"naive": "naive", "inplace": HOSTILE, "v2": "v2"}
    return [{**row, "name": names[row["name"]]} for row in default_rows() if row["name"] in names]


@pytest.fixture(scope="module")
def pages():
    """Every figure of every kind of record."""
    longest = rows_where(("rung",), seqlen_q=16384, head_dim=128, causal=True)
    return {
        "default": pictures_of(default_rows(), H200, walk(), prefix="default-"),
        "steps": [steps(step_rows(), "steps-steps"), steps(step_rows(causal=True), "causal-steps")],
        # the largest files
        "longest": [
            memory_ledger(longest, H200, "longest-ledger"),
            waves(longest, H200, "longest-waves"),
        ],
        "cpu": pictures_of(without_a_gpu(archaeology_rows()), H200, prefix="cpu-"),
        "hostile": pictures_of(hostile_rows(), H200, prefix="hostile-"),
    }


@pytest.fixture(scope="module")
def drawn(pages):
    return [figure for page in pages.values() for figure in page if isinstance(figure, Picture)]


def test_svg_stands_alone_and_refers_to_nothing_outside(drawn) -> None:
    for picture in drawn:
        root = ElementTree.fromstring(picture.svg)
        assert root.tag == f"{SVG}svg"
        assert not picture.svg.startswith("<?xml")
        assert "<!DOCTYPE" not in picture.svg
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {"svg", "g", "defs", "path", "use", "text", "tspan", "pattern", "rect"} | {
            "clipPath"
        }, picture.name
        for element in root.iter():
            for key, value in element.attrib.items():
                assert not key.lower().startswith("on"), (picture.name, key)
                if key == "href":
                    assert value.startswith("#")
        assert set(re.findall(r"https?://[^\"]*", picture.svg)) == {"http://www.w3.org/2000/svg"}


def test_ids_are_the_pictures_own_and_every_reference_is_met(drawn) -> None:
    seen: set[str] = set()
    for picture in drawn:
        root = ElementTree.fromstring(picture.svg)
        ids = [element.get("id") for element in root.iter() if element.get("id")]
        assert len(ids) == len(set(ids))
        assert all(one.startswith(f"{picture.name}-") for one in ids)
        assert not seen & set(ids)
        seen |= set(ids)
        used = set(re.findall(r"url\(#([^)]+)\)", picture.svg))
        used |= {e.get("href").removeprefix("#") for e in root.iter() if e.get("href")}
        assert used == set(ids), picture.name


def test_small_enough_for_a_page(drawn) -> None:
    sizes = {picture.name: len(picture.svg.encode()) for picture in drawn}
    assert max(sizes.values()) < 60_000, sizes


def test_ink_is_the_pages_and_series_can_be_told_apart_without_colour(drawn) -> None:
    palette = {looks.BLUE, looks.SKY, looks.GREEN, looks.ORANGE, looks.VERMILLION, looks.PURPLE}
    palette = {colour.lower() for colour in palette}
    for picture in drawn:
        colours = {c.lower() for c in re.findall(r"#[0-9a-fA-F]{6}\b", picture.svg)}
        assert colours <= palette, picture.name
        assert "currentColor" in picture.svg
        root = ElementTree.fromstring(picture.svg)
        assert root.get("fill") == "currentColor"
        # a colour fills through a hatch of its own, blue alone is plain
        patterns = {e.find(f"{SVG}rect").get("fill") for e in root.iter(f"{SVG}pattern")}
        assert looks.BLUE not in patterns
        hatches = [e.find(f"{SVG}path").get("d") for e in root.iter(f"{SVG}pattern")]
        assert len(hatches) == len(set(hatches))


def test_alt_text_is_the_label_and_says_something(drawn) -> None:
    for picture in drawn:
        root = ElementTree.fromstring(picture.svg)
        assert root.get("role") == "img"
        assert root.get("aria-label") == picture.alt
        assert len(picture.alt) > 80
        assert re.search(r"\d", picture.alt)
        assert picture.caption.endswith(".")
        assert picture.title


def test_words_stay_inside_the_picture(drawn) -> None:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    for picture in drawn:
        root = ElementTree.fromstring(picture.svg)
        _, _, width, height = (float(side) for side in root.get("viewBox").split())
        for text in root.iter(f"{SVG}text"):
            if text.get("transform"):  # rotated labels of axes and slopes
                continue
            style = text.get("style", "")
            size = float(re.search(r"font(?:-size)?:[^;]*?([\d.]+)px", style)[1])
            anchor = re.search(r"text-anchor:(\w+)", style)
            words = "".join(text.itertext())
            # the widest of the common sans-serif fonts
            font = FontProperties(size=size)
            needed, _, _ = text_to_path.get_text_width_height_descent(words, font, False)
            share = {"middle": 0.5, "end": 1.0}.get(anchor[1] if anchor else "start", 0.0)
            left = float(text.get("x")) - share * needed
            assert left >= -1, (picture.name, words)
            assert left + needed <= width + 1, (picture.name, words)
            assert 0 < float(text.get("y")) <= height


def test_hostile_names_are_only_text(pages) -> None:
    for picture in pages["hostile"]:
        if isinstance(picture, Missing):
            continue
        assert "<script" not in picture.svg
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f]", picture.svg + picture.alt)
        assert "n" * 40 not in "".join(
            "".join(text.itertext())
            for text in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")
        )
    assert "&lt;script&gt;" in pages["hostile"][0].svg


def test_the_same_rows_give_the_same_text() -> None:
    rows = archaeology_rows()
    assert ladder(rows) == ladder(rows)
    assert waves(rows, H200) == waves(rows, H200)


def test_a_users_matplotlib_settings_neither_show_nor_change() -> None:
    import matplotlib

    before = steps(step_rows())
    with matplotlib.rc_context({"axes.facecolor": "red", "font.size": 40, "svg.fonttype": "path"}):
        assert steps(step_rows()) == before
        assert matplotlib.rcParams["font.size"] == 40


def test_without_a_device_only_what_was_found_is_drawn() -> None:
    figures = {figure.name: figure for figure in pictures_of(without_a_gpu(step_rows()), None)}
    drawn = [name for name, figure in figures.items() if isinstance(figure, Picture)]
    assert drawn == ["errors"]
    for name in ("roofline", "memory_ledger", "waves", "pipes"):
        assert "not in the device table" in figures[name].reason
    assert figures["steps"].reason.endswith("that takes a GPU.")
    # times that were measured need no device
    timed = {figure.name: figure for figure in pictures_of(step_rows(), None)}
    assert isinstance(timed["ladder"], Picture)
    assert isinstance(timed["steps"], Picture)


def test_a_run_in_which_nothing_passed_has_reasons_for_every_figure() -> None:
    failed = [
        {**row, "gate": "not run: no such kernel", "error": None}
        for row in without_a_gpu(default_rows())
    ]
    figures = pictures_of(failed, H200)
    assert [f.name for f in figures if isinstance(f, Picture)] == ["waves"]
    assert all(f.reason.endswith((".", ").")) for f in figures if isinstance(f, Missing))
    assert all(isinstance(figure, Missing) for figure in pictures_of([], H200))


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}])
def test_problems_without_work_are_missing_or_drawn(sizes) -> None:
    rows = [{**row, **sizes} for row in without_a_gpu(default_rows())]
    figures = {figure.name: figure for figure in pictures_of(rows, H200)}
    for name in ("roofline", "waves", "pipes"):
        assert isinstance(figures[name], Missing), name
    assert isinstance(figures["errors"], Picture)


def test_figures_of_one_chip_and_problem_refuse_several() -> None:
    rows = [*default_rows(), *step_rows()]
    for figure in (roofline, waves):
        with pytest.raises(ValueError, match="rows must be of one problem, got 2"):
            figure(rows, H200)


def test_the_style_sheet_reaches_nothing_but_pictures() -> None:
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@media[^{]*\{", "", looks.FIGURES_CSS))
    assert selectors
    assert all(selector.strip().startswith(".picture") for selector in selectors)


@pytest.mark.parametrize(
    ("wanted", "gap"),
    [
        ([0.5, 0.5, 0.5], 0.1),
        ([0.0, 0.99, 1.0], 0.1),
        ([0.2, 0.8], 0.05),
        ([0.9] * 5, 0.4),
        ([], 1),
    ],
)
def test_labels_are_spread_apart_within_limits_and_in_order(wanted, gap) -> None:
    places = looks.spread(wanted, gap, 0.0, 1.0)
    assert len(places) == len(wanted)
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in places)
    least = min(gap, 1 / max(1, len(wanted) - 1))
    assert all(b - a >= least - 1e-9 for a, b in pairwise(places))
    if wanted == [0.2, 0.8]:
        assert places == wanted


def test_log_axes_have_ticks_at_round_figures() -> None:
    from matplotlib.figure import Figure

    def ticks(low: float, high: float) -> list[str]:
        axes = Figure().add_subplot()
        axes.set(xscale="log", xlim=(low, high))
        looks.log_ticks(axes.xaxis, low, high, lambda value: with_unit(value, "B"))
        return [label.get_text() for label in axes.get_xticklabels()]

    assert ticks(0.9, 30) == ["1 B", "2 B", "5 B", "10 B", "20 B"]
    assert ticks(9, 2e6) == ["10 B", "100 B", "1 kB", "10 kB", "100 kB", "1 MB"]
