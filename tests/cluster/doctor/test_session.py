"""A session with a real process: replies, refusals, its end and its silence; and nothing is left when it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_finetune.cluster.doctor.session import HostLostError, RefusedError, Session
from ds_finetune.system.process_messages import MessageError, ProcessMessage
from tests.conftest import ROOT


class Add(ProcessMessage, kind="add"):
    a: list[int]
    b: list[int]


class Sum(ProcessMessage, kind="sum"):
    value: list[int]


class Number(ProcessMessage, kind="number"):
    value: int


class Refuse(ProcessMessage, kind="refuse"):
    value: int


class Print(ProcessMessage, kind="print"):
    """Answered after a library has printed."""


class StartChild(ProcessMessage, kind="start-child"):
    """Answered with the process id of a child that runs on."""


class Wait(ProcessMessage, kind="wait"):
    """Never answered."""


class Divide(ProcessMessage, kind="divide"):
    """Fails with an exception that is no FinetuneError."""


ANSWERING = """
import subprocess, time
from ds_finetune.cluster.doctor.session import answer_requests
from ds_finetune.errors import ConfigError
from tests.cluster.doctor.test_session import Add, Divide, Number, Print, Refuse, StartChild, Sum, Wait

def refuse(request):
    raise ConfigError(f"{request.value} is wrong", hint="another")

def print_and_reply(_):
    print("a library prints")
    return Number(7)

handlers = {
    Add: lambda request: Sum(request.a + request.b),
    Refuse: refuse,
    Print: print_and_reply,
    StartChild: lambda _: Number(subprocess.Popen(["sleep", "100"]).pid),
    Wait: lambda _: time.sleep(100),
    Divide: lambda _: 1 // 0,
}
answer_requests(handlers, seconds=60)
"""


@pytest.fixture
def session() -> Iterator[Session]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", ANSWERING]
    opened = Session(
        lambda log: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ),
        (Sum, Number),
        peer="the test's program",
    )
    yield opened
    opened.end()


def test_answers_and_refusals(session: Session) -> None:
    assert session.ask(Add([1], [2]), Sum, seconds=60) == Sum([1, 2])
    with pytest.raises(RefusedError, match="7 is wrong") as refused:
        session.ask(Refuse(7), Number, seconds=60)
    assert refused.value.hint == "another"
    assert session.ask(Print(), Number, seconds=60) == Number(7)
    assert session.stderr() == "a library prints"


def test_a_reply_of_another_type_names_the_program(session: Session) -> None:
    with pytest.raises(MessageError, match="the test's program sent a message that cannot be read: it is a sum"):
        session.ask(Add([1], [2]), Number, seconds=60)


def test_a_request_without_a_handler_ends_the_program(session: Session) -> None:
    with pytest.raises(HostLostError, match="the program that asks sent a message that cannot be read"):
        session.ask(Sum([1]), Number, seconds=60)


def test_what_a_login_shell_prints_is_no_answer() -> None:
    printed = """echo 'Welcome to gpu-1!'; echo '{"value": 3}'; echo 5; echo null; printf 'without an end'"""
    command = ["sh", "-c", f'{printed}; exec "$0" -c "$1"', sys.executable, ANSWERING]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    opened = Session(
        lambda log: subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ),
        (Sum, Number),
        peer="the test's program",
    )
    assert opened.ask(Add([40], [2]), Sum, seconds=60) == Sum([40, 2])
    with pytest.raises(RefusedError, match="7 is wrong"):
        opened.ask(Refuse(7), Number, seconds=60)
    opened.end()


def test_a_mistake_ends_it_with_its_text(session: Session) -> None:
    with pytest.raises(HostLostError) as lost:
        session.ask(Divide(), Number, seconds=60)
    assert lost.value.code == 1
    assert lost.value.stderr.endswith("ZeroDivisionError: integer division or modulo by zero")


def test_silence_is_bounded(session: Session) -> None:
    assert session.ask(Add([1], [2]), Sum, seconds=60) == Sum([1, 2])
    began = time.monotonic()
    with pytest.raises(HostLostError) as lost:
        session.ask(Wait(), Number, seconds=0.5)
    assert lost.value.code is None
    assert 0.5 <= time.monotonic() - began < 60


def test_what_it_started_ends_with_it(session: Session) -> None:
    pid = session.ask(StartChild(), Number, seconds=60).value
    assert Path(f"/proc/{pid}").exists()
    session.process.stdin.close()  # type: ignore[union-attr]
    assert session.process.wait(60) == -signal.SIGKILL
    until = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
