"""The interface of a training objective.

One law holds for all of them: a loss is a sum of terms, and each term is the mean over its units (supervised tokens,
pairs, examples) of the *global* batch, however the batch is split over ranks and micro-batches. The number of units is
known before the first forward, so a forward returns its contribution to these means.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import ClassVar, Literal, NamedTuple, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.config.objectives import OBJECTIVES, DistillObjective, Head, ObjectiveConfig

Unit = Literal["supervised_tokens", "chosen_tokens", "pairs", "examples", "documents", "tokens"]
"""What a term is a mean over. `chosen_tokens` are the supervised tokens of the chosen answers of pairs. `documents` are
those with at least one token of text, supervised or not; each side of a pair is one. `tokens` are those of all texts,
supervised or not, without padding.
"""


@dataclass(frozen=True)
class Term:
    """One term of a loss: the mean over a unit of the global batch, times `weight`."""

    unit: Unit
    weight: float = 1.0


class LossAndSums(NamedTuple):
    """Result of one forward: its contribution to the loss of the step, and sums for the metrics.

    `loss` is a scalar, the weighted sum of the terms. `sums` is fp64, without a gradient, in the order of `sum_names`.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    scores: torch.Tensor | None = None
    """Outputs of a classification head, fp32 [documents, outputs] without a gradient; None for other objectives."""


class StepNumbers(NamedTuple):
    """Numbers of the global batch that a forward needs; without them a forward returns plain sums."""

    weights: torch.Tensor
    """Factors of the objective's terms, fp64 [terms]."""
    baseline: torch.Tensor
    """z0 of KTO, else 0; fp64 scalar."""


class DocumentLogProbs(NamedTuple):
    """Log-probabilities of the documents of a forward, fp64 [documents] each; padding is no document.

    Pairs are consecutive documents: the chosen answer, then the rejected one, each with its prompt.
    """

    logp: torch.Tensor
    """Sum of the log-probabilities of its supervised tokens in nats; has a gradient."""
    num_tokens: torch.Tensor
    """Number of its supervised tokens."""
    target: torch.Tensor
    """1 or 0 for a good or bad answer (KTO), else the objective's number of the row."""
    reference: torch.Tensor
    """`logp` by the reference model, without a gradient; zeros where the objective has none."""


class Objective(ABC):
    """What the engine knows of an objective: its terms, and the metrics that follow from its sums."""

    name: str
    head: ClassVar[Head]
    terms: tuple[Term, ...]
    sum_names: tuple[str, ...]
    """Names of the numbers that a forward adds up, for `metrics`."""
    documents_per_unit: int = 1
    """Documents that are packed together: 2 for pairs; 0 where documents do not matter."""
    is_per_token: bool = False
    """Whether the loss is the mean cross entropy of tokens."""
    reference_from_adapters: bool = False
    """Whether the reference is the model with its adapters off, computed in each step."""
    reference_is_start: bool = False
    """Whether the reference is the model before the first step, whose weights are kept."""
    num_outputs: int = 0
    """Outputs of the classification head that is trained; 0 for a language model's."""
    gathers_scores: bool = False
    """Whether some metric of an evaluation needs the scores of all documents together."""

    @property
    def needs_reference(self) -> bool:
        """Whether its loss compares with the log-probabilities of a reference model."""
        return "reference" in OBJECTIVES[self.name].needs

    @property
    def needs_baseline(self) -> bool:
        """Whether its loss needs a number of the global batch that is computed first, from documents of their own."""
        return "baseline" in OBJECTIVES[self.name].needs

    def baseline(self, log_ratio_sum: float, count: float) -> float:
        """The number that every example's loss is compared with, such as KTO's z0, once for each global batch.

        `log_ratio_sum` and `count` are the sum (nats) and the number of the log-ratios of model to reference over the
        mismatched answers (`Batch.baseline`) of all ranks.
        """
        assert not self.needs_baseline, f"{self.name} does not say how its baseline is computed"
        return 0.0

    def score_metrics(self, scores: NDArray[np.float64], targets: NDArray[np.float64]) -> dict[str, float]:
        """Metrics by name that need the first score of every document, and its target, together: fp64 [documents]."""
        return {}

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name, `loss` first, from the sums and the numbers of units of a global batch, or of all held-out
        rows. The keys of `counts` are units. Without a unit every metric is 0.
        """


class TokenObjective(Objective):
    """The cross entropy of supervised tokens, computed by a fused kernel."""

    head = "tokens"
    terms = (Term("supervised_tokens"),)
    sum_names = ("loss", "correct")
    documents_per_unit = 0
    is_per_token = True

    def __init__(self, name: str) -> None:
        self.name = name

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Mean loss in nats per supervised token, and share of tokens that are predicted right."""
        tokens = max(counts["supervised_tokens"], 1)
        return {"loss": sums["loss"] / tokens, "accuracy": sums["correct"] / tokens}


