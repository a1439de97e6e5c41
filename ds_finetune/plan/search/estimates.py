"""Memory and time of the layouts of one run on one kind of machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_finetune.plan.estimate.accelerators import Machine
from ds_finetune.plan.estimate.memory import (
    MemoryEstimate,
    estimate_memory,
    estimate_stages,
    fullest_stage,
    least_bytes_of_stages,
)
from ds_finetune.plan.estimate.row_shape import RowShape
from ds_finetune.plan.estimate.step_time import LeastSeconds, TimeEstimate, estimate_time, least_seconds, step_seconds
from ds_finetune.plan.search.budget import Budget
from ds_finetune.plan.search.candidates import Candidate
from ds_finetune.plan.search.layout import Layout


@dataclass(frozen=True)
class Estimates:
    """Estimates for candidates; those that are asked for several times are remembered."""

    model: Mapping[str, Any]
    """config.json."""
    machine: Machine
    budget: Budget
    rows: RowShape
    _memory: dict[Layout, MemoryEstimate] = field(default_factory=dict)
    _fits: dict[Layout, bool] = field(default_factory=dict)
    _least_seconds: dict[Layout, LeastSeconds] = field(default_factory=dict)

    def memory(self, candidate: Candidate) -> MemoryEstimate:
        """What it needs."""
        if candidate.layout not in self._memory:
            self._memory[candidate.layout] = estimate_memory(candidate.plan, self.model)
        return self._memory[candidate.layout]

    def excess(self, candidate: Candidate) -> int:
        """Bytes that it needs beyond the budget; 0 where it fits."""
        return self.budget.excess(self.memory(candidate))

    def fits(self, candidate: Candidate) -> bool:
        """Whether it exceeds nothing; where it does, that takes a part of the time of `excess`."""
        if candidate.layout not in self._fits:
            self._fits[candidate.layout] = self._is_fitting(candidate)
        return self._fits[candidate.layout]

    def _is_fitting(self, candidate: Candidate) -> bool:
        fitting: list[MemoryEstimate] = []
        for stage in estimate_stages(candidate.plan, self.model):
            if self.budget.device_excess(stage) > 0:
                return False
            fitting.append(stage)
        return not self.budget.excess(fullest_stage(fitting))

    def least_excess(self, candidate: Candidate) -> int:
        """Bytes that its states need beyond the budget, however its layers are divided over the stages of a
        pipeline.
        """
        return self.budget.least_excess(least_bytes_of_stages(candidate.plan, self.model))

    def seconds(self, candidate: Candidate) -> float:
        """Of a step; a part of the time of `time`."""
        return step_seconds(candidate.plan, self.model, machine=self.machine, rows=self.rows)

    def time(self, candidate: Candidate) -> TimeEstimate:
        """The time of a step by parts."""
        return estimate_time(candidate.plan, self.model, machine=self.machine, rows=self.rows)

    def least_seconds(self, candidate: Candidate) -> LeastSeconds:
        """Seconds of a step at least, however the layers are divided over the stages of a pipeline."""
        if candidate.layout not in self._least_seconds:
            run = candidate.plan, self.model
            self._least_seconds[candidate.layout] = least_seconds(*run, machine=self.machine, rows=self.rows)
        return self._least_seconds[candidate.layout]
