"""The interface of a training objective.

One law holds for all objectives: a loss is a sum of terms, and each term is the mean over its units (supervised tokens,
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
"""Unit over which a term is a mean. `chosen_tokens`: supervised tokens of the chosen answers of pairs. `documents`:
documents with at least one token, supervised or not; each side of a pair is one. `tokens`: all tokens except padding,
supervised or not.
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
    """Numbers of the global batch that a forward needs to scale its loss; without them it returns plain sums."""

    weights: torch.Tensor
    """Factors of the objective's terms, fp64 [terms]."""
    baseline: torch.Tensor
    """z0 of KTO, else 0; fp64 scalar."""


class DocumentLogProbs(NamedTuple):
    """Log-probabilities of the documents of a forward, fp64 [documents] each. Padding is not a document.

    The two documents of a pair are consecutive: prompt with chosen answer, then prompt with rejected answer.
    """

    logp: torch.Tensor
    """Sum of the log-probabilities of its supervised tokens in nats; has a gradient."""
    num_tokens: torch.Tensor
    """Number of supervised tokens of the document."""
    target: torch.Tensor
    """KTO: 1 for a good answer, 0 for a bad one. Other objectives: the target stored with the row."""
    reference: torch.Tensor
    """`logp` under the reference model, without a gradient; zeros for objectives without a reference."""


class Objective(ABC):
    """What the engine knows of an objective: the terms of its loss, and how metrics follow from its sums."""

    name: str
    head: ClassVar[Head]
    terms: tuple[Term, ...]
    sum_names: tuple[str, ...]
    """Names of the sums that a forward returns, from which `metrics` computes."""
    documents_per_unit: int = 1
    """Number of documents that must be packed into the same row: 2 for pairs; 0 where documents do not matter."""
    is_per_token: bool = False
    """Whether the loss is the mean cross entropy of tokens."""
    reference_from_adapters: bool = False
    """Whether the reference model is the trained model with its adapters disabled, computed in each step."""
    reference_is_start: bool = False
    """Whether the reference model is the model before the first step, of which a copy is kept."""
    num_outputs: int = 0
    """Outputs of the classification head; 0 for a language model head."""
    gathers_scores: bool = False
    """Whether an evaluation metric needs the scores of all documents gathered, such as a rank correlation."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses log-probabilities of a reference model."""
        return "reference" in OBJECTIVES[self.name].needs

    @property
    def needs_baseline(self) -> bool:
        """Whether the loss needs a number of the global batch (KTO's z0) computed first, from additional documents."""
        return "baseline" in OBJECTIVES[self.name].needs

    def baseline(self, log_ratio_sum: float, count: float) -> float:
        """The number of the global batch with which the loss compares every example, such as KTO's z0.

        `log_ratio_sum` and `count` are the sum (nats) and the number of the log-ratios of model to reference over the
        mismatched answers (`Batch.baseline`) of all ranks.
        """
        assert not self.needs_baseline, f"{self.name} does not say how its baseline is computed"
        return 0.0

    def score_metrics(self, scores: NDArray[np.float64], targets: NDArray[np.float64]) -> dict[str, float]:
        """Metrics by name that need all documents at once, from each one's first score and target, fp64 [documents]."""
        return {}

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name, `loss` first, from the sums of a global batch or of all held-out rows, and from `counts`,
        the number of each unit. Without any unit every metric is 0.
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
        """Mean loss in nats per supervised token, and share of those whose argmax is the label."""
        tokens = max(counts["supervised_tokens"], 1)
        return {"loss": sums["loss"] / tokens, "accuracy": sums["correct"] / tokens}


class DocumentObjective(Objective):
    """Base of losses computed from the log-probability of documents: preference pairs and labelled completions."""

    head = "documents"

    @abstractmethod
    def loss(self, documents: DocumentLogProbs, weights: torch.Tensor, baseline: torch.Tensor) -> LossAndSums:
        """The contribution of these documents to the loss of the step.

        `weights` fp64 [terms] multiply the sums of the terms over their units. `baseline` is a number of the global
        batch, fp64 scalar: z0 of KTO, 0 for other objectives.
        """


class AnswerTokens(NamedTuple):
    """Numbers of the answer tokens of a forward, fp64 [tokens] each; NaN where a number is not known."""

    logp: torch.Tensor
    """Log-probability in nats under the model being trained; has a gradient."""
    entropy: torch.Tensor
    """Entropy of the model's distribution at this position, in nats, without a gradient."""
    advantage: torch.Tensor
    """Advantage of the answer of each token."""
    lengths: torch.Tensor
    """Length in tokens of the answer to which each token belongs."""
    old: torch.Tensor
    """Log-probability under the weights that sampled the answer; NaN where these are the current weights."""
    reference: torch.Tensor
    """Log-probability under the reference model."""
    sampled: torch.Tensor
    """Log-probability that the sampler reported."""
    means: Callable[[torch.Tensor], torch.Tensor]
    """Function that replaces each number, fp64 [tokens] without a gradient, by the mean over its answer."""


