"""Evaluation on held-out data (loss, perplexity, accuracy, exact match), early stopping, and best weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ds_finetune.config.schedule import Interval
from ds_finetune.config.sections import EvalConfig
from ds_finetune.engine.results import HeldOutScores
from ds_finetune.observers.record import Remembering, StepRecord

_OVERFLOW_NATS = 700.0
"""Upper bound of a loss in nats whose exponential still fits into a float."""


@dataclass
class Evaluation(Remembering):
    """Evaluates held-out rows every `interval` and at the last step. `evaluate` scores the rows, and `exact_match`
    generates and compares answers if the run asks for that.

    Both functions return their results by prefix of the metric names: `eval` for all held-out rows, and `eval/NAME` for
    each named set. They return None if a signal asks the run to end; `is_due` then says that the resumed run must
    evaluate first.
    """

    saved: ClassVar = ("is_due",)
    interval: Interval
    evaluate: Callable[[], Mapping[str, HeldOutScores] | None]
    exact_match: Callable[[], Mapping[str, float] | None] | None = None
    is_due: bool = False

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add `eval/*` metrics if an evaluation is due after this step."""
        if not (record.is_last or record.stop or self.interval.is_due(record.step)):
            return record
        results = self.evaluate()
        fractions = self.exact_match() if results is not None and self.exact_match else {}
        self.is_due = results is None or fractions is None
        if results is None or fractions is None:
            return record
        values: dict[str, float] = {}
        for prefix, scores in results.items():
            values |= {f"{prefix}/{name}": value for name, value in scores.metrics.items()}
            if scores.is_per_token:
                values[f"{prefix}/perplexity"] = math.exp(min(scores.loss, _OVERFLOW_NATS))
            if prefix in fractions:
                values[f"{prefix}/exact_match"] = fractions[prefix]
        return record.with_values(values)


@dataclass
class BestAndPatience(Remembering):
    """Keeps the weights of the best evaluation, and ends the run after `patience` evaluations without improvement.

    The best evaluation has the lowest `eval/loss`, or in runs with rewards the highest `eval/reward`.
    """

    saved: ClassVar = ("best_loss", "best_step", "worse_in_a_row")
    config: EvalConfig
    keep: Callable[[int], None]
    best_loss: float = math.inf
    best_step: int = 0
    worse_in_a_row: int = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Compare the evaluation of this step, if there is one, with the best one so far."""
        loss = held_out_loss(record.values)
        if loss is None:
            return record
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.worse_in_a_row = loss, record.step, 0
            if self.config.keep_best:
                self.keep(record.step)
        else:
            self.worse_in_a_row += 1
        record = replace(record, best_step=self.best_step)
        if self.config.patience and self.worse_in_a_row >= self.config.patience:
            best = f"loss has not fallen below {self.best_loss:.4f}"
            if "eval/reward" in record.values:
                best = f"reward has not risen above {-self.best_loss:.4f}"
            return record.stopping(f"eval/{best} of step {self.best_step} for {self.worse_in_a_row} evaluations")
        return record


def held_out_loss(values: Mapping[str, float]) -> float | None:
    """Number by which evaluations are compared; lower is better. It is `eval/loss`, or -`eval/reward` if there is a
    reward. None if the step of `values` had no evaluation.
    """
    reward = values.get("eval/reward")
    return values.get("eval/loss") if reward is None else -reward


def matches(answers: Sequence[str], expected: Sequence[str]) -> float:
    """Fraction of `answers` that equal `expected` after stripping white space at both ends."""
    return sum(a.strip() == e.strip() for a, e in zip(answers, expected, strict=True)) / max(len(expected), 1)