class DocumentObjective(Objective):
    """A loss of the log-probabilities of whole documents: preferences and marked answers."""

    head = "documents"

    @abstractmethod
    def loss(self, documents: DocumentLogProbs, weights: torch.Tensor, baseline: torch.Tensor) -> LossAndSums:
        """The contribution of these documents to the loss of the step.

        `weights` fp64 [terms] multiply the sums of the terms over their units. `baseline` is a number of the global
        batch, fp64 scalar: z0 of KTO, 0 for other objectives.
        """


class AnswerTokens(NamedTuple):
    """The answer tokens of a forward, fp64 [tokens] each; NaN where a number is absent."""

    logp: torch.Tensor
    """Log-probability in nats; has a gradient."""
    entropy: torch.Tensor
    """Entropy of the distribution from which the token comes, in nats, without a gradient."""
    advantage: torch.Tensor
    """Advantage of the answer of each token."""
    lengths: torch.Tensor
    """Tokens of the answer of each token."""
    old: torch.Tensor
    """`logp` by the weights that sampled the answer, in a training forward; absent where those are the weights of
    now.
    """
    reference: torch.Tensor
    """`logp` by the reference model."""
    sampled: torch.Tensor
    """`logp` as the sampler knew it."""
    means: Callable[[torch.Tensor], torch.Tensor]
    """The mean over its answer for each token, of numbers fp64 [tokens] without a gradient."""


class AnswerObjective(Objective):
    """A loss of the tokens of answers that the model has sampled."""

    head = "answers"

    @abstractmethod
    def loss(self, tokens: AnswerTokens, weights: torch.Tensor) -> LossAndSums:
        """The contribution of these tokens to the loss of the step; `weights` fp64 [terms] multiply the sums of the
        terms over their units. Sums for metrics are sums over tokens.
        """


