"""Counts skipped steps; too many in a row end the run, and so does a run in which no step was applied."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.errors import RunError
from ds_finetune.observers.record import Observer, StepRecord


@dataclass
class SkippedSteps(Observer):
    """Raises RunError after `limit` skipped steps in a row, and at the last step where every step was skipped."""

    limit: int
    in_a_row: int = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Count; a step that was applied starts again from 0."""
        self.in_a_row = self.in_a_row + 1 if record.values["train/skipped"] else 0
        is_unchanged = record.is_last and self.in_a_row > 0 and record.values["train/skipped_steps"] >= record.step
        if self.in_a_row >= self.limit or is_unchanged:
            who = f"all {record.step} steps of the run" if is_unchanged else f"{self.in_a_row} steps in a row"
            raise RunError(
                f"{who} were skipped for a non-finite gradient, the last at step {record.step}: {record.notice}",
                hint="lower optim.lr, use train.precision bf16 or fp32, or look at the data of these steps; "
                "nothing was exported",
            )
        return record

    def state(self) -> dict[str, Any]:
        """Skipped steps in a row."""
        return {"in_a_row": self.in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue counting from `state`."""
        self.in_a_row = state["in_a_row"]
