"""The training objectives. Each has a section class for its keys in the run file, and an `ObjectiveRow`.

A new objective needs both and a loss, here or in another package (CONTRIBUTING.md, "Adding an objective").
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from ds_finetune.config.other_programs import MEANT, SAMPLING
from ds_finetune.config.run_file import SHORT_FORMS
from ds_finetune.config.sections import RolloutConfig, Section, refused_values, short_form
from ds_finetune.config.value_types import Free, PathText, Refused, Rows
from ds_finetune.errors import ConfigError

BosRule = Literal["auto", "always", "never"]
Reference = Literal["cache", "adapters_off"]
KindName = Literal["dialogue", "text", "pairs", "marked", "labelled", "prompts"]
"""Kind of training rows that an objective reads; data/row_kind.py describes each kind."""
Unit = Literal["supervised tokens", "pairs", "examples"]
"""Unit over which the loss is averaged, such as supervised tokens or pairs."""
Head = Literal["tokens", "documents", "answers", "scores"]
"""What a loss is computed from: logits of tokens, log-probabilities of whole documents, log-probabilities of the tokens
of sampled answers, or scores of a classifier.
"""
Need = Literal["reference", "teacher", "baseline", "rollout"]
"""Further input that a loss may need. `reference`: log-probabilities of a reference model. `teacher`: a teacher's
next-token distributions. `baseline`: a number computed from the global batch before the loss. `rollout`: answers
sampled during training, and their rewards.
"""
ENTRY_POINTS = "ds_finetune.objectives"
"""Entry point group for objectives of installed packages: the entry's name is the objective, and its module calls
`register`.
"""


class ObjectiveConfig(Section):
    """The base of the sections of all objectives."""

    name: str

    @property
    def row(self) -> "ObjectiveRow":
        """The entry of this objective in the table OBJECTIVES."""
        return OBJECTIVES[self.name]

    @property
    def reference_source(self) -> Reference | None:
        """Where the log-probabilities of the reference model come from; None where the loss has no reference."""
        return getattr(self, "reference", "cache") if "reference" in self.row.needs else None

    @property
    def unit(self) -> Unit:
        """Unit over which the first term of the loss is averaged."""
        return self.row.unit

    @property
    def chosen_weight(self) -> float:
        """Weight of the cross entropy of the chosen answers, which is added to the preference loss."""
        return float(getattr(self, "nll_weight", 0.0))

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the classification head; 0 for a language model."""
        return 0

    @property
    def row_settings(self) -> Mapping[str, Any]:
        """Values that this section of the run file sets in `data.row_kind.RowKind`, by field."""
        return {}


class SftObjective(ObjectiveConfig):
    """Supervised fine-tuning."""

    name: Refused[Literal["sft"]] = "sft"
    """Cross entropy of the supervised tokens of dialogue, prompts with completions, or plain text."""


class PretrainObjective(ObjectiveConfig):
    """Continued pre-training."""

    name: Refused[Literal["pretrain"]]
    """Cross entropy of every token of plain text."""
    bos: Rows[BosRule] = "auto"
    """Whether each text begins with the beginning-of-sequence token; `auto` does what the tokenizer does by itself."""
    eos: Rows[bool] = True
    """Whether each text ends with the end-of-sequence token, which is predicted too."""

    @property
    def row_settings(self) -> Mapping[str, Any]:
        """Fields of `data.row_kind.RowKind` for plain text: the tokens that begin and end a text."""
        return {"bos": self.bos, "has_eos": self.eos}


class ClassificationObjective(ObjectiveConfig):
    """Classification or regression of texts and pairs of texts."""

    name: Refused[Literal["classification"]]
    """Cross entropy of the class of a text, or with `num_labels: 1` the squared error of a predicted number."""
    num_labels: Refused[int | None] = Field(default=None, ge=1)
    """Number of classes; 1 means regression. Left out, classes are counted in the training rows."""
    labels: Refused[tuple[str, ...]] = ()
    """Names of the classes, in the order of their numbers. Left out, they are read from the data or the model."""
    label_smoothing: Refused[float] = Field(default=0.0, ge=0, lt=1)
    """Label smoothing: fraction of the target that is spread over all classes."""

    @property
    def num_outputs(self) -> int:
        """The number of classes; 2 until the trainer has filled in the number found in the data."""
        return self.num_labels or len(self.labels) or 2

    @property
    def row_settings(self) -> Mapping[str, Any]:
        """Fields of `data.row_kind.RowKind` for classification: the names of the classes."""
        return {"labels": self.labels, "num_labels": self.num_labels}


