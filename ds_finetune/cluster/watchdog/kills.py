"""Ends hung ranks with their stacks on file, and finds out why a process died that reported no error.

The supervisor of `ds-finetune launch` imports this module and must start quickly, so it imports no torch.
"""

import ctypes
import faulthandler
import json
import math
import os
import re
import signal
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ds_finetune.runs.status import try_to_finish
from ds_finetune.system.processes import began_at

if TYPE_CHECKING:
    from ds_finetune.cluster.watchdog.progress import RankStatus

FOLDER = "watchdog"
"""Folder in the run directory for the report, stacks and the records of kills."""
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CALLS = 10
BACKSTOP_SECONDS = 25.0
"""How long after its limit a rank's own timer ends it, where native code holds Python's lock."""
_SECOND_SECONDS = float(signal.SIGALRM)
_DUMP_SECONDS = BACKSTOP_SECONDS / 2


def record_kill(folder: Path, pid: int, began: str, why: str) -> None:
    """Record that this program is about to kill a process; `folder` is FOLDER in the run directory."""
    _write_reason(folder / f"killed-{pid}.json", began, why)


def why_killed(folder: Path, pid: int, began: str) -> str:
    """The reason that `record_kill` recorded for a process; empty where there is no record that can be read."""
    return _read_reason(folder / f"killed-{pid}.json", began)


def record_cause(folder: Path, cause: str) -> None:
    """Record why the run ends, just before this process ends for it."""
    _write_reason(folder / f"cause-{os.getpid()}.json", began_at(os.getpid()), cause)


def recorded_cause(folder: Path, pid: int, began: str) -> str:
    """What a process recorded by `record_cause`; empty where it has recorded nothing."""
    return _read_reason(folder / f"cause-{pid}.json", began)


def _write_reason(path: Path, began: str, why: str) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"began": began, "why": why}), encoding="utf-8")


def _read_reason(path: Path, began: str) -> str:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(record.get("why", "")) if isinstance(record, dict) and record.get("began") == began else ""


def stacks_path(folder: Path, rank: int) -> Path:
    """The file with the stacks of a rank."""
    return folder / f"rank-{rank:05}.txt"


