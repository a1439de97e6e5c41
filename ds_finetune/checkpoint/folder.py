"""Which ranks share a checkpoint folder: all of them on a shared file system, those of a node on folders of its own."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.engine.collectives import all_gather_object
from ds_finetune.errors import FinetuneError, OutputError

_SEEN_SECONDS = 5.0
"""How long a file may take to be seen from another host of a shared file system."""


@dataclass(frozen=True)
class CheckpointFolder:
    """Where checkpoints of this rank go and with whom it shares the folder; `ranks` are those that do, the first one
    leads.

    `token` is this start's own, so that what another start left is never mixed in.
    """

    path: Path
    ranks: tuple[int, ...]
    rank: int
    world_size: int
    token: str

    @property
    def is_leader(self) -> bool:
        """Whether this rank commits and removes."""
        return self.rank == self.ranks[0]

    @property
    def writer_share(self) -> tuple[int, int]:
        """This rank's place among those that can share out what all of them hold."""
        return self.ranks.index(self.rank), len(self.ranks)


def open_checkpoint_folder(folder: Path, *, rank: int, node_local: bool) -> CheckpointFolder:
    """Make `folder` on every rank and find out who sees the same one; collective.

    OutputError on every rank where it cannot be made, or where it is not shared and `node_local` does not say so.
    """
    raise_on_every_rank(try_in_folder(folder, lambda: folder.mkdir(parents=True, exist_ok=True)))
    tokens = all_gather_object(f"{time.time_ns():x}-{os.getpid():x}")
    token = tokens[0]
    if node_local:
        status = folder.stat()
        homes = all_gather_object((socket.gethostname(), status.st_dev, status.st_ino))
        return CheckpointFolder(
            folder, tuple(other for other, home in enumerate(homes) if home == homes[rank]), rank, len(homes), token
        )
    mark = folder / f".seen-{token}"
    raise_on_every_rank(try_in_folder(folder, mark.touch) if rank == 0 else None)
    is_seen = _is_seen(mark)
    raise_on_every_rank(None if is_seen else _not_shared(folder))
    if rank == 0:
        mark.unlink()
    return CheckpointFolder(folder, tuple(range(len(tokens))), rank, len(tokens), token)


def raise_on_every_rank(error: FinetuneError | None) -> None:
    """Raise the first rank's error on every rank; collective."""
    errors = [found for found in all_gather_object(error) if found is not None]
    if errors:
        raise errors[0]


def try_in_folder(folder: Path, work: Callable[[], object]) -> OutputError | None:
    """The error of `work` in the checkpoint folder, in the user's terms."""
    try:
        work()
    except OSError as refused:
        where = f"{folder} on {socket.gethostname()}"
        return OutputError(
            f"checkpoint folder {where}: {refused}",
            hint="mend it before training: permissions, free space, or another output_dir",
        )
    return None


def _is_seen(mark: Path) -> bool:
    until = time.monotonic() + _SEEN_SECONDS
    # By a listing: the absence of a name asked for too early may be remembered (NFS).
    while mark not in set(mark.parent.iterdir()):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _not_shared(folder: Path) -> OutputError:
    return OutputError(
        f"checkpoint folder {folder} on {socket.gethostname()} is not the one that rank 0 writes",
        hint="name a folder that all hosts share, or set checkpoint.node_local true",
    )