class ScoreObjective(Objective):
    """A loss of the outputs of a classification head, one row of outputs for each document."""

    head = "scores"
    starts_small: bool = False
    """Whether the first scores are close to 0, instead of what the model's own rule for classes gives."""

    @abstractmethod
    def loss(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> LossAndSums:
        """The contribution of `scores` fp32 [documents, num_outputs] with `targets` fp64 [documents] to the loss of the
        step; `weights` fp64 [terms] multiply the sums of the terms over their units.
        """


def token_objective(section: ObjectiveConfig) -> TokenObjective:
    """The cross entropy of tokens, by the name of the section."""
    return TokenObjective(section.name)


def make_objective(section: ObjectiveConfig) -> Objective:
    """The objective that `section` describes, made by the maker of its row.

    A classification whose number of classes is left out gets two; the trainer fills in the number of the data.
    """
    row = section.row
    make = resolve_name(f"ds_finetune.objectives.{row.maker}") if isinstance(row.maker, str) else row.maker
    objective: Objective = make(section)
    unit = objective.terms[0].unit.replace("_", " ")
    assert (objective.name, objective.head, unit) == (row.name, row.head, section.unit), row
    return objective


def is_of_documents(objective: Objective) -> TypeGuard[DocumentObjective]:
    """Whether the loss reads the log-probabilities of documents."""
    return objective.head == "documents"


def is_of_answers(objective: Objective) -> TypeGuard[AnswerObjective]:
    """Whether the loss reads the tokens of sampled answers."""
    return objective.head == "answers"


def is_of_scores(objective: Objective) -> TypeGuard[ScoreObjective]:
    """Whether the loss reads the scores of a classification head."""
    return objective.head == "scores"


@dataclass(frozen=True)
class TopLogProbs:
    """A teacher's distributions of the next token, of rows [rows, tokens]; zeros where a token is not supervised."""

    ids: torch.Tensor
    """Its k most likely token ids, int32 [rows, tokens, k]."""
    log_probs: torch.Tensor
    """Their log-probabilities and, last, that of all other tokens together, fp16 [rows, tokens, k + 1]."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "TopLogProbs":
        """These distributions on `device`."""
        return TopLogProbs(*(part.to(device, non_blocking=non_blocking) for part in (self.ids, self.log_probs)))


UNKNOWN_EXPERTS = -1
"""Mark of a token whose experts are not known."""


@dataclass(frozen=True)
class AnswerNumbers:
    """What is known of answer tokens before the forward, at the positions of their labels: log-probabilities, fp32
    [rows, tokens] each, which are NaN where one is not known.
    """

    old: torch.Tensor
    """By the weights that sampled the answers."""
    reference: torch.Tensor
    """By the reference model."""
    sampled: torch.Tensor
    """As the sampler knew them."""
    experts: torch.Tensor | None = None
    """Marks of the experts that sampled them, int16 [rows, tokens, layers] (`model.routers`)."""


@dataclass(frozen=True)
class Examples:
    """The documents of one forward in the order of its rows, without padding, for objectives whose loss is not a sum
    over tokens.
    """

    index: torch.Tensor
    """Number of each token's document within this forward, int64 [rows, tokens]; -1 for padding."""
    starts: torch.Tensor
    """Position of the first token of each document in the flattened rows, int64 [documents]."""
    ends: torch.Tensor
    """Position of the last token of each document in the flattened rows, int64 [documents]."""
    numbers: torch.Tensor
    """Number of each document in the data, int64 [documents]."""
    targets: torch.Tensor
    """Target of each document, fp64 [documents]."""
    reference: torch.Tensor
    """Log-probability of each document under the reference model, fp64 [documents]; zeros where there is none."""
    top: TopLogProbs | None = None
    """Stored distributions of a teacher; None where there are none."""
    answers: AnswerNumbers | None = None
    """What is known of the tokens of sampled answers; None for other documents."""


class Distillation(Objective):
    """Mean over supervised tokens of label_weight x cross entropy + (1 - label_weight) x T^2 x KL(teacher || model)."""

    name = "distill"
    head = "tokens"
    terms = (Term("supervised_tokens"),)
    sum_names = ("loss", "divergence", "label_loss", "correct", "tokens_of_teacher")

    def __init__(self, section: DistillObjective) -> None:
        self.section = section
        # Stored log-probabilities are found by the numbers of the documents.
        self.documents_per_unit = 1 if section.scores is not None else 0

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, the divergence and the cross entropy of the labels in nats per supervised token, and the share of
        tokens that are predicted right.

        Rows without a teacher's distribution, which are held-out rows beside stored log-probabilities, have no
        divergence: their loss is the cross entropy of the labels.
        """
        tokens = max(counts["supervised_tokens"], 1)
        found = {name: sums[name] / tokens for name in ("loss", "divergence", "label_loss")}
        if not sums["tokens_of_teacher"]:
            del found["divergence"]
        return found | {"accuracy": sums["correct"] / tokens}
