"""The page in headless Chromium: its charts are drawn, without an error, in both themes and at a phone's width."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.runs.report.write import write_run_report
from tests.browser import NEEDS_BROWSER, open_browser, resize, use_dark_theme
from tests.runs.report.made_runs import make_run

pytestmark = NEEDS_BROWSER
PHONE, WIDE = 390, 1200
PATIENCE_SECONDS = 120.0
DRAWN = """
const colours = canvas => {
  const bytes = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const found = new Set();
  for (let at = 0; at < bytes.length; at += 4) if (bytes[at + 3]) found.add(bytes[at] << 16 | bytes[at + 1] << 8 | bytes[at + 2]);
  return found.size;
};
return [...document.querySelectorAll(".plot")].map(plot => Math.max(...[...plot.querySelectorAll("canvas")].map(colours)))
"""
"""The number of colours in each chart, of which some are drawn in layers."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


def test_charts_are_drawn_in_both_themes_and_nothing_is_wider_than_a_phone(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    page = write_run_report(make_run(tmp_path / "run"))
    use_dark_theme(browser, is_dark=False)
    resize(browser, WIDE)
    browser.get(page.as_uri())
    colours = browser.execute_script(DRAWN)
    assert len(colours) > 8
    assert min(colours) > 5
    light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    use_dark_theme(browser, is_dark=True)
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    # The browser tells the page of its theme and size a moment later.
    wait = WebDriverWait(browser, PATIENCE_SECONDS)
    wait.until(lambda shown: shown.execute_script("return document.getElementById('theme').textContent") == "Light")
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == light
    logarithmic = "const each = document.querySelector('.logarithmic'); each.click(); return each.ariaPressed"
    assert browser.execute_script(logarithmic) == "true"
    resize(browser, PHONE)
    wait.until(lambda shown: shown.execute_script("return document.documentElement.scrollWidth") <= PHONE)
    assert browser.get_log("browser") == [], "errors in the console"
