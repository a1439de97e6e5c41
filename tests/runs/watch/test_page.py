"""The page in headless Chromium: it loads, shows new steps, works by keyboard and at a phone's width, without an error.

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
from urllib.parse import quote

import pytest

from tests.browser import NEEDS_BROWSER, open_browser
from tests.conftest import ROOT
from tests.runs.test_folder import make_run, own_status
from tests.runs.watch.test_app import ODD

pytestmark = NEEDS_BROWSER
PATIENCE_SECONDS = 120.0
PHONE = 390


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name in ("a", "b", ODD):
        make_run(root / name, steps=30)
    (root / "b" / "config.yaml").write_text("optim: {lr: 0.002}\n")
    (root / "a" / "log.txt").write_text(
        "".join(f"step {step} with a long line of output {'x' * 90}\n" for step in range(90))
    )
    own_status().write(root / "a")
    answer = {"text": "<b>5</b>", "reward": 1.0, "parts": {"number": 1.0}, "advantage": 0.5, "finish": "stop"}
    lines = [{"step": step, "prompt": "2 + 3 =", "answers": [answer]} for step in (1, 2)]
    (root / "a" / "rollouts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
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
    shown.resize(1200)
    shown.open()
    yield shown
    assert browser.get_log("browser") == [], "errors in the console"


class Page:
    """The page in a browser, and what a person does to it."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self, path: str = "") -> None:
        self.browser.get("about:blank")
        self.browser.get(self.address + path)
        self.wait_for(lambda: self.text("#link-state") == "live")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def texts(self, selector: str) -> list[str]:
        return self.run("return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)", selector)

    def focused(self) -> str:
        return self.run("const e = document.activeElement; return e.id || e.ariaLabel || e.textContent.trim()")

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()

    def resize(self, width: int) -> None:
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def wait_for(self, is_so: Callable[[], Any]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            assert time.monotonic() < until, self.run("return document.body.innerText")[:3000]
            time.sleep(0.02)


def test_a_run_shows_its_latest_sampled_answers_as_text(page: Page) -> None:
    page.open("#run=a")
    page.wait_for(lambda: page.texts(".samples dd"))
    assert page.texts(".samples .sub") == ["before step 2"]
    assert page.texts(".samples dd") == ["2 + 3 =", "<b>5</b>", "reward 1.0 (number 1.0), advantage 0.5, stop"]


def test_the_list_shows_runs_as_text_and_new_ones(page: Page, runs: Path) -> None:
    assert sorted(page.texts(".runs .name a")) == sorted(["a", "b", ODD])
    assert page.texts(".runs .badge")[1:] == ["hung", "unknown"]
    assert page.run("return document.querySelectorAll('main img').length") == 0
    make_run(runs / "later")
    page.wait_for(lambda: "later" in page.texts(".runs .name a"))
    shutil.rmtree(runs / "later")
    page.wait_for(lambda: "later" not in page.texts(".runs .name a"))


def test_a_new_step_appears_in_the_curve(page: Page, runs: Path) -> None:
    page.open("#run=a")
    page.wait_for(lambda: page.run("return document.querySelectorAll('.chart .bk-Plot').length"))
    assert page.text("[data-metric='train/loss'] .last") == "0.1"
    assert page.text("pre.log").endswith("x\n")
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "train/loss": 0.0625, "train/later": 1}) + "\n")
    page.wait_for(lambda: page.text("[data-metric='train/loss'] .last") == "0.0625")
    page.wait_for(lambda: "31 of 9 steps" in page.text(".facts"))


def test_runs_that_are_compared_are_asked_for_once_or_twice(page: Page) -> None:
    counted = "return performance.getEntriesByType('resource').filter(e => e.name.includes(arguments[0])).length"
    page.open(f"#run=a&run=b&run={quote(ODD)}")
    page.wait_for(lambda: page.run(counted, "/api/run?") >= 6)
    time.sleep(0.5)
    assert page.run(counted, "/api/run?") == 6
    assert page.run(counted, "/api/curves") <= 3


@pytest.mark.slow
def test_a_failure_and_its_reason_are_shown_at_once(page: Page, runs: Path) -> None:
    make_run(runs / "c")
    own_status().write(runs / "c")
    page.wait_for(lambda: "c" in page.texts(".runs .name a"))
    page.open("#run=c")
    (runs / "c" / "status.json").write_text('{"state": "failed", "reason": "rank 1 <b>met</b> OSError"}')
    page.wait_for(lambda: page.text("p.reason") == "rank 1 <b>met</b> OSError")
    assert page.text("h2 .badge") == "failed"
    shutil.rmtree(runs / "c")
    page.wait_for(lambda: "there is no run" in page.text(".problem"))
    # The browser itself reports the answer 404.
    assert all("404" in entry["message"] for entry in page.browser.get_log("browser"))
    page.open()


def test_the_page_works_by_keyboard(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.press("/", "b", Keys.ESCAPE)
    page.press("/")
    assert page.focused() == "filter"
    page.press("b")
    page.wait_for(lambda: page.text(".count").startswith("1 of 3 runs"))
    page.press(Keys.ESCAPE)
    page.run("document.querySelector('#filter').focus()")
    page.press(Keys.TAB)
    assert page.focused() == "Compare a"
    page.press(Keys.SPACE, Keys.TAB, Keys.TAB)
    assert page.focused() == "Compare b"
    page.press(Keys.SPACE)
    assert page.text("#compare") == "Compare 2"
    page.press("c")
    page.wait_for(lambda: page.texts(".rest td") == ["optim.lr", "0.001", "0.002"])
    assert page.texts(".head td a") == ["a", "b"]
    page.press(Keys.ESCAPE)
    page.wait_for(lambda: page.text("#compare") == "Compare 2")
    page.run("document.querySelector('.runs .name a').focus()")
    page.press(Keys.ENTER)
    page.wait_for(lambda: page.text("h2").startswith("a "))
    page.press(Keys.TAB)
    assert page.focused() == "back", "the focus is moved to what is shown"


def test_nothing_is_wider_than_a_phone(page: Page) -> None:
    page.resize(PHONE)
    page.wait_for(lambda: page.texts(".runs a"))
    assert page.run("return document.documentElement.scrollWidth") == PHONE
    wide = "return [...document.querySelectorAll('main a, main .badge, figure')].filter(e => e.getBoundingClientRect().right > innerWidth && !e.closest('.scroll')).map(e => e.outerHTML)"
    assert page.run(wide) == []
    for path in ("#run=a", "#run=a&run=b"):
        page.run("location.hash = arguments[0]", path)
        page.wait_for(lambda: page.texts("h2"))
        assert page.run("return document.documentElement.scrollWidth") == PHONE, path
        assert page.run(wide) == [], path


@pytest.mark.slow
def test_colours_follow_the_button_and_stay(page: Page) -> None:
    def is_dark() -> bool:
        return page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 29)"

    before = is_dark()
    page.run("document.querySelector('#theme').click()")
    assert is_dark() != before
    page.open("#run=a")
    assert is_dark() != before
    page.run("localStorage.clear()")
