"""A picture of the top of a page: python -m tests.browser.screenshot PAGE.html PICTURE.png"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from tests.browser.chromium import browser, opened

COLOURS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=1240)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--whole", action="store_true", help="from top to bottom")
    parser.add_argument("--at", help="id of the element to begin at")
    chosen = parser.parse_args()
    with (
        browser() as running,
        opened(running, chosen.page, chosen.width, chosen.scheme) as shown,
    ):
        shown.page.set_viewport_size({"width": chosen.width, "height": chosen.height})
        if chosen.at is not None:
            shown.page.evaluate("id => document.getElementById(id).scrollIntoView()", chosen.at)
        shown.page.screenshot(path=chosen.picture, full_page=chosen.whole)
    # a page has few colours: a palette takes a third of the bytes
    with Image.open(chosen.picture) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(chosen.picture, optimize=True)


if __name__ == "__main__":
    main()
