"""The objective of a run from its section of the run file."""

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.objectives.objective import Objective, TokenObjective


def make_objective(section: ObjectiveConfig) -> Objective:
    """The objective that `section` describes."""
    return TokenObjective(section.name)
