"""Pauses of a process, done to real ones with SIGSTOP and SIGCONT: they are recognised, and end nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_finetune.cluster.watchdog.kills import BACKSTOP_SECONDS
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
ARM = """
import sys, time, ctypes
from pathlib import Path
from ds_finetune.cluster.watchdog import kills
kills.BACKSTOP_SECONDS = kills._SECOND_SECONDS + 1
file = kills.StackFile(Path(sys.argv[1]), 0)
file.arm(time.monotonic() + 0.5)
print("ready", flush=True)
if sys.argv[2] == "hold":
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
sys.stdin.readline()
file.resume()
file.arm(time.monotonic() + 100)
print(file.path.stat().st_size, flush=True)
file.close()
"""
FULL = """
import faulthandler, sys, threading, time
from pathlib import Path
from ds_finetune.cluster.watchdog import kills
refusals = [True]
def refuse_once(*args, **options):
    refusals.pop()
    raise RuntimeError("unable to start watchdog thread")
faulthandler.dump_traceback_later = refuse_once
file, until = kills.StackFile(Path(sys.argv[1]), 0), time.monotonic() + 100
file.arm(until)
assert not refusals
print("ready", flush=True)
faulthandler.dump_traceback_later = lambda *args, **options: print("armed", flush=True)
file.arm(until)
file.arm(until)
file.close()
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


def test_a_pause_is_measured(tmp_path: Path) -> None:
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


@pytest.mark.slow
def test_a_paused_process_can_set_its_end_timer_anew(tmp_path: Path) -> None:
    """The pause is longer than the time until the timer's first signal and the stacks."""
    with _started(ARM, str(tmp_path), "go") as process:
        _pause(process, BACKSTOP_SECONDS / 2 + 3)
        printed, _ = process.communicate("go\n", timeout=SECONDS)
    assert (process.returncode, printed) == (0, "0\n")


@pytest.mark.slow
def test_native_code_that_holds_the_lock_is_ended(tmp_path: Path) -> None:
    with _started(ARM, str(tmp_path), "hold") as process:
        assert process.wait(SECONDS) == -signal.SIGALRM
    assert "Timeout (" in (tmp_path / "watchdog" / "rank-00000.txt").read_text()


def test_a_timer_that_has_no_memory_for_its_thread_is_set_later(tmp_path: Path) -> None:
    with _started(FULL, str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.read().split() == ["armed"]
        assert process.wait(SECONDS) == 0
