"""Saves checkpoints: each rank writes its part of the state, then the leader of each folder commits the checkpoint.

In an asynchronous save the rank only copies its part to shared memory and continues; its writer process
(part_writer_process.py) writes the file. In a synchronous save the rank writes the file itself (`write_part`).
"""

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ds_finetune.checkpoint.commit import (
    STATE,
    CommitJob,
    Manifest,
    RemoveJob,
    ReserveJob,
    StopWaiting,
    WriteJob,
    commit,
    complete_steps,
    part_name,
    partial_name,
    remove_checkpoint,
    step_name,
)
from ds_finetune.checkpoint.folder import CheckpointFolder
from ds_finetune.checkpoint.part_storage import serialise_part
from ds_finetune.checkpoint.part_writers import WriterProcess, write_part
from ds_finetune.engine.groups.collectives import all_reduce_max
from ds_finetune.engine.state.state import StateGroup
from ds_finetune.errors import CheckpointError

_POLL_SECONDS = 0.005
_COMMIT_SECONDS = 600.0
"""Seconds that the leader waits in a synchronous save for the part files of the other ranks."""


@dataclass
class SaveResult:
    """Result of saving a checkpoint: its step, errors on this rank, and whether saving failed on any rank."""

    step: int
    errors: list[str] = field(default_factory=list)
    has_failed: bool = False


@dataclass
class Saver:
    """Saves checkpoints of the state that `groups` returns, one at a time.

    If `is_asynchronous`, a writer process writes the files while training continues. Each checkpoint also has hard
    links to the files `linked`, by name of the link. The writer process inherits the open files `inherited`, and may
    exit a little later than this process. Methods are collective, except `start`, `remove` and `close`.
    """

    groups: Callable[[], list[StateGroup]]
    folder: CheckpointFolder
    is_asynchronous: bool
    linked: Mapping[str, Path]
    inherited: Sequence[TextIO] = ()
    last_error: str = ""
    """Why the newest checkpoint was not written, identical on every rank; empty if it is complete."""
    _pending: SaveResult | None = None

    def __post_init__(self) -> None:
        self._process = WriterProcess([file.fileno() for file in self.inherited])

    def start(self, num_bytes: int) -> None:
        """Start the writer process, which reserves `num_bytes` of memory for this rank's part of a checkpoint."""
        if self.is_asynchronous:
            self._process.start()
            self._process.send(ReserveJob(num_bytes))

    def save(self, step: int, state: str, *, rank_state: Mapping[str, Any], eval_loss: float | None = None) -> float:
        """Start to save a checkpoint. Returns the seconds for which this rank was blocked. The result of the previous
        save must have been returned by `settle`. `state` is the run's state as JSON, `rank_state` that of this rank.
        """
        assert self._pending is None
        began = time.perf_counter()
        groups = self.groups()
        self._pending = SaveResult(step)
        partial = self.folder.path / partial_name(step, self.folder.token)
        shared, host = self.folder, socket.gethostname()
        manifest = Manifest(step, shared.world_size, shared.ranks, host, shared.token, eval_loss, files={})
        job = CommitJob(partial, manifest, {STATE: state}, dict(self.linked))
        extra = {"rank": shared.rank, "home": shared.ranks[0], "host": host, **rank_state}
        try:
            partial.mkdir(exist_ok=True)
            part = partial / part_name(self.folder.rank, self.folder.world_size)
            num_bytes, tensors = serialise_part(groups, extra, portion=self.folder.portion)
            with closing(tensors):
                if self.is_asynchronous:
                    self._process.copy(num_bytes, tensors)
                    self._process.send(WriteJob(part, num_bytes, job if self.folder.is_leader else None))
                else:
                    write_part(part, tensors)
        except OSError as failed:
            self._pending.errors.append(f"OSError: {failed}")
        if not self.is_asynchronous:
            self._commit_synchronously(job)
        return time.perf_counter() - began

    def settle(self, *, wait: bool = False) -> SaveResult | None:
        """Result of the save in progress if every rank has finished it, else None. With `wait`, block until then."""
        while (pending := self._pending) is not None:
            pending.errors += self._process.errors() if self.is_asynchronous else []
            is_busy, has_failed = all_reduce_max(
                self.is_asynchronous and self._process.is_busy, bool(pending.errors) or pending.has_failed
            )
            if has_failed and not pending.has_failed:
                pending.has_failed = True
                if self.folder.is_leader and self.is_asynchronous and self._process.is_busy:
                    self._process.send(StopWaiting())
            if not is_busy:
                self._pending = None
                return pending
            if not wait:
                return None
            time.sleep(_POLL_SECONDS)
        return None

    def remove(self, folders: list[Path]) -> None:
        """Remove checkpoint folders, on the leader only. A writer process removes them after its earlier jobs."""
        if not self.folder.is_leader or not folders:
            return
        if self.is_asynchronous:
            self._process.send(RemoveJob(folders))
            return
        for folder in folders:
            remove_checkpoint(folder)

    def remove_partial(self, pending: SaveResult) -> None:
        """Remove the files of a failed save."""
        self.remove([self.folder.path / partial_name(pending.step, self.folder.token)])

    def close(self) -> None:
        """Let the writer process of this saver end after its last job."""
        self._process.close()

    def _commit_synchronously(self, job: CommitJob) -> None:
        assert self._pending is not None
        (failed,) = all_reduce_max(bool(self._pending.errors))
        if failed or not self.folder.is_leader:
            return
        until = time.monotonic() + _COMMIT_SECONDS
        try:
            commit(job, lambda: time.monotonic() < until)
        except OSError as error:
            self._pending.errors.append(f"{type(error).__name__}: {error}")


def superseded_checkpoints(folder: Path, *, keep: int, keep_best: bool) -> list[Path]:
    """List the complete checkpoints in `folder` that are no longer needed. The last `keep` are kept, and with
    `keep_best` also the one with the lowest evaluation loss. A checkpoint that cannot be read is never the best one.
    """
    steps = complete_steps(folder)
    losses: dict[int, float] = {}
    for step in steps:
        with suppress(CheckpointError):
            loss = Manifest.read(folder / step_name(step)).eval_loss
            losses |= {step: loss} if loss is not None and math.isfinite(loss) else {}
    best = {min(losses, key=lambda step: (losses[step], step))} if losses and keep_best else set()
    return [folder / step_name(step) for step in steps[:-keep] if step not in best]
