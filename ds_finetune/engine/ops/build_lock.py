"""Lock on the folder in which torch compiles an operator.

Waiting processes report the process that holds the lock, and a killed process leaves no lock behind.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout
from torch.utils.file_baton import FileBaton

from ds_finetune.console.phase_line import Say, time_text
from ds_finetune.errors import ConfigError
from ds_finetune.foreign.guard import Foreign, replaced

_LOCK = Foreign("torch", "utils/cpp_extension.py:2345, utils/file_baton.py")
REPORT_SECONDS, FIRST_REPORT_SECONDS = 30.0, 5.0
QUIET_SECONDS = 600.0
"""Seconds without a change in the folder after which the lock of another program counts as abandoned. Each source file
of DeepSpeed compiles faster than this.
"""
_PAUSE = 0.2


@contextmanager
def reported_lock(say: Say) -> Iterator[None]:
    """Context in which torch compiles under a `_ReportedBaton` instead of its own lock. torch's own lock is an empty
    file: if its owner is killed, others wait forever without a message. Here `say` reports the compilation, the removal
    of an abandoned lock and, on a host's first rank, the process that holds the lock.
    """
    from torch.utils import cpp_extension

    _LOCK.attribute(cpp_extension, "FileBaton")
    _LOCK.parameters(FileBaton.__init__, "lock_file_path")
    for method in ("try_acquire", "wait", "release"):
        _LOCK.attribute(FileBaton, method)
    with replaced(cpp_extension, "FileBaton", partial(_ReportedBaton, say=say)):
        yield


class _ReportedBaton(FileBaton):
    """torch's lock file of an extension build, into which the owning process writes its name. The owner also holds an
    OS-level file lock, which the system releases when the process dies. If that lock is free although torch's lock file
    names an owner, the owner is dead.
    """

    def __init__(self, path: str, *, say: Say) -> None:
        super().__init__(path)
        self._path, self._say = Path(path), say
        self._op = self._path.parent.name
        self._file_lock = FileLock(f"{self._path.parent}.lock")
        self._began: float | None = None

    def try_acquire(self) -> bool:
        """Wait until this process has torch's lock file and the OS-level lock. ConfigError if another program seems to
        have abandoned the lock file.
        """
        report_at = time.monotonic() + FIRST_REPORT_SECONDS
        while not self._is_acquired():
            holder = self._holder() or "a process of another program"
            if time.monotonic() >= report_at and os.environ.get("LOCAL_RANK", "0") == "0":
                self._say(f"waiting for DeepSpeed's {self._op}, which {holder} compiles; it holds {self._path}")
                report_at = time.monotonic() + REPORT_SECONDS
            if not self._holder() and self._unchanged_seconds() > QUIET_SECONDS:
                raise ConfigError(
                    f"DeepSpeed's {self._op} cannot be used: {self._path} is held by {holder}, and nothing has "
                    f"changed beside it for {QUIET_SECONDS / 60:.0f} minutes",
                    hint=f"remove {self._path} if no process compiles in this folder any more",
                )
            time.sleep(_PAUSE)
        self._path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        if not self._is_built:
            self._say(f"compiling DeepSpeed's {self._op} in {self._path.parent}, which takes minutes the first time")
            self._began = time.monotonic()
        return True

    def release(self) -> None:
        super().release()
        self._file_lock.release()
        if self._began is not None and self._is_built:
            self._say(f"compiled DeepSpeed's {self._op} in {time_text(time.monotonic() - self._began)}")

    @property
    def _is_built(self) -> bool:
        return (self._path.parent / f"{self._op}.so").exists()

    def _holder(self) -> str:
        with suppress(FileNotFoundError):
            return self._path.read_text()
        return ""

    def _is_acquired(self) -> bool:
        try:
            self._file_lock.acquire(timeout=0)
        except Timeout:
            return False
        if holder := self._holder():
            self._say(f"the lock {self._path} was left by {holder}, which has ended: removed")
            self._path.unlink()
        if super().try_acquire():
            return True
        self._file_lock.release()
        return False

    def _unchanged_seconds(self) -> float:
        """Seconds since the newest change of torch's lock file or of a file beside it; 0 if there is no lock file."""
        try:
            changed = self._path.stat().st_mtime
        except FileNotFoundError:
            return 0.0
        for path in self._path.parent.iterdir():
            with suppress(FileNotFoundError):
                changed = max(changed, path.stat().st_mtime)
        return time.time() - changed
