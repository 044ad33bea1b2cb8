"""A browser for the tests of this folder; without one they are skipped, or fail where it must be
there."""

from __future__ import annotations

import importlib.util
import os

import pytest

from tests.browser.chromium import REQUIRED


def _missing() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install -e '.[dev]')"
    from tests.browser.chromium import chromium

    return None if chromium() is not None else "no Chromium on this machine (apt install chromium)"


@pytest.fixture(scope="session")
def running():
    """A running Chromium."""
    missing = _missing()
    if missing is not None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but {missing}")
        pytest.skip(missing)
    from tests.browser.chromium import browser

    with browser() as opened_browser:
        yield opened_browser