class RewardObjective(ObjectiveConfig):
    """A reward model, trained on pairs of answers."""

    name: Refused[Literal["reward"]]
    """Loss of a pair: -log sigmoid(chosen reward - rejected reward - margin). Rows may have a column `margin`."""
    center_weight: Refused[float] = Field(default=0.0, ge=0)
    """Weight of the squared sum of a pair's rewards, a term that keeps rewards centred at zero; 0.01 is usual."""

    @property
    def num_outputs(self) -> int:
        """A reward model has one output, the reward."""
        return 1

    @property
    def row_settings(self) -> Mapping[str, Any]:
        """Fields of `data.row_kind.RowKind` for pairs of answers: a pair may have a margin."""
        return {"has_margin": True}


class DpoObjective(ObjectiveConfig):
    """Direct preference optimisation (Rafailov et al., arXiv 2305.18290) and its variants."""

    name: Refused[Literal["dpo"]]
    """Preference loss of pairs. Its reference model is the model before training."""
    beta: Refused[float] = Field(default=0.1, gt=0)
    """How strongly the loss ties the model to the reference model: beta of the papers."""
    loss: Refused[Literal["sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sigmoid_norm"]] = "sigmoid"
    """Variant of the DPO loss; docs/explanation/objectives.md has the formulas."""
    label_smoothing: Refused[float] = Field(default=0.0, ge=0, lt=0.5)
    """Assumed fraction of pairs whose rejected answer is better. It applies to `loss: sigmoid` (conservative DPO) and
    `robust`.
    """
    nll_weight: Refused[float] = Field(default=0.0, ge=0)
    """Weight of the cross entropy of the chosen answers, which is added to the preference loss."""
    reference: Reference = "cache"
    """Where the reference model's log-probabilities come from. `cache`: they are computed once and stored.
    `adapters_off`: the model without its adapters computes them at each step.
    """


class SimpoObjective(ObjectiveConfig):
    """SimPO (Meng et al., arXiv 2405.14734)."""

    name: Refused[Literal["simpo"]]
    """Preference loss of mean log-probabilities, without a reference model."""
    beta: Refused[float] = Field(default=2.0, gt=0)
    """Factor of the difference of both answers' mean log-probabilities (beta of the paper)."""
    gamma: Refused[float] = Field(default=0.5, ge=0)
    """Margin that is subtracted from the scaled difference of log-probabilities: gamma of the paper."""


class CpoObjective(ObjectiveConfig):
    """Contrastive preference optimisation (Xu et al., arXiv 2401.08417)."""

    name: Refused[Literal["cpo"]]
    """Preference loss without a reference model, plus the cross entropy of the chosen answers."""
    beta: Refused[float] = Field(default=0.1, gt=0)
    """Factor of the difference of both answers' log-probabilities (beta of the paper)."""
    loss: Refused[Literal["sigmoid", "hinge", "ipo"]] = "sigmoid"
    """Variant of the CPO loss; docs/explanation/objectives.md has the formulas."""
    nll_weight: Refused[float] = Field(default=1.0, ge=0)
    """Weight of the cross entropy of the chosen answers, which is added to the preference loss."""


class OrpoObjective(ObjectiveConfig):
    """Odds ratio preference optimisation (Hong et al., arXiv 2403.07691)."""

    name: Refused[Literal["orpo"]]
    """Cross entropy of the chosen answers plus the log odds ratio of both answers, without a reference model."""
    beta: Refused[float] = Field(default=0.1, gt=0)
    """Weight of the odds-ratio term of the loss."""

    @property
    def chosen_weight(self) -> float:
        """Weight of the cross entropy of the chosen answers, always 1: ORPO's loss adds a term of pairs to it."""
        return 1.0


class KtoObjective(ObjectiveConfig):
    """Kahneman-Tversky optimisation (Ethayarajh et al., arXiv 2402.01306)."""

    name: Refused[Literal["kto"]]
    """Loss of single answers that are labelled as good or bad, with a reference model."""
    beta: Refused[float] = Field(default=0.1, gt=0)
    """How strongly the loss ties the model to the reference model: beta of the papers."""
    desirable_weight: Refused[float] = Field(default=1.0, gt=0)
    """Weight of good answers in the loss."""
    undesirable_weight: Refused[float] = Field(default=1.0, gt=0)
    """Weight of bad answers in the loss."""
    reference: Reference = "cache"
    """Where the reference model's log-probabilities come from. `cache`: they are computed once and stored.
    `adapters_off`: the model without its adapters computes them at each step.
    """


