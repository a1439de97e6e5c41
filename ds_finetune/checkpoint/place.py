"""Which ranks share a checkpoint folder: all of them on a shared file system, those of a node on folders of its own."""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ds_finetune.engine.processes import everyones
from ds_finetune.errors import FinetuneError, OutputError

LOCK = ".lock"
"""File that the run which writes a checkpoint folder holds locked."""
LOCK_SECONDS = 90.0
"""More than the writer of a dead run takes to end (writer.py, ORPHAN_SECONDS)."""
_LOCK_POLL_SECONDS = 0.05
_SEEN_SECONDS = 5.0
"""How long a file may take to be seen from another host of a shared file system."""


@dataclass(frozen=True)
class Place:
    """Where checkpoints of this rank go and with whom it shares the folder; `ranks` are those that do, the first one leads.

    `token` is this start's own, so that what another start left is never mixed in.
    """

    folder: Path
    ranks: tuple[int, ...]
    rank: int
    world_size: int
    token: str

    @property
    def leads(self) -> bool:
        """Whether this rank commits and removes."""
        return self.rank == self.ranks[0]

    @property
    def writer(self) -> tuple[int, int]:
        """This rank's place among those that can share out what all of them hold."""
        return self.ranks.index(self.rank), len(self.ranks)


def find_place(folder: Path, *, rank: int, node_local: bool) -> Place:
    """Make `folder` on every rank and find out who sees the same one; collective.

    OutputError on every rank where it cannot be made, or where it is not shared and `node_local` does not say so.
    """
    agree(tried(folder, lambda: folder.mkdir(parents=True, exist_ok=True)))
    tokens = everyones(f"{time.time_ns():x}-{os.getpid():x}")
    token = tokens[0]
    if node_local:
        status = folder.stat()
        homes = everyones((socket.gethostname(), status.st_dev, status.st_ino))
        return Place(folder, tuple(other for other, home in enumerate(homes) if home == homes[rank]), rank, len(homes), token)
    mark = folder / f".seen-{token}"
    agree(tried(folder, mark.touch) if rank == 0 else None)
    is_seen = _is_seen(mark)
    agree(None if is_seen else _not_shared(folder))
    if rank == 0:
        mark.unlink()
    return Place(folder, tuple(range(len(tokens))), rank, len(tokens), token)


def lock(folder: Path, *, seconds: float, say: Callable[[str], None]) -> TextIO:
    """Keep other runs out of a checkpoint folder until the file is closed, also by the end of this process.

    Waits `seconds` for the one that is there, which may be the writer of a run that has just died; then OutputError.
    """
    file = (folder / LOCK).open("a+", encoding="utf-8")
    until, is_said = time.monotonic() + seconds, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as taken:
            if time.monotonic() > until:
                file.seek(0)
                raise OutputError(f"{folder} is being written by {file.read()}", hint="end that run, or name another output_dir") from taken
            if not is_said:
                say(f"{folder} is still being written; waiting {seconds:.0f} s at most")
            is_said = True
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError as refused:
            say(f"{folder} cannot be locked ({refused}): see that no other run writes it")
            break
    with suppress(OSError):
        # For whoever is kept out; on a full disk it stays empty.
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file


def agree(error: FinetuneError | None) -> None:
    """Raise the first rank's error on every rank; collective."""
    errors = [found for found in everyones(error) if found is not None]
    if errors:
        raise errors[0]


def tried(folder: Path, work: Callable[[], object]) -> OutputError | None:
    """The error of `work` in the checkpoint folder, in the user's terms."""
    try:
        work()
    except OSError as refused:
        reason = f"checkpoint folder {folder} on {socket.gethostname()}: {refused}"
        return OutputError(reason, hint="mend it before training: permissions, free space, or another output_dir")
    return None


def _is_seen(mark: Path) -> bool:
    until = time.monotonic() + _SEEN_SECONDS
    while not mark.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _not_shared(folder: Path) -> OutputError:
    return OutputError(
        f"checkpoint folder {folder} on {socket.gethostname()} is not the one that rank 0 writes",
        hint="name a folder that all hosts share, or set checkpoint.node_local true",
    )
