"""The objective of a run from its section of the run file."""

from collections.abc import Callable, Mapping
from typing import Any

from ds_finetune.config.objectives import (
    CpoObjective,
    DistillObjective,
    DpoObjective,
    KtoObjective,
    ObjectiveConfig,
    OrpoObjective,
    SimpoObjective,
)
from ds_finetune.objectives.cpo import ContrastivePreference
from ds_finetune.objectives.distill import Distillation
from ds_finetune.objectives.dpo import DirectPreference
from ds_finetune.objectives.kto import KahnemanTversky
from ds_finetune.objectives.objective import Objective, TokenObjective
from ds_finetune.objectives.orpo import OddsRatioPreference
from ds_finetune.objectives.simpo import SimplePreference

_OBJECTIVES: Mapping[type[ObjectiveConfig], Callable[[Any], Objective]] = {
    DpoObjective: DirectPreference,
    SimpoObjective: SimplePreference,
    CpoObjective: ContrastivePreference,
    OrpoObjective: OddsRatioPreference,
    KtoObjective: KahnemanTversky,
    DistillObjective: Distillation,
}
"""Objectives by their section; others are the cross entropy of tokens."""


def make_objective(section: ObjectiveConfig) -> Objective:
    """The objective that `section` describes."""
    make = _OBJECTIVES.get(type(section))
    return TokenObjective(section.name) if make is None else make(section)