class DistillObjective(ObjectiveConfig):
    """Distillation from a teacher."""

    name: Refused[Literal["distill"]]
    """Forward KL divergence from a teacher's distribution of the next token, optionally mixed with the cross entropy of
    the labels.
    """
    teacher: PathText | None = None
    """Folder or hub id of a teacher that runs beside the model and has the same tokenizer and vocabulary."""
    scores: PathText | None = None
    """Folder of a teacher's top-k log-probabilities of the training rows, which `ds-finetune teach` writes."""
    teacher_offload: Free[Literal["none", "cpu"]] = "none"
    """Where the teacher's weights are. `cpu`: in host memory, partitioned over ranks. `none`: on the GPUs, partitioned
    with ZeRO-3 and in full with other stages.
    """
    temperature: Refused[float] = Field(default=1.0, gt=0)
    """Number by which the logits of both models are divided. The divergence is then multiplied by the square of this
    number. It must be 1 with `scores`.
    """
    label_weight: Refused[float] = Field(default=0.0, ge=0, lt=1)
    """Weight of the cross entropy of the labels in the loss; the KL divergence has the weight 1 - label_weight."""


SEQUENCE_CLIPS = {"clip_low": 3e-4, "clip_high": 4e-4}
"""Defaults of GRPO's clips with `ratio: sequence` (GSPO). They are small because the mean ratio of an answer varies
much less than the ratio of a token.
"""


_OTHER_MODEL = "of other models there is only the one at the start: set start, or with lora adapters_off"
_NOT_CACHED = "answers that are sampled while training cannot be scored before it; set start, or with lora adapters_off"


class GrpoObjective(ObjectiveConfig):
    """Reinforcement learning from rewards of sampled answers: GRPO (Shao et al., arXiv 2402.03300) and its variants."""

    name: Refused[Literal["grpo"]]
    """Makes answers with a reward above the mean of their prompt's answers more likely, and the others less likely."""
    group_size: Refused[int] = Field(default=8, ge=2)
    """Number of answers that are sampled for each prompt (its group)."""
    advantage: Refused[Literal["mean", "mean_std", "leave_one_out"]] = "mean"
    """Advantage of an answer: its reward minus its group's mean (`mean`, Dr. GRPO), the same divided by the group's
    standard deviation (`mean_std`, GRPO), or its reward minus the mean of the group's other answers (`leave_one_out`,
    RLOO).
    """
    no_spread: Refused[Literal["count", "drop", "resample"]] = "count"
    """Treatment of groups with equal rewards, whose advantages are 0: `count` includes them in the mean of the loss,
    `drop` leaves them out, `resample` replaces them by answers to other prompts (DAPO).
    """
    aggregation: Refused[Literal["token", "sequence", "fixed"]] = "token"
    """How the loss is averaged. `token` (DAPO): mean over all answer tokens of the step. `sequence` (GRPO): mean over
    each answer's tokens, then over answers. `fixed` (Dr. GRPO): sum over each answer's tokens, divided by
    `fixed_length`, then mean over answers.
    """
    fixed_length: Refused[int | None] = Field(default=None, ge=1)
    """Number by which an answer's summed loss is divided with `aggregation: fixed`; default rollout.max_new_tokens."""
    ratio: Refused[Literal["token", "sequence", "capped"]] = "token"
    """How the loss uses the ratio of a token's current probability to that at sampling. `token` clips the ratio.
    `sequence` (GSPO) clips the geometric mean of the answer's ratios. `capped` (CISPO) weights the token by its ratio,
    which is capped at `ratio_cap` and gets no gradient.
    """
    clip_low: Refused[float] = Field(default=0.2, gt=0, lt=1)
    """Tokens whose probability ratio is below 1 - clip_low are not made less likely. With `ratio: sequence` the
    default is 3e-4.
    """
    clip_high: Refused[float] = Field(default=0.28, gt=0)
    """Tokens whose probability ratio is above 1 + clip_high are not made more likely. With `ratio: sequence` the
    default is 4e-4.
    """
    ratio_cap: Refused[float | None] = Field(default=None, gt=1)
    """Upper bound of the ratio with `ratio: capped`, such as 5.0. Unlike `clip_high`, it is not added to 1."""
    dual_clip: Refused[float | None] = Field(default=None, gt=1)
    """Upper bound of the ratio for tokens with a negative advantage, such as 3.0."""
    kl_weight: Refused[float] = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the model to the reference model; the estimate of its gradient is unbiased."""
    reference: Annotated[
        Literal["auto", "none", "adapters_off", "start"], refused_values(model=_OTHER_MODEL, cache=_NOT_CACHED)
    ] = "auto"
    """Reference model of the KL divergence: the model without its adapters (`adapters_off`), the initial weights, which
    stay in host memory (`start`), or none. `auto` is `adapters_off` with `lora`, else `none`.
    """
    truncated: Refused[Literal["train", "mask"]] = "train"
    """Whether answers cut at rollout.max_new_tokens are trained on; the mean reward of their group includes them."""
    mismatch: Refused[Literal["none", "token", "geometric"]] = "none"
    """Correction for different probabilities in training and sampling. `token` multiplies a token's loss by its
    probability in training over that in sampling, `geometric` by the geometric mean of this ratio over the answer.
    """
    mismatch_cap: Refused[float] = Field(default=2.0, ge=1)
    """Upper bound of the weight that `mismatch` computes."""
    reward_scale: Refused[Literal["sum", "each"]] = "sum"
    """How several rewards become one. `sum` adds them up with their weights. `each` (GDPO) first normalises each reward
    within the group of answers, to mean 0 and standard deviation 1.
    """

    @property
    def unit(self) -> Unit:
        """Unit over which GRPO's loss is averaged: supervised tokens with `aggregation: token`, else examples."""
        return "supervised tokens" if self.aggregation == "token" else "examples"

    def has_reference(self, *, has_adapters: bool) -> bool:
        """Whether GRPO computes log-probabilities of a reference model."""
        return self.reference in ("adapters_off", "start") or (self.reference == "auto" and has_adapters)


