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
"""Seconds within which a new file on a shared file system must become visible on another host."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoint folder `path` of `rank`, and the `ranks` that share it, of which the first is the leader. `token`
    is unique to this start of the run, so that files of several starts are never mixed.
    """

    path: Path
    ranks: tuple[int, ...]
    rank: int
    world_size: int
    token: str

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the leader, which commits and removes checkpoints."""
        return self.rank == self.ranks[0]

    @property
    def portion(self) -> tuple[int, int]:
        """Index of this rank among the ranks that share the folder, and their number, to divide replicated tensors."""
        return self.ranks.index(self.rank), len(self.ranks)


def open_checkpoint_folder(folder: Path, *, rank: int, node_local: bool) -> CheckpointFolder:
    """Create the checkpoint folder on every rank, and find out which ranks share it; collective. OutputError on every
    rank if it cannot be created, or if it is not shared by all ranks and `node_local` is false.
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
        f"checkpoint folder {folder} on {socket.gethostname()} is not the same folder as on rank 0's host",
        hint="set output_dir to a folder that all hosts share, or set checkpoint.node_local: true",
    )
    raise_on_every_rank(None if _is_seen(mark) else error)
    if rank == 0:
        mark.unlink()
    return CheckpointFolder(folder, tuple(range(len(tokens))), rank, len(tokens), token)


def raise_on_every_rank(error: FinetuneError | None) -> None:
    """If any rank has an error, raise that of the lowest such rank on every rank; collective."""
    errors = [each for each in all_gather_object(error) if each is not None]
    if errors:
        raise errors[0]


def try_in_folder(folder: Path, work: Callable[[], object]) -> OutputError | None:
    """Run `work`, which writes to the checkpoint folder. An OSError in it is returned as an error for the user."""
    try:
        work()
    except OSError as refused:
        where = f"{folder} on {socket.gethostname()}"
        return OutputError(
            f"the checkpoint folder {where} cannot be written: {refused}",
            hint="check its permissions and the free space, or name another output_dir",
        )
    return None


def _is_seen(mark: Path) -> bool:
    until = time.monotonic() + _SEEN_SECONDS
    # The folder is listed instead of looking the name up, because NFS caches that a file does not exist.
    while mark not in set(mark.parent.iterdir()):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
