"""The dig's page in a real browser: nothing from outside, nothing wrong, nothing out of reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.chromium import WIDTHS, opened
from tests.dig_pages import REPORTS, hostile_page

PAGES = ("nvidia-h200", "cpu", "hostile")


@pytest.fixture(scope="session")
def pages(tmp_path_factory) -> dict[str, Path]:
    """The committed pages, which a unit test holds equal to what is drawn, and a hostile one."""
    hostile = tmp_path_factory.mktemp("pages") / "hostile.html"
    hostile.write_text(hostile_page(), encoding="utf-8")
    return {**{name: REPORTS / f"{name}.html" for name in PAGES[:2]}, "hostile": hostile}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_page_opens_alone_and_fits(running, pages, name, width, scheme) -> None:
    with opened(running, pages[name], width, scheme) as shown:
        page = shown.page
        # details too, whatever they hide
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        page.wait_for_load_state("networkidle")
        assert shown.requests == [shown.url]
        assert shown.complaints == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(WIDE) == []
        assert page.evaluate(BROKEN_LINKS) == []
        assert page.evaluate(REPEATED_IDS) == []
        ground, ink = page.evaluate(COLOURS)
        assert (sum(ground) > sum(ink)) == (scheme == "light")
        assert contrast(ground, ink) > 7
        assert page.evaluate("document.scripts.length") == 0


# elements that reach beyond the screen outside of a container that scrolls
WIDE = """
[...document.querySelectorAll('main *, header *, footer *')].filter(one =>
  !one.closest('.scroll, .picture, .skip, svg') &&
  one.getBoundingClientRect().right > document.documentElement.clientWidth + 1
).map(one => one.outerHTML.slice(0, 120))
"""
BROKEN_LINKS = """
[...document.querySelectorAll('a')].map(a => a.getAttribute('href')).filter(href =>
  !href.startsWith('#') || !document.getElementById(href.slice(1)))
"""
REPEATED_IDS = """
(() => { const ids = [...document.querySelectorAll('[id]')].map(one => one.id);
  return ids.filter((id, i) => ids.indexOf(id) !== i); })()
"""
COLOURS = """
(() => { const style = getComputedStyle(document.body);
  return [style.backgroundColor, style.color].map(c => c.match(/[0-9.]+/g).slice(0, 3).map(Number));
})()
"""


def contrast(first: list[float], second: list[float]) -> float:
    """The ratio of WCAG 2."""

    def luminance(colour: list[float]) -> float:
        parts = (c / 255 for c in colour)
        linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", PAGES)
def test_every_scroll_container_is_reached_by_the_tab_key(running, pages, name) -> None:
    with opened(running, pages[name], WIDTHS["phone"], "light") as shown:
        page = shown.page
        wanted = page.evaluate(
            "[...document.querySelectorAll('[role=region]')].filter(one => one.checkVisibility())"
            ".length"
        )
        assert wanted >= 5
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
        reached = set()
        most = page.evaluate("document.querySelectorAll('a, summary, [tabindex]').length")
        for _ in range(most):
            page.keyboard.press("Tab")
            found = page.evaluate(FOCUSED)
            if found["region"] is not None:
                reached.add(found["region"])
                assert found["outline"] != "none"
        assert len(reached) == wanted


# the place of the focused container among all, and how its focus shows
FOCUSED = """
(() => { const one = document.activeElement;
  const place = [...document.querySelectorAll('[role=region]')].indexOf(one);
  return {region: place < 0 ? null : place, outline: getComputedStyle(one).outlineStyle}; })()
"""


def test_a_wide_table_scrolls_by_key_on_a_phone(running, pages) -> None:
    with opened(running, pages["nvidia-h200"], WIDTHS["phone"], "light") as shown:
        table = shown.page.locator("#ladder .scroll")
        assert table.evaluate("one => one.scrollWidth > one.clientWidth")
        table.focus()
        for _ in range(5):
            shown.page.keyboard.press("ArrowRight")
        shown.page.wait_for_function("document.querySelector('#ladder .scroll').scrollLeft > 0")
        first = shown.page.locator("#ladder tbody th").first
        assert first.bounding_box()["x"] >= 0, "the name of the rung stays in sight"


def test_a_link_leads_to_the_meaning_of_its_word(running, pages) -> None:
    with opened(running, pages["nvidia-h200"], WIDTHS["desktop"], "light") as shown:
        shown.page.locator("a.term").first.click()
        (key,) = shown.page.evaluate("[location.hash.slice(1)]")
        assert key.startswith("term-")
        assert shown.page.locator(f"#{key}").is_visible()


# CSS pixels between the margins of a sheet
A4 = 718
TOO_WIDE = """
[...document.querySelectorAll('table')].filter(one =>
  one.getBoundingClientRect().right > document.documentElement.clientWidth
).map(one => one.parentElement.getAttribute('aria-label'))
"""


def test_print_hides_navigation_and_cuts_no_table(running, pages) -> None:
    with opened(running, pages["nvidia-h200"], A4, "light") as shown:
        shown.page.emulate_media(media="print")
        assert shown.page.evaluate(TOO_WIDE) == []
        assert not shown.page.locator("nav").is_visible()
        assert (
            shown.page.locator("#ladder .scroll").evaluate("one => getComputedStyle(one).overflowX")
            == "visible"
        )
