"""Processes: whether one with a given id has ended, signals, the end of a parent, and pauses of this process.

A process is paused when it is stopped by SIGSTOP, frozen with its container, or suspended with its machine. A pause is
not a hang, so it does not count towards time limits.
"""

import ctypes
import math
import os
import re
import resource
import signal
import site
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

INTERRUPT_EXIT_CODE = 128 + signal.SIGINT
"""Exit code of a command that Ctrl-C ended, as shells use it. (A run that saves after Ctrl-C exits with 3.)"""
_PROC = Path("/proc")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_LEAST_SECONDS = 4.0
_SWITCHES_PER_SECOND = 20
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Clock that also counts time in which the machine was suspended (on Linux), unlike `time.monotonic`."""


def python_module(name: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Make the command that runs a module of this project in another process, in the environment
    `with_package(os.environ)`.

    With -P, a file of the working directory, such as `secrets.py`, cannot take the place of a module.
    """
    return [python, "-P", "-u", "-m", name, *arguments]


def with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """Copy of `environ` with a PYTHONPATH by which another process finds this project, even if it is not installed."""
    package = str(Path(__file__).parents[2])
    # An installed package is found without PYTHONPATH; site-packages in it would precede Python's own modules.
    if package in site.getsitepackages():
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, environ.get("PYTHONPATH")]))}


def began_at(pid: int) -> str:
    """Start time of a process in kernel ticks; empty without such a process, or without /proc."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def has_ended(pid: int, began: str) -> bool:
    """Whether the process with this id and start time has ended or is a zombie; `pid` counts in this PID namespace."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return not _exists(pid)
    except OSError:
        return False
    return stat[19] != began or stat[0] in "ZX"


def _exists(pid: int) -> bool:
    """Whether a process with this id exists, even where /proc hides other users' processes (hidepid=2)."""
    try:
        os.kill(max(pid, 1), 0)
    except PermissionError:
        return pid > 0
    except (OSError, OverflowError):
        return False
    return pid > 0


def own_namespace(kind: str) -> str:
    """Boot id of the machine, and this process's namespace of type `kind`, such as `pid` or `net`; empty without /proc.
    Two processes can send each other signals if their texts for `pid` are equal.
    """
    namespace = Path("/proc/self/ns", kind)
    return f"{boot_id()} {namespace.readlink()}" if boot_id() and namespace.exists() else ""


def boot_id() -> str:
    """Identifier of the kernel's current boot, equal in all containers of the machine; empty without /proc."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def oom_kills() -> int:
    """Number of processes that this machine's kernel has killed for lack of memory (Linux 4.13 and later; else 0)."""
    with suppress(OSError):
        if match := _OOM_KILLS.search((_PROC / "vmstat").read_text()):
            return int(match[1])
    return 0


def echo_seconds(number: int) -> float:
    """Seconds for which another signal `number` counts as an echo of the previous signal, not as a new request.

    A scheduler signals every process of a job, a closing terminal sends two signals, and launchers and wrappers forward
    signals that the processes have received already. Wrappers in a terminal, such as `uv run`, forward SIGINT at once;
    a second Ctrl-C after that is a new request.
    """
    return 0.5 if number == signal.SIGINT else 2.0


@contextmanager
def handle_signals(handler: Callable[[int], object]) -> Iterator[None]:
    """Context in which `handler` gets SIGINT, SIGTERM and SIGHUP, once for a request and its echoes. Ignored signals,
    such as SIGHUP under `nohup`, stay ignored.
    """
    latest = -math.inf

    def handle(number: int, _: object) -> None:
        nonlocal latest
        if (now := time.monotonic()) - latest > echo_seconds(number):
            latest = now
            handler(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handled = [number for number in signals if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Context in which Ctrl-C ends the process and prints one line.

    It surrounds imports, which take seconds and need no cleaning up. KeyboardInterrupt would print their traceback, or
    an imported package would catch it.
    """
    before = signal.getsignal(signal.SIGINT)
    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPT_EXIT_CODE)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when the thread that started it ends; needs prctl(2)."""
    with suppress(OSError, AttributeError):
        # Option 1 of prctl(2) is PR_SET_PDEATHSIG.
        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)


@dataclass(frozen=True)
class Pause:
    """A time in which a thread did not run. Deadlines on `time.monotonic` must be extended by `monotonic_seconds`.

    `is_of_process` is false if only this thread waited, for example for Python's lock while native code held it.
    """

    seconds: float
    monotonic_seconds: float
    is_of_process: bool


class PauseDetector:
    """Detects pauses of a thread, which must call `last_pause` at least once a second."""

    def __init__(self) -> None:
        self._looked_at, self._switches = _now(), _num_switches()

    def last_pause(self) -> Pause | None:
        """The thread's pause since the previous call; None if there was none."""
        (before, before_monotonic), (now, monotonic) = self._looked_at, _now()
        switches, self._switches = self._switches, _num_switches()
        self._looked_at = now, monotonic
        seconds = now - before
        if seconds < _LEAST_SECONDS:
            return None
        # Context switches tell a waiting thread from a paused process. A thread that waits for Python's lock requests
        # it every 5 ms (Python 3.11, Python/ceval_gil.h, take_gil), and the kernel counts each wait. A paused thread
        # makes no context switches.
        waited = self._switches - switches > _SWITCHES_PER_SECOND * seconds
        return Pause(seconds, monotonic - before_monotonic, is_of_process=not waited)


def _now() -> tuple[float, float]:
    return time.clock_gettime(_CLOCK), time.monotonic()


def _num_switches() -> int:
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
