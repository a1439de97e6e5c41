"""The objective of a run from its section of the run file."""

from ds_finetune.config.objectives import ClassificationObjective, ObjectiveConfig, RewardObjective
from ds_finetune.objectives.classification import Classification, Regression
from ds_finetune.objectives.objective import Objective, TokenObjective
from ds_finetune.objectives.reward import Reward


def make_objective(section: ObjectiveConfig) -> Objective:
    """The objective that `section` describes.

    A classification whose number of classes is left out gets two; the trainer fills in the number of the data.
    """
    match section:
        case ClassificationObjective():
            return _make_classification(section)
        case RewardObjective():
            return Reward(center_weight=section.center_weight)
        case _:
            return TokenObjective(section.name)


def _make_classification(section: ClassificationObjective) -> Objective:
    number = section.num_labels or len(section.labels) or 2
    return Regression() if number == 1 else Classification(number, label_smoothing=section.label_smoothing)
