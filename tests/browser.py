"""Headless Chromium for tests of pages, from Debian's packages chromium and chromium-driver."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_BROWSER = [
    pytest.mark.skipif(find_spec("selenium") is None, reason="no selenium: pip install selenium"),
    pytest.mark.skipif(BROWSER is None, reason="no chromium: apt install chromium"),
    pytest.mark.skipif(DRIVER is None, reason="no chromedriver: apt install chromium-driver"),
]
"""Marks of tests that open a page."""


@contextmanager
def open_browser() -> Iterator[Any]:
    """A browser without a window, whose console is kept."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options, service=Service(DRIVER)) as driver:
        yield driver


def resize(browser: Any, width: int, height: int = 1000) -> None:
    """Lay the page out as on a screen of that width in pixels; windows have a least width, screens of phones do not."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def use_dark_theme(browser: Any, *, is_dark: bool) -> None:
    """Make the system's theme dark or light, as pages see it."""
    feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
