"""The file `status.json` of a run folder, which says whether the run is running, and why it ended.

Rank zero rewrites the file every few seconds, so an old file means that rank zero is dead or hangs. The watchdog also
writes the file when it ends a run. The file is replaced atomically, so a reader never sees a partial file.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from ds_finetune.system.processes import began_at, has_ended, own_namespace
from ds_finetune.system.whole_file import replace_file

STATUS = "status.json"
FORMAT = 1
ALIVE_SECONDS = 5.0
"""Seconds after which a running run writes its status file again."""
SILENT_SECONDS = 60.0
"""A running run whose status file is older than this number of seconds counts as hung or dead."""
_MOST_BYTES = 2**16
WRITE_SECONDS = 3.0
"""Maximum number of seconds that an ending run waits for the write of a file, because the file system may hang."""

_WRITING = threading.Lock()
"""A thread holds this lock while it reads and rewrites the status, so that no update replaces a final status."""
State = Literal["running", "hung", "finished", "stopped", "failed", "unknown"]


Count = Annotated[int, Field(ge=0, lt=2**53)]


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, and the reason for the state if the run has failed, stopped or hangs.

    State `stopped` means that a signal ended the run after it had saved; the same command resumes it. State `unknown`
    stands for folders without a readable status. Times are seconds since 1970. `pid` is the process id of rank zero in
    the namespace `pid_namespace` on `host`. `began` is the start time of that process as the kernel gives it. The run
    made its last progress `idle_seconds` ago, and the watchdog allows `limit_seconds` (None: without limit). `steps` is
    the number of steps of the whole run, 0 if unknown.
    """

    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False)
    state: State
    reason: str = ""
    phase: str = ""
    step: Count = 0
    steps: Count = 0
    ranks: Count = 1
    host: str = ""
    pid: Count = 0
    pid_namespace: str = ""
    began: str = ""
    started_at: float = 0.0
    updated_at: float = 0.0
    idle_seconds: float = 0.0
    limit_seconds: float | None = None

    def write(self, folder: Path) -> None:
        """Write the status to the run folder; OSError if that fails."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False) + "\n"
        # A path in the reason may have bytes that are not UTF-8, which JSON readers refuse.
        replace_file(folder / STATUS, text.encode(errors="replace"))

    @staticmethod
    def read(folder: Path) -> "RunStatus | None":
        """Read the status in a run folder; None if it is missing or invalid. Unknown keys are ignored."""
        try:
            with (folder / STATUS).open("rb") as file:
                return _STATUS.validate_json(file.read(_MOST_BYTES))
        except (OSError, ValueError):
            return None


_STATUS = TypeAdapter(RunStatus)


def mark_ended(folder: Path, state: State, reason: str, *, step: int | None = None) -> None:
    """Change the status of a running run to `state`. The status of a run that has ended stays as it is.

    Nothing happens if the run has no status yet, or if the file cannot be written. If the file system hangs, the caller
    waits for `WRITE_SECONDS`, and the status is written when the file system responds.
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
    """Write the status of a running run, unless the status in the folder says that the run has ended. Returns whether
    it was written.
    """
    with _WRITING:
        before = RunStatus.read(folder)
        if before is not None and before.started_at == status.started_at and before.state != "running":
            return False
        with suppress(OSError):
            status.write(folder)
        return True


def seen_status(folder: Path, *, now: float | None = None) -> RunStatus:
    """Read the status of a run. If it says `running`, find out whether the run in fact hangs or is dead."""
    status = RunStatus.read(folder)
    if status is None:
        why = f"the folder has no readable {STATUS}"
        return RunStatus("unknown", why, updated_at=changed_at(folder / "metrics.jsonl"))
    if status.state != "running":
        return status
    silent = (time.time() if now is None else now) - changed_at(folder / STATUS)
    state, why = _seen_from_outside(status, silent, is_alive=_is_alive(status))
    if state == "running":
        return status
    where = f"rank 0 on host {status.host}, process {status.pid}; {status.phase}, {status.step:,} steps done"
    return replace(status, state=state, reason=f"{why} ({where})")


def _seen_from_outside(status: RunStatus, silent: float, *, is_alive: bool | None) -> tuple[State, str]:
    """State of a run whose status says `running` and was written `silent` seconds ago, and the reason of this state."""
    if is_alive is False:
        return "failed", "its process has ended without a message"
    if silent > SILENT_SECONDS:
        if is_alive:
            return "hung", f"no sign of life for {silent:,.0f} s: its process is stopped or does not react"
        why = "its process was killed, its host or the network is down, or the clocks of the hosts differ"
        return "failed", f"no sign of life for {silent:,.0f} s: {why}"
    if status.limit_seconds is not None and status.idle_seconds > status.limit_seconds:
        return "hung", f"no progress for {status.idle_seconds:,.0f} s, and the limit is {status.limit_seconds:,.0f} s"
    return "running", ""


def changed_at(path: Path) -> float:
    """Time of the last change of a file, in seconds since 1970; 0 if the file is missing."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_alive(status: RunStatus) -> bool | None:
    """Whether rank zero's process is alive. None if this cannot be known: the process is on another host or in another
    container, or /proc hides the processes of other users.
    """
    is_here = status.host == socket.gethostname() and status.pid_namespace == own_namespace("pid")
    if not is_here or not status.pid_namespace or not status.began:
        return None
    if has_ended(status.pid, status.began):
        return False
    return True if began_at(status.pid) else None


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if the file is missing or unreadable, or has no JSON object."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return {}


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse the JSON object in a text; empty if the text is no JSON object, such as an incomplete line."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def try_to_finish(work: Callable[[], object]) -> bool:
    """Run `work` in a new thread and wait at most `WRITE_SECONDS`; returns whether it finished in that time.

    Unfinished work continues in its thread. If the system has no memory for a thread, the work is not started.
    """
    thread = threading.Thread(target=work, name="bounded-work", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # CPython 3.11 raises RuntimeError ("can't start new thread") if there is no memory for a thread.
        return False
    thread.join(WRITE_SECONDS)
    return not thread.is_alive()
