"""The objective of a run from its section of the run file."""

from collections.abc import Callable, Mapping
from typing import Any

from ds_finetune.config.objectives import (
    ClassificationObjective,
    CpoObjective,
    DistillObjective,
    DpoObjective,
    KtoObjective,
    ObjectiveConfig,
    OrpoObjective,
    RewardObjective,
    SimpoObjective,
)
from ds_finetune.objectives.classification import Classification, Regression
from ds_finetune.objectives.distill import Distillation
from ds_finetune.objectives.dpo import DirectPreference
from ds_finetune.objectives.kto import KahnemanTversky
from ds_finetune.objectives.objective import Objective, TokenObjective
from ds_finetune.objectives.reference_free import ContrastivePreference, OddsRatioPreference, SimplePreference
from ds_finetune.objectives.reward import Reward

_MAKERS: Mapping[type, Callable[[Any], Objective]] = {
    DpoObjective: DirectPreference,
    SimpoObjective: SimplePreference,
    CpoObjective: ContrastivePreference,
    OrpoObjective: OddsRatioPreference,
    KtoObjective: KahnemanTversky,
    DistillObjective: Distillation,
    RewardObjective: lambda section: Reward(center_weight=section.center_weight),
    ClassificationObjective: lambda section: _make_classification(section),
}


def make_objective(section: ObjectiveConfig) -> Objective:
    """The objective that `section` describes.

    A classification whose number of classes is left out gets two; the trainer fills in the number of the data.
    """
    make = _MAKERS.get(type(section))
    return TokenObjective(section.name) if make is None else make(section)


def _make_classification(section: ClassificationObjective) -> Objective:
    number = section.num_labels or len(section.labels) or 2
    return Regression() if number == 1 else Classification(number, label_smoothing=section.label_smoothing)
