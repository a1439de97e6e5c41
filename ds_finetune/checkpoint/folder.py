"""The checkpoint folder of a rank, and the ranks that share it: all ranks, or the ranks of one node."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.errors import FinetuneError, OutputError

_SEEN_SECONDS = 5.0
"""Seconds in which a new file on a shared file system must appear on another host."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder `path` for the checkpoints of `rank`, and the `ranks` that share it; the first of them is the leader.

    `token` is unique to this start of the run, so that files of another start are never mixed in.
    """

    path: Path
    ranks: tuple[int, ...]
    rank: int
    world_size: int
    token: str

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits and removes checkpoints."""
        return self.rank == self.ranks[0]

    @property
    def portion(self) -> tuple[int, int]:
        """(index, count) of this rank among `ranks`, over which the writing of replicated tensors is divided."""
        return self.ranks.index(self.rank), len(self.ranks)


def open_checkpoint_folder(folder: Path, *, rank: int, node_local: bool) -> CheckpointFolder:
    """Create `folder` on every rank and find out which ranks share it; collective.

    OutputError on every rank where it cannot be created, or where it is not shared and `node_local` is false.
    """
    raise_on_every_rank(try_in_folder(folder, lambda: folder.mkdir(parents=True, exist_ok=True)))
    tokens = all_gather_object(f"{time.time_ns():x}-{os.getpid():x}")
    token = tokens[0]
    if node_local:
        status = folder.stat()
        folders = all_gather_object((socket.gethostname(), status.st_dev, status.st_ino))
        ranks = tuple(other for other, seen in enumerate(folders) if seen == folders[rank])
        return CheckpointFolder(folder, ranks, rank, len(folders), token)
    mark = folder / f".seen-{token}"
    raise_on_every_rank(try_in_folder(folder, mark.touch) if rank == 0 else None)
    error = OutputError(
        f"checkpoint folder {folder} on {socket.gethostname()} is not the one that rank 0 writes",
        hint="name a folder that all hosts share, or set checkpoint.node_local true",
    )
    raise_on_every_rank(None if _is_seen(mark) else error)
    if rank == 0:
        mark.unlink()
    return CheckpointFolder(folder, tuple(range(len(tokens))), rank, len(tokens), token)


def raise_on_every_rank(error: FinetuneError | None) -> None:
    """Raise the first rank's error on every rank; collective."""
    errors = [each for each in all_gather_object(error) if each is not None]
    if errors:
        raise errors[0]


def try_in_folder(folder: Path, work: Callable[[], object]) -> OutputError | None:
    """Run `work` in the checkpoint folder; returns an OSError as an error for the user."""
    try:
        work()
    except OSError as refused:
        where = f"{folder} on {socket.gethostname()}"
        return OutputError(
            f"checkpoint folder {where}: {refused}",
            hint="fix it before training: permissions, free space, or another output_dir",
        )
    return None


def _is_seen(mark: Path) -> bool:
    until = time.monotonic() + _SEEN_SECONDS
    # List the folder instead of looking up the file: NFS caches that a name is absent if it is looked up too early.
    while mark not in set(mark.parent.iterdir()):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
