"""Saving: each rank copies its part and goes on; a process beside it writes, and one rank of those that share a folder
commits.
"""

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ds_finetune.checkpoint.files import (
    STATE,
    Manifest,
    commit,
    complete_steps,
    partial_name,
    remove_checkpoint,
    step_name,
)
from ds_finetune.checkpoint.folder import CheckpointFolder
from ds_finetune.checkpoint.part_file import part_name
from ds_finetune.checkpoint.staging import FilePartSink, WriterProcess
from ds_finetune.checkpoint.storage import write_part
from ds_finetune.engine.collectives import all_reduce_max
from ds_finetune.engine.state import StateGroup
from ds_finetune.errors import CheckpointError

_POLL_SECONDS = 0.005
_COMMIT_SECONDS = 600.0
"""How long the leader of a save without a process of its own waits for word from others that have already said they are
done.
"""


@dataclass
class SaveResult:
    """What became of a save: the step, and what went wrong on this rank and on any."""

    step: int
    errors: list[str] = field(default_factory=list)
    has_failed: bool = False


@dataclass
class Saver:
    """Saves what `groups` gives, one checkpoint at a time, with the files `beside` it by name.

    `inherited` files stay open in the writer process, which may outlive this one by a little.
    Every method but `start`, `remove` and `close` must be called by all ranks alike.
    """

    groups: Callable[[], list[StateGroup]]
    place: CheckpointFolder
    is_asynchronous: bool
    beside: Mapping[str, Path]
    inherited: Sequence[TextIO] = ()
    last_error: str = ""
    """What kept the newest checkpoint from being written; the same on every rank, empty where it is complete."""
    _pending: SaveResult | None = None

    def __post_init__(self) -> None:
        """The process is made now and started later."""
        self._process = WriterProcess([file.fileno() for file in self.inherited])

    def start(self, num_bytes: int) -> None:
        """Start the writer process and let it take the memory that a part of `num_bytes` will need."""
        if self.is_asynchronous:
            self._process.start()
            self._process.send("reserve", num_bytes=num_bytes)

    def save(self, step: int, state: str, *, rank_state: Mapping[str, Any], eval_loss: float | None = None) -> float:
        """Begin to save; returns the seconds this rank was blocked. The save before must have been settled."""
        assert self._pending is None
        began = time.perf_counter()
        groups = self.groups()
        self._pending = SaveResult(step)
        partial = self.place.path / partial_name(step, self.place.token)
        job = self._commit_job(partial, step, state, eval_loss)
        extra = {"rank": self.place.rank, "home": self.place.ranks[0], "host": socket.gethostname(), **rank_state}
        try:
            partial.mkdir(exist_ok=True)
            part = partial / part_name(self.place.rank, self.place.world_size)
            if self.is_asynchronous:
                write_part(groups, self._process, extra, writer=self.place.writer_share)
                self._process.send(
                    "write",
                    part=str(part),
                    num_bytes=self._process.num_bytes,
                    commit=job if self.place.is_leader else None,
                )
            else:
                sink = FilePartSink(part)
                write_part(groups, sink, extra, writer=self.place.writer_share)
                sink.finish()
        except OSError as failed:
            self._pending.errors.append(f"OSError: {failed}")
        if not self.is_asynchronous:
            self._commit_now(job)
        return time.perf_counter() - began

    def settle(self, *, wait: bool = False) -> SaveResult | None:
        """What became of the save that is on its way, once that is known on every rank; with `wait`, once it is."""
        while (pending := self._pending) is not None:
            pending.errors += self._process.errors() if self.is_asynchronous else []
            is_busy, has_failed = all_reduce_max(
                self.is_asynchronous and self._process.is_busy, bool(pending.errors) or pending.has_failed
            )
            if has_failed and not pending.has_failed:
                pending.has_failed = True
                if self.place.is_leader and self.is_asynchronous and self._process.is_busy:
                    self._process.stop_waiting()
            if not is_busy:
                self._pending = None
                return pending
            if not wait:
                return None
            time.sleep(_POLL_SECONDS)
        return None

    def remove(self, folders: list[Path]) -> None:
        """Take folders away, in the writer process where there is one; for ranks that lead, in no hurry."""
        if not self.place.is_leader or not folders:
            return
        if self.is_asynchronous:
            self._process.send("remove", folders=[str(folder) for folder in folders])
            return
        for folder in folders:
            remove_checkpoint(folder)

    def remove_partial(self, pending: SaveResult) -> None:
        """Take away what a failed save left."""
        self.remove([self.place.path / partial_name(pending.step, self.place.token)])

    def close(self) -> None:
        """Let the writer process end."""
        self._process.close()

    def _commit_job(self, partial: Path, step: int, state: str, eval_loss: float | None) -> dict[str, Any]:
        place = self.place
        manifest = {
            "step": step,
            "world_size": place.world_size,
            "ranks": place.ranks,
            "host": socket.gethostname(),
            "token": place.token,
        }
        return {
            "partial": str(partial),
            "manifest": {**manifest, "eval_loss": eval_loss},
            "parts": [part_name(rank, place.world_size) for rank in place.ranks],
            "texts": {STATE: state},
            "beside": {name: str(source) for name, source in self.beside.items()},
        }

    def _commit_now(self, job: Mapping[str, Any]) -> None:
        """Every part is written or has failed; the leader commits while the others wait."""
        assert self._pending is not None
        (failed,) = all_reduce_max(bool(self._pending.errors))
        if failed or not self.place.is_leader:
            return
        manifest = Manifest(
            **{**job["manifest"], "ranks": tuple(job["manifest"]["ranks"]), "files": dict.fromkeys(job["parts"])}
        )
        until = time.monotonic() + _COMMIT_SECONDS
        try:
            commit(Path(job["partial"]), manifest, job["texts"], job["beside"], lambda: time.monotonic() < until)
        except OSError as error:
            self._pending.errors.append(f"{type(error).__name__}: {error}")


def superseded_checkpoints(folder: Path, *, keep: int, keep_best: bool) -> list[Path]:
    """Complete checkpoints of `folder` that need not be kept: all but the last `keep` and the one with the lowest eval
    loss.

    One that cannot be read, or is just being taken away, is left alone.
    """
    steps = complete_steps(folder)
    losses: dict[int, float] = {}
    for step in steps:
        with suppress(CheckpointError):
            loss = Manifest.read(folder / step_name(step)).eval_loss
            losses |= {step: loss} if loss is not None and math.isfinite(loss) else {}
    best = {min(losses, key=lambda step: (losses[step], step))} if losses and keep_best else set()
    return [folder / step_name(step) for step in steps[:-keep] if step not in best]
