"""Pauses of a process, done to real ones with SIGSTOP and SIGCONT: they are recognised, and end nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pauses are told from waits by Linux's counters")

SECONDS = 120
LOOK = """
import ctypes, sys, time
from ds_finetune.system.processes import PauseDetector
detector, until = PauseDetector(), time.monotonic() + float(sys.argv[1])
print("ready", flush=True)
while time.monotonic() < until:
    time.sleep(0.1)
    if pause := detector.last_pause():
        print(pause.is_of_process, round(pause.seconds), round(pause.monotonic_seconds), flush=True)
"""
HOLD = """
import threading
threading.Thread(target=ctypes.PyDLL(None).sleep, args=(6,), daemon=True).start()
"""


@contextmanager
def _started(*argv: str) -> Iterator["subprocess.Popen[str]"]:
    """A program that has printed its first line."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", *argv], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def _pause(process: "subprocess.Popen[str]", seconds: float) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    # Nothing happens meanwhile: the time is what is tested.
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGCONT)


def test_a_pause_is_measured() -> None:
    with _started(LOOK, "6") as process:
        _pause(process, 5)
        printed = process.communicate(timeout=SECONDS)[0].split()
    assert printed[0] == "True"
    assert int(printed[1]) >= 5
    assert printed[1] == printed[2]


@pytest.mark.slow
def test_a_wait_for_pythons_lock_is_no_pause() -> None:
    with _started(LOOK.replace('print("ready"', f'{HOLD.strip()}\nprint("ready"'), "8") as process:
        assert process.communicate(timeout=SECONDS)[0].split()[::2] == ["False", "6"]
