"""The page in headless Chromium: its charts are drawn, without an error, in both themes and at a phone's width."""

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.runs.report.charts import Chart, Line
from ds_finetune.runs.report.page import Charts, Page, PageSection
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

    def drag(self, first: float, last: float) -> None:
        """Drag from one share of the chart's width to another. A chart that is being drawn may miss it."""
        self("mousePressed", first, 0.4, button="left", clickCount=1, buttons=1)
        for across in ((first + last) / 2, last):
            self("mouseMoved", across, 0.4, button="left", buttons=1)
        self("mouseReleased", last, 0.4, button="left", clickCount=1)

    def double_click(self) -> None:
        """Click twice in the middle of the chart, which a chart that is being drawn may miss."""
        for count in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                self(kind, 0.5, 0.4, button="left", clickCount=count)

    def tooltips(self) -> list[str]:
        """The texts of the chart's tooltips: of each line its name, and value and step at the pointer."""
        script = """
        const tips = node => [...node.querySelectorAll("*")].flatMap(each =>
          each.matches(".bk-tooltip-content") ? [each.textContent] : each.shadowRoot ? tips(each.shadowRoot) : []);
        return tips(document)
        """
        return [text.strip() for text in self._browser.execute_script(script) if text.strip()]


@pytest.fixture
def charts(browser: Any, tmp_path: Path) -> tuple[Pointer, Pointer]:
    steps = list(range(1, 101))
    lines = [Line("one <b>", steps, [step / 100 for step in steps]), Line("two", [50], [0.5], "points", 1)]
    trials = Line("loss", [1e-4, 1e-2, 1e-3], [1.0, 2.0, 0.5], "dots")
    kinds = Line("loss", ["a", "b", "b"], [1.0, 2.0, 0.5], "dots")
    drawn = [
        Chart("Lines", lines),
        Chart("lr", [trials], x_name="lr", has_log_x=True),
        Chart("kind", [kinds], x_name="kind", categories=("a", "b")),
    ]
    page = Page("charts", "", "", [], [PageSection("drawn", "Drawn", [Charts(drawn)])])
    use_dark_theme(browser, is_dark=False)
    resize(browser, WIDE)
    browser.get(write_page(page, tmp_path / "page.html").as_uri())
    _wait(browser, lambda: min(browser.execute_script(DRAWN)) > 5)
    return Pointer(browser, 0), Pointer(browser, 1)


def _wait(browser: Any, is_so: Callable[[], Any]) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, PATIENCE_SECONDS).until(lambda _: is_so())


def test_readers_see_values_hide_lines_and_enlarge_parts(browser: Any, charts: tuple[Pointer, Pointer]) -> None:
    pointer, _ = charts
    assert pointer.tooltips() == []
    before = _step(browser, pointer, 0.9)
    assert before > 85
    hidden = """
    const [legend] = Bokeh.documents.flatMap(each => each.roots()).flatMap(plot => [...plot.references()]).filter(each => each.type === "Legend");
    return [legend.click_policy, legend.items.map(item => item.renderers.length)]
    """
    assert browser.execute_script(hidden) == ["hide", [1, 2]], "a line, and points joined by a line"
    for most in (70, 60):
        _wait(browser, lambda most=most: pointer.drag(0.3, 0.6) or _step(browser, pointer, 0.9) < most)
    _wait(browser, lambda: pointer.double_click() or _step(browser, pointer, 0.9) == before)
    assert _errors(browser) == []


def _step(browser: Any, pointer: Pointer, across: float) -> int:
    """The step that the tooltip of the first line shows."""
    # The pointer moves until the chart has a tooltip: a chart that is being drawn misses a movement.
    nudges = cycle((0.0, 0.001))

    def shown() -> list[str]:
        pointer("mouseMoved", across + next(nudges), 0.4)
        return [text for text in pointer.tooltips() if "one <b>: " in text]

    _wait(browser, shown)
    return int(shown()[0].rpartition(" ")[2])


def test_readers_see_the_values_of_a_trial(browser: Any, charts: tuple[Pointer, Pointer]) -> None:
    _, pointer = charts
    places = cycle(range(930, 966, 3))

    def shown() -> bool:
        pointer("mouseMoved", next(places) / 1000, 0.4)
        return "loss: 2 at 1.000e-2" in pointer.tooltips()

    _wait(browser, shown)
    assert all(colours > 5 for colours in browser.execute_script(DRAWN))
    assert _errors(browser) == []


def _errors(browser: Any) -> list[Any]:
    """What the console has but for a warning of these tests' own, who read colours of canvases."""
    return [entry for entry in browser.get_log("browser") if "getImageData" not in entry["message"]]
