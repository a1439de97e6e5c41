"""Kinds of data rows: dialogue, plain text, preference pairs, labelled completions, labelled texts, prompts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ds_finetune.config.objectives import OBJECTIVES, BosRule, KindName, ObjectiveConfig
from ds_finetune.errors import ConfigError

_DESCRIPTIONS: Mapping[KindName, str] = {
    "dialogue": "dialogue, prompts with completions, or plain text",
    "text": "plain text",
    "pairs": "pairs of a chosen and a rejected answer",
    "marked": "answers that are labelled good or bad",
    "labelled": "texts with a label",
    "prompts": "prompts, to which the model samples answers",
}


@dataclass(frozen=True)
class RowKind:
    """Properties of an objective that decide how records become documents.

    The number and names of classes are those of the run file until `classes.find_classes` has read them from the data
    (`has_known_classes`). `labels` is empty if classes are numbers without names.
    """

    name: KindName = "dialogue"
    objective: str = "sft"
    has_margin: bool = False
    labels: tuple[str, ...] = ()
    num_labels: int | None = None
    has_known_classes: bool = False
    bos: BosRule = "auto"
    """Whether a plain text begins with the BOS token; `auto` leaves this to the tokenizer."""
    has_eos: bool = True

    @classmethod
    def of(cls, section: ObjectiveConfig) -> Self:
        """Kind of data rows of an objective; ConfigError where objective.num_labels and .labels contradict."""
        kind = cls(section.row.kind, section.name, **section.row_settings)
        labels = kind.labels
        if len(set(labels)) != len(labels):
            raise ConfigError(f"objective.labels has a name twice: {', '.join(labels)}", hint="name each class once")
        if len(labels) == 1:
            raise ConfigError(
                f"objective.labels names one class: {labels[0]}",
                hint="name two or more; for regression set objective.num_labels: 1 and name none",
            )
        if labels and kind.num_labels not in (None, len(labels)):
            raise ConfigError(
                f"objective.num_labels is {kind.num_labels}, and objective.labels names {len(labels)} classes: "
                f"{', '.join(labels)}",
                hint="leave one of them out",
            )
        return kind

    @property
    def documents_per_unit(self) -> int:
        """Number of documents in an example of the loss: 2 for pairs, 0 for a loss that sums over tokens, else 1."""
        return {"dialogue": 0, "text": 0, "pairs": 2}.get(self.name, 1)

    @property
    def unit(self) -> str:
        """Plural noun for what reports count: documents, examples, pairs or prompts."""
        by_size = {0: "documents", 1: "examples", 2: "pairs"}
        return "prompts" if self.name == "prompts" else by_size[self.documents_per_unit]

    @property
    def has_supervised_tokens(self) -> bool:
        """Whether training rows have supervised tokens; labelled texts and prompts have none."""
        return self.name not in ("labelled", "prompts")

    @property
    def is_regression(self) -> bool:
        """Whether labels are regression targets."""
        return self.name == "labelled" and self.num_labels == 1

    @property
    def description(self) -> str:
        """Description of this kind of data rows and its objective, for messages."""
        return f"objective {self.objective} is trained on {_DESCRIPTIONS[self.name]}"

    @property
    def fingerprint(self) -> list[Any]:
        """Properties that change documents, for the key of the data cache. The objective's name is not among them."""
        ends = [self.bos, self.has_eos] if self.name == "text" else []
        return [self.name, self.has_margin, list(self.labels), self.num_labels, *ends]


def objectives_of(kind: KindName) -> list[str]:
    """Names of the objectives that train on data rows of this kind."""
    return [name for name, row in OBJECTIVES.items() if row.kind == kind]


DIALOGUE = RowKind()
