"""Saves checkpoints at an interval, at the last step and after a signal; the next step reports a failed save."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from ds_finetune.checkpoint.restore import random_state
from ds_finetune.checkpoint.saver import Saver, SaveResult, superseded_checkpoints
from ds_finetune.config.schedule import Interval
from ds_finetune.config.sections import CheckpointConfig
from ds_finetune.console.phase_line import Say
from ds_finetune.engine.groups.collectives import all_gather_object, all_reduce_max
from ds_finetune.errors import RunError
from ds_finetune.observers.evaluation import held_out_loss
from ds_finetune.observers.record import Resumable, StepRecord
from ds_finetune.observers.stopping import StopSignals

RunText = Callable[[StepRecord, Mapping[str, Mapping[str, Any]]], str]
"""Function that builds a checkpoint's run state as text. It gets a step's record, and observers' states by name."""


@dataclass
class Checkpointing:
    """Saves checkpoints every `interval`, with the states of the observers in `remembered`. `say` prints a line."""

    saver: Saver
    signals: StopSignals
    config: CheckpointConfig
    interval: Interval
    remembered: Mapping[str, Resumable]
    run_text: RunText
    say: Say
    saving: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager that is open while the run waits for a save to finish."""
    _failed: int = 0
    _saved: int = 0
    """Step of the last checkpoint that this process saved; 0 before the first checkpoint."""
    _began: float = field(default_factory=time.monotonic)
    """Time at which the last save began; before the first save, the time at which training began."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Finish the previous save if it is complete, and start to save a checkpoint if one is due."""
        is_late = time.monotonic() - self._began >= self.interval.seconds
        # Clocks differ between ranks, so all ranks save as soon as the interval has passed on one of them.
        is_stop_requested, is_time = map(bool, all_reduce_max(bool(self.signals.name), is_late))
        self._report(self.saver.settle())
        is_due = is_time or self.interval.is_due(record.step)
        if not (is_stop_requested or record.is_last or record.stop or is_due):
            return record
        self._began = time.monotonic()
        with self.saving():
            return self._save(record, is_stop_requested=is_stop_requested)

    def _save(self, record: StepRecord, *, is_stop_requested: bool) -> StepRecord:
        self._report(self.saver.settle(wait=True))
        self._saved = record.step
        state = self.run_text(record, {name: observer.state() for name, observer in self.remembered.items()})
        rank_state = {"random": random_state(), "position": record.position}
        blocked = self.saver.save(record.step, state, rank_state=rank_state, eval_loss=held_out_loss(record.values))
        record = record.with_values({"checkpoint/blocked_seconds": blocked})
        if not is_stop_requested:
            return record
        name = self.signals.name or "a signal to another rank"
        if not self._report(self.saver.settle(wait=True)):
            raise RunError(
                f"{name} ends the run, and the checkpoint of step {record.step} was NOT saved",
                hint="the same command resumes from the checkpoint before it",
            )
        return record.stopping(f"{name}: saved at step {record.step}; the same command resumes from there")

    def save_last(self, record: StepRecord) -> None:
        """Save a checkpoint after the last step, unless that step already has one, and wait for the save."""
        if record.step != self._saved:
            with self.saving():
                self._save(record, is_stop_requested=False)
        self.close()

    def close(self) -> None:
        """Wait until the save in progress has ended."""
        with self.saving():
            self._report(self.saver.settle(wait=True))

    def _report(self, outcome: SaveResult | None) -> bool:
        """Report a failed save, or remove checkpoints superseded by a saved one. Returns whether the save succeeded."""
        if outcome is None:
            return False
        folder = self.saver.folder
        if not outcome.has_failed:
            self._failed, self.saver.last_error = 0, ""
            if folder.is_leader:
                self.saver.remove(
                    superseded_checkpoints(folder.path, keep=self.config.keep, keep_best=self.config.keep_best)
                )
            return True
        self._failed += 1
        own_errors = [f"rank {folder.rank}, {folder.path}: {error}" for error in outcome.errors]
        errors = [error for rank in all_gather_object(own_errors) for error in rank]
        if folder.rank == 0:
            for error in errors:
                self.say(f"CHECKPOINT OF STEP {outcome.step} WAS NOT WRITTEN: {error}; the ones before are untouched")
        self.saver.remove_partial(outcome)
        self.saver.last_error = f"the checkpoint of step {outcome.step} was not written: {errors[0]}"
        if self._failed >= self.config.max_failed:
            raise RunError(
                f"{self._failed} checkpoints in a row were not written, and checkpoint.max_failed is "
                f"{self.config.max_failed}: {errors[0]}",
                hint="free disk space; the same command resumes from the last complete checkpoint",
            )
        return False
