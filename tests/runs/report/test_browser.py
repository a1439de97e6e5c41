"""The page in headless Chromium: its charts are drawn, without an error, in both themes and at a phone's width."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.runs.report.blocks import Charts, Page, ReportSection
from ds_finetune.runs.report.charts import Chart, Line
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
return [...document.querySelectorAll(".plot")].map(plot => Math.max(0, ...canvases(plot).map(colours)))
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
    # Charts are drawn once they come into sight.
    browser.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    for chart in range(browser.execute_script("return document.querySelectorAll('.plot').length")):
        browser.execute_script("document.querySelectorAll('.plot')[arguments[0]].scrollIntoView()", chart)
        _wait(browser, lambda chart=chart: browser.execute_script(DRAWN)[chart] > 5)
    assert len(browser.execute_script(DRAWN)) > 8
    light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    use_dark_theme(browser, is_dark=True)
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    # The browser tells the page of its theme and size a moment later.
    _wait(browser, lambda: browser.execute_script("return document.getElementById('theme').textContent") == "Light")
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == light
    logarithmic = "const each = document.querySelector('.logarithmic'); each.click(); return each.ariaPressed"
    assert [browser.execute_script(logarithmic) for _ in range(3)] == ["true", "false", "true"]
    _wait(browser, lambda: browser.execute_script(DRAWN)[0] > 5)
    resize(browser, PHONE)
    _wait(browser, lambda: browser.execute_script("return document.documentElement.scrollWidth") <= PHONE)
    assert _errors(browser) == []


class Pointer:
    """The mouse over a chart, at shares of its width and height."""

    def __init__(self, browser: Any, chart: int) -> None:
        self._browser, self._chart = browser, chart
        box = "const r = document.querySelectorAll('.plot')[arguments[0]].getBoundingClientRect(); return [r.x, r.y, r.width, r.height]"
        self._box = browser.execute_script(box, chart)

    def __call__(self, kind: str, across: float, down: float, **details: Any) -> None:
        x, y, width, height = self._box
        place = {"type": kind, "x": x + across * width, "y": y + down * height}
        self._browser.execute_cdp_cmd("Input.dispatchMouseEvent", place | details)

    def told(self) -> list[str]:
        """Each name of the legend with its value at the pointer."""
        script = "return [...document.querySelectorAll('.chart')[arguments[0]].querySelectorAll('.entry')].map(each => `${each.textContent}: ${each.dataset.value}`)"
        return self._browser.execute_script(script, self._chart)


@pytest.fixture
def charts(browser: Any, tmp_path: Path) -> tuple[Pointer, Pointer]:
    steps = list(range(1, 101))
    lines = [Line("one <b>", steps, [step / 100 for step in steps]), Line("two", [50], [0.5], "points", 1)]
    trials = Line("loss", [1e-4, 1e-2, 1e-3], [1.0, 2.0, 0.5], "dots")
    kinds = Line("loss", [0, 1, 1], [1.0, 2.0, 0.5], "dots")
    drawn = [
        Chart("Lines", lines, "two lines"),
        Chart("lr", [trials], "three trials", x_name="lr", has_log_x=True),
        Chart("kind", [kinds], "three trials", x_name="kind", x_texts=("a", "b")),
    ]
    page = Page("charts", "", "", [], [ReportSection("drawn", "Drawn", [Charts(drawn)])])
    use_dark_theme(browser, is_dark=False)
    resize(browser, WIDE)
    browser.get(write_page(page, tmp_path / "page.html").as_uri())
    _wait(browser, lambda: browser.execute_script("return document.documentElement.dataset.drawn") == "3")
    return Pointer(browser, 0), Pointer(browser, 1)


def _wait(browser: Any, is_so: Callable[[], Any]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, PATIENCE_SECONDS).until(lambda _: is_so())


def test_readers_see_values_hide_lines_and_enlarge_parts(browser: Any, charts: tuple[Pointer, Pointer]) -> None:
    pointer, _ = charts
    assert pointer.told() == ["one <b>: undefined", "two: undefined"]
    assert _step(browser, pointer, 0.93) > 90
    assert pointer.told()[1] == "two: 0.5 at 50"
    shown = browser.execute_script(DRAWN)[0]
    hidden = "const each = document.querySelectorAll('.entry')[1]; each.click(); return each.ariaPressed"
    assert browser.execute_script(hidden) == "false"
    _wait(browser, lambda: browser.execute_script(DRAWN)[0] < shown)
    before = browser.execute_script(DRAWN)[0]
    pointer("mousePressed", 0.3, 0.5, button="left", clickCount=1, buttons=1)
    for across in (0.4, 0.6):
        pointer("mouseMoved", across, 0.5, button="left", buttons=1)
    pointer("mouseReleased", 0.6, 0.5, button="left", clickCount=1)
    _wait(browser, lambda: _step(browser, pointer, 0.93) < 70)
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            pointer(kind, 0.5, 0.5, button="left", clickCount=count)
    _wait(browser, lambda: _step(browser, pointer, 0.93) > 90)
    assert browser.execute_script(DRAWN)[0] == before
    assert _errors(browser) == []


def _step(browser: Any, pointer: Pointer, across: float) -> int:
    """The step that the legend tells of the first line."""
    pointer("mouseMoved", across, 0.5)
    _wait(browser, lambda: " at " in pointer.told()[0])
    return int(pointer.told()[0].rpartition(" ")[2])


def test_readers_see_the_values_of_a_trial(browser: Any, charts: tuple[Pointer, Pointer]) -> None:
    _, pointer = charts
    pointer("mouseMoved", 0.93, 0.5)
    _wait(browser, lambda: pointer.told() == ["loss: 2 at 0.01"])
    assert all(colours > 5 for colours in browser.execute_script(DRAWN))
    assert _errors(browser) == []


def _errors(browser: Any) -> list[Any]:
    """What the console has but for a warning of these tests' own, who read colours of canvases."""
    return [entry for entry in browser.get_log("browser") if "getImageData" not in entry["message"]]
