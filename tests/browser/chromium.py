"""Debian's Chromium, driven by playwright: where it is, and a page opened in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

# set where a browser must be there (continuous integration): without one the tests then fail
REQUIRED = "FLASHDIG_REQUIRE_BROWSER"
WIDTHS = {"desktop": 1280, "phone": 390}


def chromium() -> str | None:
    """The path of a Chromium or Chrome of this machine; None without one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """A running Chromium; no download, no profile."""
    # Chromium's sandbox does not work for root, as which continuous integration runs
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=chromium(), args=arguments)
        try:
            yield running
        finally:
            running.close()


class Opened:
    """A page, and what went wrong while it was open: requests to elsewhere, console errors."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.url = path.resolve().as_uri()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        page.goto(self.url)


@contextmanager
def opened(running: Browser, path: Path, width: int, scheme: str) -> Iterator[Opened]:
    """A file at a width in CSS pixels, in the "light" or "dark" scheme."""
    context = running.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    try:
        yield Opened(context.new_page(), path)
    finally:
        context.close()