class AnswerObjective(Objective):
    """Base of losses computed from the tokens of sampled answers."""

    head = "answers"

    @abstractmethod
    def loss(self, tokens: AnswerTokens, weights: torch.Tensor) -> LossAndSums:
        """The contribution of these tokens to the loss of the step; `weights` fp64 [terms] multiply the sums of the
        terms over their units. Sums for metrics are sums over tokens.
        """


class ScoreObjective(Objective):
    """Base of losses computed from the outputs of a classification head, one row of outputs per document."""

    head = "scores"
    starts_small: bool = False
    """Whether the head is initialised for scores close to 0, instead of by the model's own initialisation."""

    @abstractmethod
    def loss(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> LossAndSums:
        """The contribution of `scores` fp32 [documents, num_outputs] with `targets` fp64 [documents] to the loss of the
        step; `weights` fp64 [terms] multiply the sums of the terms over their units.
        """


def token_objective(section: ObjectiveConfig) -> TokenObjective:
    """The cross-entropy objective named in the section."""
    return TokenObjective(section.name)


def make_objective(section: ObjectiveConfig) -> Objective:
    """The objective that `section` describes, built by the `maker` of its row of the table.

    A classification without a number of classes gets two; the trainer replaces this by the number found in the data.
    """
    row = section.row
    make = resolve_name(f"ds_finetune.objectives.{row.maker}") if isinstance(row.maker, str) else row.maker
    objective: Objective = make(section)
    unit = objective.terms[0].unit.replace("_", " ")
    assert (objective.name, objective.head, unit) == (row.name, row.head, section.unit), row
    return objective


def is_of_documents(objective: Objective) -> TypeGuard[DocumentObjective]:
    """Whether the loss needs log-probabilities of documents."""
    return objective.head == "documents"


def is_of_answers(objective: Objective) -> TypeGuard[AnswerObjective]:
    """Whether the loss needs the tokens of sampled answers."""
    return objective.head == "answers"


def is_of_scores(objective: Objective) -> TypeGuard[ScoreObjective]:
    """Whether the loss needs the scores of a classification head."""
    return objective.head == "scores"


@dataclass(frozen=True)
class TopLogProbs:
    """A teacher's next-token distributions for a batch [rows, tokens], truncated to the k most likely tokens; zeros
    where a token is not supervised.
    """

    ids: torch.Tensor
    """Ids of the k most likely tokens, int32 [rows, tokens, k]."""
    log_probs: torch.Tensor
    """Log-probabilities of these k tokens and, last, of all other tokens together, fp16 [rows, tokens, k + 1]."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "TopLogProbs":
        """These distributions on `device`."""
        return TopLogProbs(*(part.to(device, non_blocking=non_blocking) for part in (self.ids, self.log_probs)))


UNKNOWN_EXPERTS = -1
"""Value in `AnswerNumbers.experts` for a token whose routed experts are not known."""


@dataclass(frozen=True)
class AnswerNumbers:
    """Log-probabilities of answer tokens that are known before the forward, at the positions of their labels: fp32
    [rows, tokens] each, NaN where not known.
    """

    old: torch.Tensor
    """Log-probabilities under the weights that sampled the answers."""
    reference: torch.Tensor
    """Log-probabilities under the reference model."""
    sampled: torch.Tensor
    """Log-probabilities that the sampler reported."""
    experts: torch.Tensor | None = None
    """Experts that computed the logits from which the sampler took each token, encoded as int16 [rows, tokens, layers]
    (`model.routers`).
    """


@dataclass(frozen=True)
class Examples:
    """The documents of one forward in the order of its rows, without padding. Used by objectives whose loss is not
    simply a sum over tokens.
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
    """Stored next-token distributions of a teacher; None without a teacher."""
    answers: AnswerNumbers | None = None
    """Log-probabilities known of sampled answers; None for other documents."""


class Distillation(Objective):
    """Mean over supervised tokens of label_weight x cross entropy + (1 - label_weight) x T^2 x KL(teacher || model)."""

    name = "distill"
    head = "tokens"
    terms = (Term("supervised_tokens"),)
    sum_names = ("loss", "divergence", "label_loss", "correct", "tokens_of_teacher")

    def __init__(self, section: DistillObjective) -> None:
        self.section = section
        # Stored teacher distributions are looked up by document number, so the documents must be known.
        self.documents_per_unit = 1 if section.scores is not None else 0

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, the divergence and the cross entropy of the labels in nats per supervised token, and the share of
        tokens that are predicted right.

        Rows without a teacher's distribution, which are held-out rows beside stored log-probabilities, have no
        divergence: their loss is the cross entropy of the labels.
        """
        tokens = max(counts["supervised_tokens"], 1)
        means = {name: sums[name] / tokens for name in ("loss", "divergence", "label_loss")}
        if not sums["tokens_of_teacher"]:
            del means["divergence"]
        return means | {"accuracy": sums["correct"] / tokens}
