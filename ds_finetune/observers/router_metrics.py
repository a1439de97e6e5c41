"""Metrics of routed experts: how even their loads are, how sure routers are, and how far biases have moved."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_finetune.engine.router_balance import RouterChoices
from ds_finetune.observers.expert_loads import (
    Counts,
    busiest_rank_ratio,
    effective_experts,
    max_violations,
    num_dead_experts,
)
from ds_finetune.observers.record import Observer, StepRecord


@dataclass
class RouterMetrics(Observer):
    """Adds the `router/*` values of each step; `ep` is the number of expert parallel ranks.

    Every rank knows the loads of all layers, so each follows the biases of all layers, at any number of pipeline
    stages.
    """

    ep: int
    bias_update: float
    """The rate of this run; what it resumed from may have had another."""
    _moved: NDArray[np.float64] | None = None
    """How far the bias of each expert is above that of the run's beginning, fp64 [layers, experts]; None until biases
    are moved.
    """

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the values of a step whose routers were counted."""
        choices = record.router_choices
        if choices is None:
            return record
        counts = choices.counts.numpy()
        values = self._values(counts, choices)
        if self.bias_update:
            self._follow_biases(counts, is_skipped=bool(record.values["train/skipped"]))
        if self._moved is not None:
            drift = np.abs(self._moved)
            values |= {"bias_drift_mean": float(drift.mean()), "bias_drift_max": float(drift.max())}
        return record.with_values({f"router/{name}": value for name, value in values.items()})

    def state(self) -> dict[str, Any]:
        """How far biases have moved."""
        return {"moved": None if self._moved is None else self._moved.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._moved = None if state["moved"] is None else np.array(state["moved"], dtype=np.float64)

    def _values(self, counts: Counts, choices: RouterChoices) -> dict[str, float]:
        violations, effective = max_violations(counts), effective_experts(counts)
        values = {
            "max_violation_mean": float(violations.mean()),
            "max_violation_max": float(violations.max()),
            "dead_experts": float(num_dead_experts(counts)),
            "effective_experts_mean": float(effective.mean()),
            "effective_experts_min": float(effective.min()),
            "entropy": float(choices.entropy.mean()),
        }
        return values | ({"busiest_rank_ratio": busiest_rank_ratio(counts, self.ep)} if self.ep > 1 else {})

    def _follow_biases(self, counts: Counts, *, is_skipped: bool) -> None:
        """Move each bias by the rule of `engine.router_balance.update_biases`."""
        if self._moved is None:
            self._moved = np.zeros(counts.shape)
        if not is_skipped:
            above = np.sign(counts * counts.shape[1] - counts.sum(axis=1, keepdims=True))
            self._moved -= self.bias_update * above