@dataclass(frozen=True)
class ObjectiveRow:
    """Properties of an objective that the program needs before torch is imported."""

    section: type[ObjectiveConfig]
    """Class of the objective's section in the run file; the literal type of its `name` is the objective's name."""
    maker: str | Callable[[Any], Any]
    """Function that makes the objectives.objective.Objective from the section. A text `module:name` names a function
    below `ds_finetune.objectives`, which is imported late because the import of its module imports torch.
    """
    kind: KindName
    """Kind of rows that the objective is trained on."""
    unit: Unit
    """Unit over which the first term of the loss is averaged, unless the section overrides `unit`."""
    head: Head
    needs: tuple[Need, ...] = ()

    @property
    def name(self) -> str:
        """Name of the objective in the run file."""
        return str(get_args(self.section.model_fields["name"].annotation)[0])

    @property
    def is_cross_entropy(self) -> bool:
        """Whether the loss is the mean cross entropy of tokens, which fused kernels compute."""
        return self.head == "tokens" and "teacher" not in self.needs


OBJECTIVES: dict[str, ObjectiveRow] = {
    row.name: row
    for row in (
        ObjectiveRow(SftObjective, "objective:token_objective", "dialogue", "supervised tokens", "tokens"),
        ObjectiveRow(PretrainObjective, "objective:token_objective", "text", "supervised tokens", "tokens"),
        ObjectiveRow(ClassificationObjective, "scores:make_classification", "labelled", "examples", "scores"),
        ObjectiveRow(DpoObjective, "preferences:DirectPreference", "pairs", "pairs", "documents", ("reference",)),
        ObjectiveRow(SimpoObjective, "preferences:SimplePreference", "pairs", "pairs", "documents"),
        ObjectiveRow(CpoObjective, "preferences:DirectPreference", "pairs", "pairs", "documents"),
        ObjectiveRow(OrpoObjective, "preferences:OddsRatioPreference", "pairs", "pairs", "documents"),
        ObjectiveRow(RewardObjective, "scores:make_reward", "pairs", "pairs", "scores"),
        ObjectiveRow(
            KtoObjective, "preferences:KahnemanTversky", "marked", "examples", "documents", ("reference", "baseline")
        ),
        ObjectiveRow(
            DistillObjective, "objective:Distillation", "dialogue", "supervised tokens", "tokens", ("teacher",)
        ),
        ObjectiveRow(GrpoObjective, "grpo:PolicyGradient", "prompts", "supervised tokens", "answers", ("rollout",)),
    )
}
"""All objectives by name, in the order in which docs and messages list them."""