def file_bytes(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def was_ended_by_timer(stacks: Path, after: int) -> bool:
    """Whether a rank was ended by its own timer (`StackFile.arm`), as happens when native code holds Python's lock.

    The timer writes `Timeout (` before the stacks (Python 3.11, Modules/faulthandler.c). This run's stacks begin at
    byte `after` of the file.
    """
    try:
        return b"Timeout (" in stacks.read_bytes()[after:]
    except OSError:
        return False


def oom_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Number of processes that this machine's kernel has killed for lack of memory (Linux 4.13 and later; else 0)."""
    try:
        match = _OOM_KILLS.search(path.read_text())
    except OSError:
        return 0
    return int(match[1]) if match else 0


class StackFile:
    """The file `FOLDER/rank-00003.txt` in the run directory; it is removed at the end if it is empty.

    SIGQUIT makes the process append its stacks, even while native code holds Python's lock. The signal does not end
    the process, so no core file is written.
    """

    def __init__(self, output_dir: Path, rank: int) -> None:
        self.path = stacks_path(output_dir / FOLDER, rank)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = self.path.open("a", encoding="utf-8")
        self._armed_until, self._bytes_when_armed = math.inf, 0
        self._end_timer = _EndTimer()
        self._lock = threading.Lock()
        self._is_closed = False
        faulthandler.register(signal.SIGQUIT, file=self._file, all_threads=True)

    def write(self, status: "RankStatus") -> None:
        """Append what the rank is doing, and the stack of each thread."""
        with self._lock:
            if self._is_closed:
                return
            self._file.write(
                f"{datetime.now().astimezone().isoformat(timespec='seconds')} rank {status.rank} {status}\n"
            )
            self._file.writelines(f"  {call}\n" for call in status.recent[-_CALLS:])
            self._file.flush()
            faulthandler.dump_traceback(file=self._file, all_threads=True)

    def arm(self, until: float) -> None:
        """Set timers that write the stacks and end this process BACKSTOP_SECONDS after `until` (monotonic).

        A later call replaces them. They are a thread in C (Python 3.11, Modules/faulthandler.c) and the kernel's, so
        they work even while native code holds Python's lock. While the stacks are being written, the timers stay as
        they are: the file system may not answer.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if until == self._armed_until or self._is_closed:
                return
            self._armed_until = until
            self._bytes_when_armed = os.fstat(self._file.fileno()).st_size
            if math.isinf(until):
                self._disarm()
                return
            seconds = max(until - time.monotonic(), 0)
            is_two_stage = self._end_timer.set(seconds + BACKSTOP_SECONDS)
            dump_seconds = seconds + (_DUMP_SECONDS if is_two_stage else BACKSTOP_SECONDS)
            faulthandler.dump_traceback_later(dump_seconds, file=self._file, exit=not is_two_stage)
        except RuntimeError:
            # There is no memory for its thread, e.g. with a limit of the address space. The next call tries again.
            self._armed_until = math.nan
        finally:
            self._lock.release()

    def resume(self) -> None:
        """Stop the timers after a pause of the process, and remove the stacks that they have written because of it."""
        with self._lock:
            if not self._is_closed:
                self._armed_until = math.inf
                self._disarm()
                os.ftruncate(self._file.fileno(), self._bytes_when_armed)

    def _disarm(self) -> None:
        self._end_timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        """Stop writing, and remove the file where it is empty."""
        with self._lock:
            self._is_closed = True
            self._disarm()
            faulthandler.unregister(signal.SIGQUIT)
            self._file.close()
        with suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()
            # This fails, and is ignored, while files of other ranks are in the folder.
            self.path.parent.rmdir()


class _EndTimer:
    """Ends this process by SIGALRM after a time, also while native code holds Python's lock; glibc only.

    The kernel's timer fires at once when a process resumes after a pause that was longer. So its first signal only
    starts a second timer: its handler is libc's `alarm`, which takes the number of the signal for seconds. The second
    signal has its default effect, because `sysv_signal` sets the handler for one signal. A process that runs again
    thus has some seconds to set the timer anew.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._is_available, self._is_set = hasattr(self._libc, "sysv_signal"), False
        if self._is_available:
            self._libc.sysv_signal.argtypes = (ctypes.c_int, ctypes.c_void_p)

    def set(self, seconds: float) -> bool:
        """Set the timer, in place of an earlier one; returns whether this system has such timers."""
        if self._is_available:
            self._is_set = True
            self._libc.sysv_signal(signal.SIGALRM, ctypes.cast(self._libc.alarm, ctypes.c_void_p))
            # System calls that the first signal interrupts are resumed.
            signal.siginterrupt(signal.SIGALRM, False)
            signal.setitimer(signal.ITIMER_REAL, max(seconds - _SECOND_SECONDS, 0.001))
        return self._is_available

    def cancel(self) -> None:
        """Cancel the timer, and give the signal its default effect again."""
        if self._is_set:
            self._is_set = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._libc.sysv_signal(signal.SIGALRM, None)


def kill_process(pid: int, began: str, *, folder: Path, why: str) -> None:
    """Kill a hung rank on this machine, after a signal that makes it write its stacks.

    `why` is recorded in `folder` for programs that see the process die. Nothing is killed if the process id now belongs
    to a process with another start time than `began`.
    """
    if began and began_at(pid) == began:
        try_to_finish(lambda: record_kill(folder, pid, began, why))
    for number, seconds in ((signal.SIGCONT, 0.0), (signal.SIGQUIT, 1.0), (signal.SIGKILL, 0.0)):
        if not began or began_at(pid) != began:
            return
        with suppress(OSError):
            os.kill(pid, number)
        time.sleep(seconds)
