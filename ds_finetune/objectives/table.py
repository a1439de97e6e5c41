"""The objective of a run from its section of the run file."""

from ds_finetune.config.objectives import DistillObjective, ObjectiveConfig
from ds_finetune.objectives.distill import Distillation
from ds_finetune.objectives.objective import Objective, TokenObjective


def make_objective(section: ObjectiveConfig) -> Objective:
    """The objective that `section` describes."""
    if isinstance(section, DistillObjective):
        return Distillation(section)
    return TokenObjective(section.name)