def register(row: ObjectiveRow) -> None:
    """Register an objective of another package, so that run files can name it."""
    assert row.name not in OBJECTIVES, row.name
    OBJECTIVES[row.name] = row
    _sections.cache_clear()


def is_distillation(section: ObjectiveConfig) -> TypeGuard[DistillObjective]:
    """Whether the objective of this section trains on a teacher's distributions."""
    return "teacher" in section.row.needs


def is_grpo(section: ObjectiveConfig) -> TypeGuard[GrpoObjective]:
    """Whether the objective of this section trains on rewards of sampled answers."""
    return isinstance(section, GrpoObjective)


def rows_of_step(section: ObjectiveConfig, rollout: RolloutConfig, global_batch_size: int) -> int:
    """Number of data rows per optimizer step: the global batch size, or with GRPO the number of prompts."""
    return rollout.prompts_per_step if is_grpo(section) else global_batch_size


def cross_entropies() -> Iterator[str]:
    """Names of the objectives whose loss is the mean cross entropy of tokens."""
    return (name for name, row in OBJECTIVES.items() if row.is_cross_entropy)


@cache
def _sections() -> TypeAdapter[ObjectiveConfig]:
    sections: Any = Union[tuple(row.section for row in OBJECTIVES.values())]  # noqa: UP007 - of a tuple
    return TypeAdapter(Annotated[sections, Field(discriminator="name")])


def _read_section(value: object) -> ObjectiveConfig:
    """Parse the `objective` section of a run file. An unknown name is looked up in the entry points of packages."""
    if isinstance(value, ObjectiveConfig):
        return value
    name = value.get("name") if isinstance(value, Mapping) else None
    if isinstance(name, str) and name not in OBJECTIVES:
        for entry in entry_points(group=ENTRY_POINTS, name=name):
            entry.load()
    return _sections().validate_python(value)


class _SectionOfRow:
    """Pydantic type of an objective's section. Its JSON schema has the objectives registered so far."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(_read_section)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"enum": [*OBJECTIVES], "type": "string"}, handler(_sections().core_schema)]}


ObjectiveField = Annotated[ObjectiveConfig, _SectionOfRow(), BeforeValidator(short_form(SHORT_FORMS["objective"]))]
"""Field type of `objective`: the name alone, or a section with the name and further keys."""


def read_objective(value: object) -> ObjectiveConfig:
    """Parse the value of `objective`, a name or a mapping; ConfigError if it is not valid."""
    try:
        section: ObjectiveConfig = TypeAdapter(ObjectiveField).validate_python(value)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        if explained := explain_objective({**error, "loc": ("objective", *error["loc"])}):
            raise explained from None
        key = ".".join(map(str, error["loc"][1:]))
        raise ConfigError(
            f"objective {value!r} is not valid: {f'key {key}: ' if key else ''}{error['msg']}",
            hint="write a name such as pretrain, or {name: pretrain, eos: false}",
        ) from None
    return section


def explain_objective(error: Any) -> ConfigError | None:  # noqa: ANN401 - pydantic's ErrorDetails
    """Make the ConfigError for a pydantic error about the value of `objective`; None if it is about a key below it."""
    if tuple(error["loc"]) != ("objective",):
        return None
    names = f"objectives are {', '.join(OBJECTIVES)}"
    if error["type"] != "union_tag_invalid":
        return ConfigError(
            f"`objective` is {error['input']!r}: it should be a name or a section with a name",
            hint=f"write e.g. `objective: {{name: dpo, beta: 0.1}}`; {names}",
        )
    given = error["input"]["name"]
    word = str(given).lower().replace("-", "_")
    if word in SAMPLING:
        return ConfigError(
            f"`objective` is {given!r}, which trains on sampled answers and is not available in this version",
            hint=f"train grpo, which compares rewards of sampled answers, or dpo with pairs of answers; {names}",
        )
    near = MEANT.get(word) or next(iter(difflib.get_close_matches(word, OBJECTIVES, n=1)), None)
    guess = f"did you mean `{near}`? " if near else ""
    return ConfigError(f"`objective` is {given!r}, which is no objective", hint=f"{guess}{names}")


def objectives_with(key: str) -> list[str]:
    """Names of the objectives whose sections have the key `key`."""
    return [name for name, row in OBJECTIVES.items() if key in row.section.model_fields]
