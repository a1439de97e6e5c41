"""`status.json`: whether a run is running, and why it ended.

Rank zero writes it, and the watchdog where it ends a run. The file is replaced as a whole, so a reader never sees a
part of it. While a run is running, it is written every few seconds: one that is no longer written has lost its writer.
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
"""How often a running run writes its status."""
SILENT_SECONDS = 60.0
"""A running run whose status is older than this gives no sign of life."""
_MOST_BYTES = 2**16
_MOST_CLOCK_ERROR = 3600.0
"""Clocks of two hosts differ by fewer seconds than this."""
WRITE_SECONDS = 3.0
"""How long the end of a run waits for each of its files."""

_WRITING = threading.Lock()
"""Held by a thread that reads the status to write it again: a run's end must not be replaced by a sign of life."""
State = Literal["running", "hung", "finished", "stopped", "failed", "unknown"]


@dataclass(frozen=True)
class RunStatus:
    """What a run is doing, or how it ended.

    `state` is `stopped` where a signal ended the run after it had saved; the same command resumes it. It is `unknown`
    only for folders without this file. Times are seconds since 1970. Process `pid` of rank zero is valid in
    `pid_namespace` of `host`, and `began` is the kernel's start time of it. `idle_seconds` had passed since its last
    progress, of which the watchdog allows `limit_seconds` (None: any number).
    """

    state: State
    reason: str = ""
    phase: str = ""
    step: int = 0
    steps: int = 0
    """Steps of the whole run; 0 where they are not known."""
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
        """Write it to the run folder; OSError where that is not possible."""
        replace_file(folder / STATUS, json.dumps({"format": FORMAT, **asdict(self)}) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The status in a run folder; None where there is none that can be read. Unknown keys are passed over."""
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
    """Change the status of a run that is running to `state`; one that has ended keeps its first reason.

    Nothing happens where the run has not written its status yet, or the file cannot be written. A file system that
    does not answer holds up the caller for some seconds at most, and the status is written once it answers.
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
    """Write the status of a run that is running, unless its end is written already; returns whether it still runs."""
    with _WRITING:
        before = RunStatus.read(folder)
        if before is not None and before.started_at == status.started_at and before.state != "running":
            return False
        with suppress(OSError):
            status.write(folder)
        return True


class LastChange:
    """When an observer saw a file change last, by its own clock."""

    def __init__(self) -> None:
        self._changed_at: float | None = None
        self._seen_at = 0.0

    def seconds_since(self, changed_at: float, *, now: float) -> float:
        """Seconds since the first look that has found this time of change."""
        if changed_at != self._changed_at:
            self._changed_at, self._seen_at = changed_at, now
        return now - self._seen_at


def seen_status(folder: Path, *, now: float | None = None, change: LastChange | None = None) -> RunStatus:
    """The status of a run as an observer sees it: a running run may hang, or its process may be gone.

    A folder without the file, such as one of an earlier version, has the state `unknown`. An observer that looks again
    and again gives its `change`: for runs on other hosts, whose clocks may differ, the time between its own looks
    counts then, and not the age of the file, unless that is more than an hour.
    """
    status = RunStatus.read(folder)
    if status is None:
        why = f"the folder has no {STATUS}: an earlier version has written it"
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
    """The state of a run whose status says that it is running and was written `silent` seconds ago, and the reason."""
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
    """When a file was changed last, in seconds since 1970; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_alive(status: RunStatus) -> bool | None:
    """Whether rank zero's process lives; None where that cannot be seen from here: on another host, in another
    container, or where /proc hides the processes of other users.
    """
    is_here = status.host == socket.gethostname() and status.pid_namespace == own_pid_namespace()
    if not is_here or not status.pid_namespace or not status.began:
        return None
    if has_ended(status.pid, status.began):
        return False
    return True if began_at(status.pid) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where the file is missing, unreadable or something else."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return {}


def parse_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text; empty where it is something else, such as a line that is being written."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def try_to_finish(work: Callable[[], object]) -> bool:
    """Do `work` in a thread of its own and wait for it, at most `WRITE_SECONDS`; returns whether it ended.

    Work that has not ended goes on as long as the process lives. It is not begun where there is no memory for a thread.
    """
    thread = threading.Thread(target=work, name="bounded-work", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # CPython 3.11's "can't start new thread".
        return False
    thread.join(WRITE_SECONDS)
    return not thread.is_alive()
