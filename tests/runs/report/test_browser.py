"""The page in headless Chromium: its charts are drawn, without an error, in both themes and at a phone's width."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.runs.report.blocks import Chart, Charts, Page, ReportSection
from ds_finetune.runs.report.charts import CoordinateAxis, Line, line_plot, parallel_plot
from ds_finetune.runs.report.write import write_page, write_run_report
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
const canvases = node => [...node.querySelectorAll("*")].flatMap(each =>
  each.tagName === "CANVAS" ? [each] : each.shadowRoot ? canvases(each.shadowRoot) : []);
return [...document.querySelectorAll(".plot")].map(plot => Math.max(...canvases(plot).map(colours)))
"""
"""The number of colours in each chart, of which some are drawn in layers."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


def test_charts_are_drawn_in_both_themes_and_nothing_is_wider_than_a_phone(browser: Any, tmp_path: Path) -> None:
    page = write_run_report(make_run(tmp_path / "run"))
    use_dark_theme(browser, is_dark=False)
    resize(browser, WIDE)
    browser.get(page.as_uri())
    _wait(browser, lambda: min(browser.execute_script(DRAWN)) > 5)
    assert len(browser.execute_script(DRAWN)) > 8
    light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    use_dark_theme(browser, is_dark=True)
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    # The browser tells the page of its theme and size a moment later.
    _wait(browser, lambda: browser.execute_script("return document.getElementById('theme').textContent") == "Light")
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == light
    logarithmic = "const each = document.querySelector('.logarithmic'); each.click(); return each.ariaPressed"
    assert browser.execute_script(logarithmic) == "true"
    resize(browser, PHONE)
    _wait(browser, lambda: browser.execute_script("return document.documentElement.scrollWidth") <= PHONE)
    assert _errors(browser) == []


class Pointer:
    """The mouse over a chart, at shares of its width and height."""

    def __init__(self, browser: Any, chart: int) -> None:
        self._browser, self._chart = browser, chart
        box = "const r = document.querySelectorAll('.canvas')[arguments[0]].getBoundingClientRect(); return [r.x, r.y, r.width, r.height]"
        self._box = browser.execute_script(box, chart)

    def __call__(self, kind: str, across: float, down: float, **details: Any) -> None:
        x, y, width, height = self._box
        place = {"type": kind, "x": x + across * width, "y": y + down * height}
        self._browser.execute_cdp_cmd("Input.dispatchMouseEvent", place | details)

    def told(self) -> list[str]:
        script = "return document.querySelectorAll('.tip')[arguments[0]].innerText"
        return self._browser.execute_script(script, self._chart).split("\n")


@pytest.fixture
def two_charts(browser: Any, tmp_path: Path) -> tuple[Pointer, Pointer]:
    steps = list(range(1, 101))
    lines = [Line("one <b>", steps, [step / 100 for step in steps]), Line("two", [50], [0.5], "points", 1)]
    axes = [CoordinateAxis("lr", is_log=True), CoordinateAxis("kind", choices=("a", "b")), CoordinateAxis("loss")]
    trials = parallel_plot(axes, [[1e-4, "a", 1.0], [1e-2, "b", 2.0]], is_maximized=False)
    charts = [Chart("Lines", line_plot(lines), "two lines"), Chart("Trials", trials, "two trials")]
    page = Page("charts", "", "", [], [ReportSection("drawn", "Drawn", [Charts(charts)])])
    use_dark_theme(browser, is_dark=False)
    resize(browser, WIDE)
    browser.get(write_page(page, tmp_path / "page.html").as_uri())
    _wait(browser, lambda: browser.execute_script("return document.documentElement.dataset.drawn") == "2")
    return Pointer(browser, 0), Pointer(browser, 1)


def _wait(browser: Any, is_so: Callable[[], Any]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, PATIENCE_SECONDS).until(lambda _: is_so())


def test_readers_see_values_hide_lines_and_enlarge_parts(browser: Any, two_charts: tuple[Pointer, Pointer]) -> None:
    pointer, _ = two_charts
    pointer("mouseMoved", 0.52, 0.5)
    _wait(browser, lambda: pointer.told()[0].startswith("step "))
    middle = next(share for share in (0.5 + n / 1000 for n in range(50)) if _step(pointer, share) == 50)
    pointer("mouseMoved", middle, 0.5)
    _wait(browser, lambda: pointer.told() == ["step 50", "one <b>0.5", "two0.5"])
    browser.execute_script("document.querySelectorAll('.entry')[1].click()")
    pointer("mouseMoved", middle, 0.4)
    _wait(browser, lambda: pointer.told() == ["step 50", "one <b>0.5"])
    assert _step(pointer, 0.93) > 90
    pointer("mouseWheel", 0.5, 0.5, deltaX=0, deltaY=-800, modifiers=2)
    _wait(browser, lambda: _step(pointer, 0.93) < 90)
    assert browser.execute_script("return scrollY") == 0
    assert browser.get_log("browser") == [], "errors in the console"


def _step(pointer: Pointer, across: float) -> int:
    pointer("mouseMoved", across, 0.5)
    return int(pointer.told()[0].removeprefix("step "))


def test_readers_narrow_an_axis_of_trials(browser: Any, two_charts: tuple[Pointer, Pointer]) -> None:
    _, pointer = two_charts
    before = browser.execute_script(DRAWN)[1]
    pointer("mousePressed", 0.05, 0.5, button="left", clickCount=1, buttons=1)
    for across, down in ((0.12, 0.7), (0.2, 0.95)):
        pointer("mouseMoved", across, down, button="left", buttons=1)
    pointer("mouseReleased", 0.2, 0.95, button="left", clickCount=1)
    _wait(browser, lambda: browser.execute_script(DRAWN)[1] != before)
    assert _errors(browser) == []


def _errors(browser: Any) -> list[Any]:
    """What the console has but for a warning of these tests' own, who read colours of canvases."""
    return [entry for entry in browser.get_log("browser") if "getImageData" not in entry["message"]]
