"""The lock on the folder in which torch compiles an operator: reports its holder, and is removed if that died."""

import fcntl
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from torch.utils.file_baton import FileBaton

from ds_finetune.console.phase_line import Say, time_text
from ds_finetune.errors import ConfigError
from ds_finetune.foreign.guard import Foreign, replaced
from ds_finetune.system.processes import began_at, has_ended, own_pid_namespace

_LOCK = Foreign("torch", "utils/cpp_extension.py:2345, utils/file_baton.py")


@contextmanager
def replaced_build_lock(lock: Callable[[str], FileBaton]) -> Iterator[None]:
    """Within this context operators are compiled under `lock(path)` instead of torch's own lock.

    torch's lock is an empty file. Once its holder has been killed, others wait for it without end and without a
    message.
    """
    from torch.utils import cpp_extension

    _LOCK.attribute(cpp_extension, "FileBaton")
    _LOCK.parameters(FileBaton.__init__, "lock_file_path")
    for method in ("try_acquire", "wait", "release"):
        _LOCK.attribute(FileBaton, method)
    with replaced(cpp_extension, "FileBaton", lock):
        yield


REPORT_SECONDS = 30.0
FIRST_REPORT_SECONDS = 5.0
QUIET_SECONDS = 600.0
"""Seconds without a change after which a folder counts as abandoned, where the holder of its lock is unknown. Each
source file of DeepSpeed compiles faster.
"""
_PAUSE = 0.2
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay"})
"""File systems to which only this machine writes."""
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The PID namespace of the host (Linux, include/linux/proc_ns.h), from which all containers' processes are visible."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, by its `name` in messages. `is_dead` and `is_alive` are set only if certain."""

    name: str
    is_dead: bool = False
    is_alive: bool = False


@contextmanager
def reported_lock(op: str, say: Say) -> Iterator[None]:
    """Within this context `say` reports compilation, the process that is waited for (on a host's first rank), and a
    removed lock.

    torch's lock is replaced by one with the same path that records its holder; a lock whose holder has certainly died
    is removed.
    """
    with replaced_build_lock(partial(_ReportedBaton, op=op, say=say)):
        yield


class _ReportedBaton(FileBaton):
    def __init__(self, path: str, *, op: str, say: Say) -> None:
        super().__init__(path)
        self._path, self._op, self._say = Path(path), op, say
        self._began: float | None = None

    def try_acquire(self) -> bool:
        while not super().try_acquire():
            if not self._wait() and self._is_built:
                return False
        self._path.write_text(_own_record())
        if not self._is_built:
            self._say(f"compiling DeepSpeed's {self._op} in {self._path.parent}, which takes minutes the first time")
            self._began = time.monotonic()
        return True

    def release(self) -> None:
        super().release()
        if self._began is not None and self._is_built:
            self._say(f"compiled DeepSpeed's {self._op} in {time_text(time.monotonic() - self._began)}")

    def wait(self) -> None:
        self._wait()

    @property
    def _is_built(self) -> bool:
        return (self._path.parent / f"{self._op}.so").exists()

    def _wait(self) -> bool:
        """Wait until the lock is released; returns whether it was removed here, because its holder had died."""
        report_at = time.monotonic() + FIRST_REPORT_SECONDS
        while (holder := holder_of(self._path)) is not None:
            if holder.is_dead:
                _remove_if_dead(self._path, self._say)
                return True
            if time.monotonic() >= report_at and os.environ.get("LOCAL_RANK", "0") == "0":
                self._say(f"waiting for DeepSpeed's {self._op}, which {holder.name} compiles; it holds {self._path}")
                report_at = time.monotonic() + REPORT_SECONDS
            if not holder.is_alive and _unchanged_seconds(self._path.parent) > QUIET_SECONDS:
                raise ConfigError(
                    f"DeepSpeed's {self._op} cannot be used: {self._path} is held by {holder.name}, and nothing has "
                    f"changed beside it for {QUIET_SECONDS / 60:.0f} minutes",
                    hint=f"remove {self._path} if nothing compiles there any more",
                )
            time.sleep(_PAUSE)
        return False


def _remove_if_dead(path: Path, say: Say) -> None:
    """Remove a dead holder's lock, unless another process has meanwhile removed it and may hold a new one."""
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"ds_finetune-{os.getuid()}-{name}").open("w") as removal:
        fcntl.flock(removal, fcntl.LOCK_EX)
        holder = holder_of(path)
        if holder is not None and holder.is_dead:
            say(f"the lock {path} was left by {holder.name}, which has ended: removed")
            path.unlink()


def holder_of(path: Path) -> Holder | None:
    """The holder of the lock at `path`; None without a lock."""
    try:
        text, status = path.read_text(), path.stat()
    except FileNotFoundError:
        return None
    try:
        record = json.loads(text)
    except ValueError:
        return _holder_by_files(path, status)
    name = f"process {record['pid']} on {record['host']}"
    if not record["machine"] or record["machine"] != own_pid_namespace():
        # The holder runs on another host, or in a container whose processes are not visible here.
        return Holder(name)
    is_dead = has_ended(record["pid"], record["started"])
    return Holder(name, is_dead=is_dead, is_alive=not is_dead)


def _own_record() -> str:
    pid = os.getpid()
    record = {"pid": pid, "host": socket.gethostname(), "machine": own_pid_namespace(), "started": began_at(pid)}
    return json.dumps(record)


def _holder_by_files(path: Path, status: os.stat_result) -> Holder:
    """The holder of a lock without a record (torch's own lock): the process that has the file open.

    `is_dead` is set only where every process could be inspected.
    """
    is_certain = _is_local(path) and Path("/proc/self/ns/pid").is_symlink()
    is_certain = is_certain and str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == status.st_uid and _has_open(process, status):
                return Holder(f"process {process.name} on {socket.gethostname()}", is_alive=True)
        except PermissionError:
            # Also raised for a process that is ending; the next check is certain.
            is_certain = False
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Holder("a process that left no name", is_dead=is_certain)


def _has_open(process: Path, status: os.stat_result) -> bool:
    for held in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            other = held.stat()
            if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
                return True
    return False


def _is_local(path: Path) -> bool:
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(mount.mountpoint)]
    return bool(mounts) and max(mounts, key=lambda mount: len(mount.mountpoint)).fstype in _LOCAL


def _unchanged_seconds(folder: Path) -> float:
    changed = 0.0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            changed = max(changed, path.stat().st_mtime)
    return time.time() - changed
