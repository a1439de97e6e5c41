"""Sections of the run file for the training objective: which loss is minimised, and its numbers."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from ds_finetune.config.run_file import SHORT_FORMS
from ds_finetune.config.section import Section, short_form
from ds_finetune.errors import ConfigError

BosRule = Literal["auto", "always", "never"]
Reference = Literal["cache", "adapters_off"]


class SftObjective(Section):
    """Supervised fine-tuning."""

    name: Literal["sft"] = "sft"
    """Cross entropy of the supervised tokens of dialogue, prompts with completions, or plain text."""


class PretrainObjective(Section):
    """Continued pre-training."""

    name: Literal["pretrain"]
    """Cross entropy of every token of plain text."""
    bos: BosRule = "auto"
    """Token that begins each text: `auto` is what the tokenizer itself adds."""
    eos: bool = True
    """Whether each text ends with the end-of-sequence token, which is predicted too."""


class ClassificationObjective(Section):
    """Classification or regression of texts and pairs of texts."""

    name: Literal["classification"]
    """Cross entropy of the classes of texts, or with one label the squared error of a number."""
    num_labels: int | None = Field(default=None, ge=1)
    """Number of classes; 1 is regression. Left out, it is counted in the training rows."""
    labels: tuple[str, ...] = ()
    """Names of the classes, in the order of their numbers; left out, those of the data or of the model."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target that is spread over all classes."""


class RewardObjective(Section):
    """A reward model, trained on pairs of answers."""

    name: Literal["reward"]
    """-log sigmoid(difference of the rewards - margin) of pairs; rows may have a column `margin`."""
    center_weight: float = Field(default=0.0, ge=0)
    """Weight of the squared sum of both rewards, which keeps rewards centred at zero; 0.01 is usual."""


class DpoObjective(Section):
    """Direct preference optimisation (Rafailov et al., arXiv 2305.18290) and its variants."""

    name: Literal["dpo"]
    """Preference loss of pairs with a reference model, which is the model before training."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the tie to the reference."""
    loss: Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sigmoid_norm"] = "sigmoid"
    """Variant of the loss."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose answers are swapped; for `sigmoid` (conservative DPO) and `robust`."""
    nll_weight: float = Field(default=0.0, ge=0)
    """Weight of the cross entropy of the chosen answers, its mean over their tokens in the global batch."""
    reference: Reference = "cache"
    """Log-probabilities of the reference: computed once and cached, or with the adapters off at each step."""


class SimpoObjective(Section):
    """SimPO (Meng et al., arXiv 2405.14734)."""

    name: Literal["simpo"]
    """Preference loss of mean log-probabilities, without a reference."""
    beta: float = Field(default=2.0, gt=0)
    """Scale of the difference of the mean log-probabilities."""
    gamma: float = Field(default=0.5, ge=0)
    """Margin by which the scaled difference should be larger."""


class CpoObjective(Section):
    """Contrastive preference optimisation (Xu et al., arXiv 2401.08417)."""

    name: Literal["cpo"]
    """Preference loss without a reference, plus the cross entropy of the chosen answers."""
    beta: float = Field(default=0.1, gt=0)
    """Scale of the difference of the log-probabilities."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """Variant of the loss."""
    nll_weight: float = Field(default=1.0, ge=0)
    """Weight of the cross entropy of the chosen answers, its mean over their tokens in the global batch."""


class OrpoObjective(Section):
    """Odds ratio preference optimisation (Hong et al., arXiv 2403.07691)."""

    name: Literal["orpo"]
    """Cross entropy of the chosen answers plus the log odds ratio of both answers, without a reference."""
    beta: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio term."""


class KtoObjective(Section):
    """Kahneman-Tversky optimisation (Ethayarajh et al., arXiv 2402.01306)."""

    name: Literal["kto"]
    """Loss of single answers that are marked as good or bad, with a reference model."""
    beta: float = Field(default=0.1, gt=0)
    """Strength of the tie to the reference."""
    desirable_weight: float = Field(default=1.0, gt=0)
    """Weight of good answers."""
    undesirable_weight: float = Field(default=1.0, gt=0)
    """Weight of bad answers."""
    reference: Reference = "cache"
    """Log-probabilities of the reference: computed once and cached, or with the adapters off at each step."""


class DistillObjective(Section):
    """Distillation: forward KL divergence from a teacher's distribution of the next token."""

    name: Literal["distill"]
    """KL divergence from a teacher's distribution, optionally mixed with the cross entropy of the labels."""
    teacher: str | None = None
    """Folder or hub id of a teacher that runs beside the model; it needs the model's tokenizer and vocabulary."""
    scores: str | None = None
    """Folder of stored top-k log-probabilities, written by `ds-finetune teach`."""
    teacher_offload: Literal["none", "cpu"] = "none"
    """`cpu` holds the teacher's weights in host memory, partitioned over the ranks; `none` on the GPUs, whole on each
    rank, or with ZeRO-3 partitioned.
    """
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits of teacher and model in the divergence, which is multiplied by its square; 1 with `scores`."""
    label_weight: float = Field(default=0.0, ge=0, lt=1)
    """Share of the cross entropy of the labels in the loss; the rest is the divergence."""


ObjectiveConfig = (
    SftObjective
    | PretrainObjective
    | ClassificationObjective
    | RewardObjective
    | DpoObjective
    | SimpoObjective
    | CpoObjective
    | OrpoObjective
    | KtoObjective
    | DistillObjective
)


ObjectiveName = Literal[
    "sft", "pretrain", "classification", "reward", "dpo", "simpo", "cpo", "orpo", "kto", "distill"
]  # fmt: skip
_Section = Annotated[ObjectiveConfig, Field(discriminator="name")]
ObjectiveField = Annotated[
    _Section,
    BeforeValidator(short_form(SHORT_FORMS["objective"]), json_schema_input_type=ObjectiveName | _Section),
]
"""The objective as its name, or a section with the name and its numbers."""


def read_objective(value: object) -> ObjectiveConfig:
    """The section of a name or a mapping, as a run file has it; ConfigError where it is not valid."""
    try:
        section: ObjectiveConfig = TypeAdapter(ObjectiveField).validate_python(value)
    except ValidationError as invalid:
        # It imports this module.
        from ds_finetune.config.invalid_objectives import explain_objective

        error = invalid.errors()[0]
        if explained := explain_objective({**error, "loc": ("objective", *error["loc"])}):
            message, hint = explained
            raise ConfigError(f"{message}", hint=hint) from None
        key = ".".join(map(str, error["loc"][1:]))
        raise ConfigError(
            f"objective {value!r} is not valid: {f'{key}: ' if key else ''}{error['msg']}",
            hint="write a name such as pretrain, or {name: pretrain, eos: false}",
        ) from None
    return section
