"""The served page in headless Chromium: it shows new steps in the charts that are there, and works by keyboard and at a
phone's width, without an error.

Debian's packages chromium and chromium-driver have what these tests need.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import NEEDS_BROWSER, open_browser, resize
from tests.conftest import ROOT
from tests.runs.report.made_runs import metric_lines
from tests.runs.test_folder import make_run, own_status
from tests.runs.watch.test_app import ODD

pytestmark = NEEDS_BROWSER
PATIENCE_SECONDS = 120.0
PHONE, WIDE = 390, 1200
POINTS = """
return Bokeh.documents.flatMap(each => each.roots()).flatMap(plot => [...plot.references()])
  .filter(each => each.type === "ColumnDataSource").map(each => Array.from(each.data.x))
"""
"""The steps that each line of the charts in sight has."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name in ("a", "b", ODD):
        make_run(root / name, steps=40)
    (root / "b" / "config.yaml").write_text("optim: {lr: 0.002}\n")
    (root / "a" / "log.txt").write_text(
        "".join(f"step {step} with a long line of output {'x' * 90}\n" for step in range(90))
    )
    own_status().write(root / "a")
    (root / "b" / "status.json").write_text(json.dumps({"state": "hung", "reason": "rank 1 does not answer" * 6}))
    return root


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "ds_finetune", "watch", str(runs), "--port", "0"]
    environ = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"watching {runs}\n"
        yield server.stdout.readline().split()[1]
        server.send_signal(signal.SIGINT)
        assert server.wait(PATIENCE_SECONDS) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


@pytest.fixture
def page(browser: Any, address: str) -> Iterator["Page"]:
    shown = Page(browser, address)
    resize(browser, WIDE)
    shown.open()
    yield shown
    assert browser.get_log("browser") == [], "errors in the console"


class Page:
    """The page in a browser, and what a person does to it."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, path: str = "") -> None:
        self.browser.get(self.address + path)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()

    def wait_for(self, is_so: Callable[[], Any]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            assert time.monotonic() < until, self.run("return document.body.innerText")[:3000]
            time.sleep(0.02)

    def wait_for_charts(self, number: int = 1) -> None:
        self.wait_for(lambda: self.run("return Bokeh.documents.length") >= number)


def test_the_table_shows_runs_as_text_and_new_ones(page: Page, runs: Path) -> None:
    assert sorted(page.texts("tbody a")) == sorted(["a", "b", ODD])
    assert page.run("return document.querySelectorAll('main img').length") == 0
    page.run("document.querySelector('[value=b]').click(); document.querySelector('[value=b]').focus()")
    make_run(runs / "later")
    page.wait_for(lambda: "later" in page.texts("tbody a"))
    shutil.rmtree(runs / "later")
    page.wait_for(lambda: "later" not in page.texts("tbody a"))
    assert page.run("return document.querySelector('[value=b]').checked"), "what is ticked stays"
    assert page.run("return document.activeElement.value") == "b", "what is in focus stays"


def test_new_steps_are_added_to_the_charts_that_are_there(page: Page, runs: Path) -> None:
    page.open("run?run=a")
    page.wait_for_charts()
    assert page.run(POINTS)[0] == list(range(1, 41))
    tail = (
        "const tail = document.querySelector('.tail'); return [tail.scrollHeight > tail.clientHeight, tail.scrollTop]"
    )
    assert page.run(tail) == [True, 0], "a box that is scrolled to its end, from which it counts"
    page.run("window.isSame = true; document.querySelectorAll('details')[0].open = true")
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "train/loss": 0.0625, "perf/eta_seconds": 90.0}\n')
    page.wait_for(lambda: page.run(POINTS)[0] == list(range(1, 42)))
    page.wait_for(lambda: "0.0625" in page.text(".tiles"))
    assert "2 min" in page.text(".tiles")
    assert page.run("return window.isSame && document.querySelectorAll('details')[0].open"), "it was not loaded again"
    # A metric that is new has a chart of its own, with which the page is loaded again.
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 42, "train/loss": 0.05, "train/later": 1}\n')
    page.wait_for(lambda: "later" in page.texts("figcaption"))


def test_a_failure_and_its_reason_are_shown_at_once(page: Page, runs: Path) -> None:
    make_run(runs / "c")
    own_status().write(runs / "c")
    page.wait_for(lambda: "c" in page.texts("tbody a"))
    page.open("run?run=c")
    (runs / "c" / "status.json").write_text('{"state": "failed", "reason": "rank 1 <b>met</b> OSError"}')
    page.wait_for(lambda: "rank 1 <b>met</b> OSError" in page.text(".subtitle"))
    assert page.text("h1 .state") == "failed"
    shutil.rmtree(runs / "c")
    page.wait_for(lambda: "there is no run" in page.text("#link"))
    # The browser itself reports the answer 404.
    page.open()
    assert all("404" in entry["message"] for entry in page.browser.get_log("browser"))


def test_runs_are_compared_by_keyboard(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    for name in ("a", "b"):
        page.run("document.querySelector(`[value=${arguments[0]}]`).focus()", name)
        page.press(Keys.SPACE)
    page.run("document.querySelector('form button').focus()")
    page.press(Keys.ENTER)
    page.wait_for(lambda: page.text("h1") == "2 runs compared")
    assert "optim.lr0.0010.002" in page.text("[data-part='differences 1']").replace("\n", "").replace(" ", "")
    page.wait_for_charts()


def test_nothing_is_wider_than_a_phone(page: Page) -> None:
    resize(page.browser, PHONE)
    for path in ("", "run?run=a", "run?run=a&run=b"):
        page.open(path)
        page.wait_for(lambda: page.texts("h2"))
        assert page.run("return document.documentElement.scrollWidth") == PHONE, path


def test_a_run_of_many_steps_and_ranks_has_few_points_in_the_browser(page: Page, runs: Path) -> None:
    """Also after it has grown: a chart is drawn again with each step, which takes time by its points."""
    steps, ranks = 5_000, 8
    lines = metric_lines(steps, every=100)
    run = make_run(runs / "large")
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    seconds = [
        {"step": step, "seconds": [0.2 + (step * rank) % 7 / 70 for rank in range(ranks)]}
        for step in range(1, steps + 1)
    ]
    (run / "ranks.jsonl").write_text("".join(json.dumps(record) + "\n" for record in seconds))
    own_status().write(run)
    page.wait_for(lambda: "large" in page.texts("tbody a"))
    page.open("run?run=large")
    charts = page.run("return document.querySelectorAll('.plot').length")
    for chart in range(charts):
        page.run("document.querySelectorAll('.plot')[arguments[0]].scrollIntoView()", chart)
        page.wait_for_charts(chart + 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(json.loads(lines[-1]) | {"step": steps + 1}) + "\n")
    page.wait_for(lambda: steps + 1 in page.run(POINTS)[0])
    sizes = [len(points) for points in page.run(POINTS)]
    assert len(sizes) > 20
    assert max(sizes) <= 1_201
    shutil.rmtree(run)
