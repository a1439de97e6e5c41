"""The kind of rows that an objective is trained on: dialogue, plain text, pairs, marked answers or labelled texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from ds_finetune.config.objectives import BosRule, ClassificationObjective, ObjectiveConfig, PretrainObjective
from ds_finetune.errors import ConfigError

KindName = Literal["dialogue", "text", "pairs", "marked", "labelled"]
OBJECTIVES: Mapping[KindName, tuple[str, ...]] = {
    "dialogue": ("sft", "distill"),
    "text": ("pretrain",),
    "pairs": ("dpo", "simpo", "cpo", "orpo", "reward"),
    "marked": ("kto",),
    "labelled": ("classification",),
}
"""The objectives that are trained on each kind of rows."""
_NAMES: Mapping[KindName, str] = {
    "dialogue": "dialogue, prompts with completions, or plain text",
    "text": "plain text",
    "pairs": "pairs of a chosen and a rejected answer",
    "marked": "answers that are marked as good or bad",
    "labelled": "texts with a label",
}


@dataclass(frozen=True)
class RowKind:
    """What of the objective decides how records become documents.

    Class names and their number are those of the objective until `classes.find_classes` has read the data's
    (`has_known_classes`). `labels` is empty where rows have numbers of classes without names.
    """

    name: KindName = "dialogue"
    objective: str = "sft"
    has_margin: bool = False
    """Whether pairs have a margin."""
    labels: tuple[str, ...] = ()
    num_labels: int | None = None
    has_known_classes: bool = False
    bos: BosRule = "auto"
    """Token that begins a plain text."""
    has_eos: bool = True
    """Whether a plain text ends with the end-of-sequence token."""

    @classmethod
    def of(cls, section: ObjectiveConfig) -> Self:
        """The kind of rows of an objective; ConfigError where numbers of the section contradict."""
        name = next(kind for kind, objectives in OBJECTIVES.items() if section.name in objectives)
        if isinstance(section, PretrainObjective):
            return cls(name, section.name, bos=section.bos, has_eos=section.eos)
        if not isinstance(section, ClassificationObjective):
            return cls(name, section.name, has_margin=section.name == "reward")
        if len(set(section.labels)) != len(section.labels):
            raise ConfigError(
                f"objective.labels has a name twice: {', '.join(section.labels)}", hint="name each class once"
            )
        if len(section.labels) == 1:
            raise ConfigError(
                f"objective.labels names one class: {section.labels[0]}",
                hint="name two or more; for regression set objective.num_labels to 1 and name none",
            )
        if section.labels and section.num_labels not in (None, len(section.labels)):
            raise ConfigError(
                f"objective.num_labels is {section.num_labels}, and objective.labels names {len(section.labels)} "
                f"classes: {', '.join(section.labels)}",
                hint="leave one of them out",
            )
        return cls(name, section.name, labels=section.labels, num_labels=section.num_labels)

    @property
    def documents_per_unit(self) -> int:
        """Consecutive documents that are one unit: 2 for pairs; 0 where the loss is a sum over tokens."""
        return {"dialogue": 0, "text": 0, "pairs": 2, "marked": 1, "labelled": 1}[self.name]

    @property
    def unit(self) -> str:
        """What rows consist of, in the plural, for reports."""
        return {0: "documents", 1: "examples", 2: "pairs"}[self.documents_per_unit]

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers on a scale."""
        return self.name == "labelled" and self.num_labels == 1

    @property
    def description(self) -> str:
        """The kind of rows in words, with the objective."""
        return f"objective {self.objective} is trained on {_NAMES[self.name]}"

    @property
    def fingerprint(self) -> list[Any]:
        """All that affects documents, for the cache; the objective's name does not."""
        ends = [self.bos, self.has_eos] if self.name == "text" else []
        return [self.name, self.has_margin, list(self.labels), self.num_labels, *ends]


def objectives_of(kind: KindName) -> str:
    """The objectives that are trained on rows of this kind, for messages."""
    return ", ".join(OBJECTIVES[kind])


DIALOGUE = RowKind()
"""Rows of supervised fine-tuning."""
