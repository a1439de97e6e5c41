"""`status.json`: whether a run is running, and why it ended.

Rank zero writes the file, and the watchdog when it ends a run. The file is replaced atomically, so a reader never sees
a partial file. A running run rewrites it every few seconds: if the file gets old, its writer is gone.
"""

import json
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from ds_finetune.system.processes import began_at, has_ended, own_pid_namespace
from ds_finetune.system.whole_file import replace_file

STATUS = "status.json"
FORMAT = 1
ALIVE_SECONDS = 5.0
"""Seconds between status updates of a running run."""
SILENT_SECONDS = 60.0
"""Age in seconds of the status above which a running run counts as silent."""
_MOST_BYTES = 2**16
_MOST_CLOCK_ERROR = 3600.0
"""Clocks of two hosts are assumed to differ by less than this many seconds."""
WRITE_SECONDS = 3.0
"""Seconds for which the end of a run waits for each of its files."""

_WRITING = threading.Lock()
"""Held while a thread reads and rewrites the status: an update of a running run must not replace its end."""
State = Literal["running", "hung", "finished", "stopped", "failed", "unknown"]


@dataclass(frozen=True)
class RunStatus:
    """The state of a run; for a run that has ended, how it ended.

    `state` is `stopped` if a signal ended the run after it had saved; the same command resumes it. It is `unknown` only
    for folders without this file. Times are seconds since 1970. Process `pid` of rank zero is valid in `pid_namespace`
    of `host`; `began` is its start time from the kernel. `idle_seconds` had passed since the last progress, of which
    the watchdog allows `limit_seconds` (None: no limit).
    """

    state: State
    reason: str = ""
    phase: str = ""
    step: int = 0
    steps: int = 0
    """Total steps of the run; 0 if unknown."""
    ranks: int = 1
    host: str = ""
    pid: int = 0
    pid_namespace: str = ""
    began: str = ""
    started_at: float = 0.0
    updated_at: float = 0.0
    idle_seconds: float = 0.0
    limit_seconds: float | None = None

    def write(self, folder: Path) -> None:
        """Write the status to the run folder; OSError if that fails."""
        replace_file(folder / STATUS, json.dumps({"format": FORMAT, **asdict(self)}) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The status in a run folder; None without a readable one. Unknown keys are ignored."""
        try:
            with (folder / STATUS).open("rb") as file:
                tree = json.loads(file.read(_MOST_BYTES))
            status = cls(**{each.name: tree[each.name] for each in fields(cls) if each.name in tree})
            return status if status._is_valid() else None
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    def _is_valid(self) -> bool:
        numbers = [self.step, self.steps, self.ranks, self.pid, self.started_at, self.updated_at, self.idle_seconds]
        numbers += [] if self.limit_seconds is None else [self.limit_seconds]
        texts = (self.reason, self.phase, self.host, self.pid_namespace, self.began)
        return (
            self.state in get_args(State)
            and all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
            and all(isinstance(text, str) for text in texts)
        )


def mark_ended(folder: Path, state: State, reason: str, *, step: int | None = None) -> None:
    """Set the state of a running run to `state`; a run that has ended keeps its first reason.

    Does nothing if the run has not written its status yet, or the file cannot be written. A file system that hangs
    blocks the caller for some seconds at most; the status is written once it responds.
    """

    def mark() -> None:
        with _WRITING:
            status = RunStatus.read(folder)
            if status is None or status.state != "running":
                return
            at = status.step if step is None else step
            with suppress(OSError):
                replace(status, state=state, reason=reason, step=at, updated_at=time.time()).write(folder)

    try_to_finish(mark)


def write_running(folder: Path, status: RunStatus) -> bool:
    """Write the status of a running run, unless its end is already written; returns whether the run still runs."""
    with _WRITING:
        before = RunStatus.read(folder)
        if before is not None and before.started_at == status.started_at and before.state != "running":
            return False
        with suppress(OSError):
            status.write(folder)
        return True


class LastChange:
    """When an observer last saw a file change, by the observer's clock."""

    def __init__(self) -> None:
        self._changed_at: float | None = None
        self._seen_at = 0.0

    def seconds_since(self, changed_at: float, *, now: float) -> float:
        """Seconds since this change time was first observed."""
        if changed_at != self._changed_at:
            self._changed_at, self._seen_at = changed_at, now
        return now - self._seen_at


def seen_status(folder: Path, *, now: float | None = None, change: LastChange | None = None) -> RunStatus:
    """The status of a run as seen by an observer: a running run may hang, or its process may be gone.

    A folder without the file has the state `unknown`. An observer that looks repeatedly passes its `change`: for runs
    on other hosts, whose clocks may differ, the time between its observations then counts instead of the file's age,
    unless that is more than an hour.
    """
    status = RunStatus.read(folder)
    if status is None:
        why = f"the folder has no readable {STATUS}"
        return RunStatus("unknown", why, updated_at=changed_at(folder / "metrics.jsonl"))
    if status.state != "running":
        return status
    now, written_at = time.time() if now is None else now, changed_at(folder / STATUS)
    is_alive, silent = _is_alive(status), now - written_at
    if change is not None and is_alive is None and silent < _MOST_CLOCK_ERROR:
        silent = change.seconds_since(written_at, now=now)
    state, why = _seen_from_outside(status, silent, is_alive=is_alive)
    if state == "running":
        return status
    where = f"rank 0 on host {status.host}, process {status.pid}; {status.phase}, {status.step:,} steps done"
    return replace(status, state=state, reason=f"{why} ({where})")


def _seen_from_outside(status: RunStatus, silent: float, *, is_alive: bool | None) -> tuple[State, str]:
    """State and reason of a run whose status says that it is running and was written `silent` seconds ago."""
    if is_alive is False:
        return "failed", "its process has ended without a message"
    if silent > SILENT_SECONDS:
        if is_alive:
            return "hung", f"no sign of life for {silent:,.0f} s: its process is stopped or does not react"
        why = "its process was killed, or its host or the network is down"
        return "failed", f"no sign of life for {silent:,.0f} s: {why}"
    if status.limit_seconds is not None and status.idle_seconds > status.limit_seconds:
        return "hung", f"no progress for {status.idle_seconds:,.0f} s, and the limit is {status.limit_seconds:,.0f} s"
    return "running", ""


def changed_at(path: Path) -> float:
    """Time of the last change of a file, in seconds since 1970; 0 without the file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_alive(status: RunStatus) -> bool | None:
    """Whether rank zero's process is alive; None if that cannot be seen from here: on another host, in another
    container, or if /proc hides the processes of other users.
    """
    is_here = status.host == socket.gethostname() and status.pid_namespace == own_pid_namespace()
    if not is_here or not status.pid_namespace or not status.began:
        return None
    if has_ended(status.pid, status.began):
        return False
    return True if began_at(status.pid) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing, unreadable or something else."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return {}


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text; empty for anything else, such as an incomplete line."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def try_to_finish(work: Callable[[], object]) -> bool:
    """Run `work` in a new thread and wait at most `WRITE_SECONDS`; returns whether it finished.

    Unfinished work continues while the process lives. Without memory for a thread, the work is not started.
    """
    thread = threading.Thread(target=work, name="bounded-work", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # CPython 3.11's error "can't start new thread".
        return False
    thread.join(WRITE_SECONDS)
    return not thread.is_alive()
