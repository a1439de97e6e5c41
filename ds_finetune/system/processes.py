"""Processes: which one an id belongs to, signals, the end of a parent, and whether this one was paused.

A process is paused when it is stopped by SIGSTOP, frozen with its container, or suspended with its machine. That is no
hang, so the time limits of a process do not include a pause.
"""

import ctypes
import math
import os
import resource
import signal
import site
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LEAST_SECONDS = 4.0
_SWITCHES_PER_SECOND = 20
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On Linux it includes the time in which the machine was suspended; `time.monotonic` does not."""


def python_module(name: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """The command that runs a module of this project in another process, with `with_package(os.environ)`.

    A file of the working directory, such as `secrets.py`, is not imported in place of a module (-P).
    """
    return [python, "-P", "-u", "-m", name, *arguments]


def with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with a PYTHONPATH by which another process finds this project, also where it is not installed."""
    package = str(Path(__file__).parents[2])
    # Installed packages in PYTHONPATH would come before Python's own modules.
    if package in site.getsitepackages():
        return dict(environ)
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [package, environ.get("PYTHONPATH")]))}


def began_at(pid: int) -> str:
    """Start time of a process in the kernel's ticks; empty where no process has that id, or there is no /proc."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def has_ended(pid: int, began: str) -> bool:
    """Whether the process that began then has ended, or is a zombie; the id must be of the own namespace."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return not _exists(pid)
    except OSError:
        return False
    return stat[19] != began or stat[0] in "ZX"


def _exists(pid: int) -> bool:
    """Whether a process has that id, also where /proc hides those of other users (mounted with hidepid=2)."""
    try:
        os.kill(max(pid, 1), 0)
    except PermissionError:
        return pid > 0
    except (OSError, OverflowError):
        return False
    return pid > 0


def own_pid_namespace() -> str:
    """Identifies the PID namespace in which this process's id is valid: the machine's boot id and the namespace.

    Two processes with the same text can signal each other. Empty where there is no /proc.
    """
    namespace = Path("/proc/self/ns/pid")
    return f"{boot_id()} {namespace.readlink()}" if boot_id() and namespace.exists() else ""


def boot_id() -> str:
    """The same text for all processes of one running kernel, also in different containers; empty without /proc."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def echo_seconds(number: int) -> float:
    """Within how many seconds after a signal another one with this `number` is the same request.

    A scheduler signals every process of a job, a closing terminal sends two signals, and launchers and wrapper programs
    forward those that the processes have received themselves. Wrappers of a command in a terminal, as `uv run`, forward
    SIGINT at once, and whoever presses Ctrl-C again means it.
    """
    return 0.5 if number == signal.SIGINT else 2.0


@contextmanager
def handle_signals(handler: Callable[[int], object]) -> Iterator[None]:
    """Handle SIGINT, SIGTERM and SIGHUP by `handler`, once for a request and its echoes; ignored signals, as SIGHUP
    under `nohup`, stay ignored.
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


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send a signal to this process when its parent ends for any reason; no effect without prctl(2)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, number, 0, 0, 0)


@dataclass(frozen=True)
class Pause:
    """A time in which a thread did not run. Deadlines on the clock `time.monotonic` move by `monotonic_seconds`.

    `is_of_process` is false where the thread only waited, for example for Python's lock, which native code held.
    """

    seconds: float
    monotonic_seconds: float
    is_of_process: bool


class PauseDetector:
    """Detects pauses of one thread, which calls `last_pause` at least every second."""

    def __init__(self) -> None:
        self._looked_at, self._switches = _now(), _num_switches()

    def last_pause(self) -> Pause | None:
        """The pause since the previous call; None where there was none."""
        (before, before_monotonic), (now, monotonic) = self._looked_at, _now()
        switches, self._switches = self._switches, _num_switches()
        self._looked_at = now, monotonic
        seconds = now - before
        if seconds < _LEAST_SECONDS:
            return None
        # A thread that waits for Python's lock asks for it every 5 ms (Python 3.11, Python/ceval_gil.h, take_gil), and
        # the kernel counts each of these waits. A thread of a paused process does nothing.
        waited = self._switches - switches > _SWITCHES_PER_SECOND * seconds
        return Pause(seconds, monotonic - before_monotonic, is_of_process=not waited)


def _now() -> tuple[float, float]:
    return time.clock_gettime(_CLOCK), time.monotonic()


def _num_switches() -> int:
    """How often this thread (outside Linux: this process) has waited so far."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
