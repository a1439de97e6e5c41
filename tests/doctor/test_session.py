"""A conversation with a real process: answers, refusals, deaths and silence; and nothing is left when it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_finetune.doctor.session import HostLostError, RefusedError, Session
from tests.conftest import ROOT

ANSWERING = """
import subprocess, time
from ds_finetune.doctor.session import answer_requests
from ds_finetune.errors import ConfigError

def refuse(value):
    raise ConfigError(f"{value} is wrong", hint="another")

def noisy():
    print("a library prints")
    return "heard"

def child():
    return subprocess.Popen(["sleep", "100"]).pid

verbs = {"add": lambda a, b: a + b, "refuse": refuse, "noisy": noisy, "child": child, "wait": lambda: time.sleep(100), "divide": lambda: 1 // 0}
answer_requests(verbs, seconds=60)
"""


@pytest.fixture
def session() -> Iterator[Session]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ANSWERING]
    opened = Session(
        lambda log: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ)
    )
    yield opened
    opened.end()


def test_answers_and_refusals(session: Session) -> None:
    assert session.ask("add", {"a": [1], "b": [2]}, seconds=20) == [1, 2]
    with pytest.raises(RefusedError, match="7 is wrong") as refused:
        session.ask("refuse", {"value": 7}, seconds=20)
    assert refused.value.hint == "another"
    assert session.ask("noisy", seconds=20) == "heard"
    assert session.said() == "a library prints"


def test_what_a_login_shell_prints_is_no_answer() -> None:
    printed = """echo 'Welcome to gpu-1!'; echo '{"value": 3}'; echo 5; echo null; printf 'without an end'"""
    command = ["sh", "-c", f'{printed}; exec "$0" -c "$1"', sys.executable, ANSWERING]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    opened = Session(
        lambda log: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ)
    )
    assert opened.ask("add", {"a": 40, "b": 2}, seconds=60) == 42
    with pytest.raises(RefusedError, match="7 is wrong"):
        opened.ask("refuse", {"value": 7}, seconds=60)
    opened.end()


def test_a_mistake_ends_it_with_its_text(session: Session) -> None:
    with pytest.raises(HostLostError) as lost:
        session.ask("divide", seconds=20)
    assert lost.value.code == 1
    assert lost.value.said.endswith("ZeroDivisionError: integer division or modulo by zero")


def test_silence_is_bounded(session: Session) -> None:
    assert session.ask("add", {"a": 1, "b": 2}, seconds=20) == 3
    began = time.monotonic()
    with pytest.raises(HostLostError) as lost:
        session.ask("wait", seconds=0.5)
    assert lost.value.code is None
    assert 0.5 <= time.monotonic() - began < 5


def test_what_it_started_ends_with_it(session: Session) -> None:
    pid = session.ask("child", seconds=20)
    assert Path(f"/proc/{pid}").exists()
    session.process.stdin.close()  # type: ignore[union-attr]
    assert session.process.wait(10) == -signal.SIGKILL
    until = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
