"""The objective of a run from its section of the run file."""

from ds_finetune.config.objectives import (
    CpoObjective,
    DpoObjective,
    KtoObjective,
    ObjectiveConfig,
    OrpoObjective,
    SimpoObjective,
)
from ds_finetune.objectives.cpo import ContrastivePreference
from ds_finetune.objectives.dpo import DirectPreference
from ds_finetune.objectives.kto import KahnemanTversky
from ds_finetune.objectives.objective import Objective, TokenObjective
from ds_finetune.objectives.orpo import OddsRatioPreference
from ds_finetune.objectives.simpo import SimplePreference


def make_objective(section: ObjectiveConfig) -> Objective:
    """The objective that `section` describes."""
    match section:
        case DpoObjective():
            return DirectPreference(section)
        case SimpoObjective():
            return SimplePreference(section)
        case CpoObjective():
            return ContrastivePreference(section)
        case OrpoObjective():
            return OddsRatioPreference(section)
        case KtoObjective():
            return KahnemanTversky(section)
        case _:
            return TokenObjective(section.name)
