"""The interface of a training objective.

One law holds for all objectives: a loss is a sum of terms, and each term is a mean over the supervised tokens, pairs or
examples of the *global* batch, however the batch is split over ranks and micro-batches. The numbers of tokens, pairs
and examples are known before the first forward, so each forward returns its contribution to these means.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.config.objectives import OBJECTIVES, DistillObjective, Head, ObjectiveConfig

Unit = Literal["supervised_tokens", "chosen_tokens", "pairs", "examples", "documents", "tokens"]
"""Units over which a term of a loss is a mean. `chosen_tokens` are the supervised tokens of the chosen answers of
pairs, `documents` the documents with at least one token (a pair has two), and `tokens` all tokens except padding,
supervised or not.
"""


@dataclass(frozen=True)
class Term:
    """One term of a loss: `weight` times a mean over all tokens, pairs or examples (`unit`) of the global batch."""

    unit: Unit
    weight: float = 1.0


class LossAndSums(NamedTuple):
    """Result of one forward: its contribution to the loss of the step, and sums for the metrics.

    `loss` is a scalar, the weighted sum of the objective's terms. `sums` are fp64 without a gradient, in the order of
    the names in `Objective.sum_names`.
    """

    loss: torch.Tensor
    sums: torch.Tensor
    scores: torch.Tensor | None = None
    """Outputs of a classification head, fp32 [documents, outputs] without a gradient; None for other objectives."""


class StepNumbers(NamedTuple):
    """Numbers that normalise the loss of a forward by the global batch. Without them the loss is a plain sum."""

    weights: torch.Tensor
    """Factor by which the sum of each term of the loss is multiplied, fp64 [terms]."""
    baseline: torch.Tensor
    """Baseline z0 of KTO, fp64 scalar; 0 for other objectives."""


class DocumentLogProbs(NamedTuple):
    """Log-probabilities of the documents of a forward, fp64 [documents] each. Padding is not a document.

    The two documents of a pair are consecutive: prompt with chosen answer, then prompt with rejected answer.
    """

    logp: torch.Tensor
    """Sum of the log-probabilities of each document's supervised tokens, in nats; it has a gradient."""
    num_tokens: torch.Tensor
    """Number of supervised tokens of each document."""
    target: torch.Tensor
    """Target of each document: for KTO 1 for a good answer and 0 for a bad one, else the target stored in the data."""
    reference: torch.Tensor
    """Sums of log-probabilities under the reference model, without a gradient; zeros without a reference model."""


class Objective(ABC):
    """Base class of objectives: the terms of a loss, and how metrics follow from sums over a batch."""

    name: str
    head: ClassVar[Head]
    terms: tuple[Term, ...]
    sum_names: tuple[str, ...]
    """Names of the sums that a forward returns, from which the metrics are computed."""
    documents_per_unit: int = 1
    """Number of documents that must share a row: 2 for pairs, 0 if the loss does not depend on documents."""
    is_per_token: bool = False
    """Whether the loss is the mean cross entropy of tokens."""
    reference_from_adapters: bool = False
    """Whether the reference model is the trained model without its adapters, and runs in each step."""
    reference_is_start: bool = False
    """Whether the reference model is a copy of the model before the first step."""
    num_outputs: int = 0
    """Number of outputs of the classification head; 0 for a language model head."""
    gathers_scores: bool = False
    """Whether an evaluation metric needs the scores of all documents gathered, such as a rank correlation."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses log-probabilities of a reference model."""
        return "reference" in OBJECTIVES[self.name].needs

    @property
    def needs_baseline(self) -> bool:
        """Whether the loss needs a number computed over the global batch before it, such as KTO's z0."""
        return "baseline" in OBJECTIVES[self.name].needs

    def baseline(self, log_ratio_sum: float, count: float) -> float:
        """The number with which the loss compares every example of a global batch, such as KTO's z0.

        `log_ratio_sum` (nats) and `count` are the sum and the number of the log-ratios of model to reference over the
        mismatched answers (`Batch.baseline`) of all ranks.
        """
        assert not self.needs_baseline, f"{self.name} does not say how its baseline is computed"
        return 0.0

    def score_metrics(self, scores: NDArray[np.float64], targets: NDArray[np.float64]) -> dict[str, float]:
        """Metrics by name that need the scores and targets of all documents together, fp64 [documents] each."""
        return {}

    @abstractmethod
    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Metrics by name, `loss` first.

        `sums` are over a global batch or over all held-out rows, and `counts` are the numbers of tokens, pairs and
        examples in these rows. If the counts are 0, every metric is 0.
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
        """Mean loss in nats, and accuracy of the most likely prediction, both per supervised token."""
        tokens = max(counts["supervised_tokens"], 1)
        return {"loss": sums["loss"] / tokens, "accuracy": sums["correct"] / tokens}


class DocumentObjective(Objective):
    """Base of objectives on log-probabilities of documents: preference pairs and labelled completions."""

    head = "documents"

    @abstractmethod
    def loss(self, documents: DocumentLogProbs, weights: torch.Tensor, baseline: torch.Tensor) -> LossAndSums:
        """Contribution of the documents of a micro-batch to the loss of the step.

        `weights` fp64 [terms] scale the sum of each term of the loss. `baseline` is KTO's z0, fp64 scalar, or 0.
        """


class AnswerTokens(NamedTuple):
    """Values at the answer tokens of a forward, fp64 [tokens] each, with NaN for an unknown value."""

    logp: torch.Tensor
    """Log-probability of each token in nats under the trained model; it has a gradient."""
    entropy: torch.Tensor
    """Entropy of the model's distribution at each token, in nats, without a gradient."""
    advantage: torch.Tensor
    """Advantage of the answer to which each token belongs."""
    lengths: torch.Tensor
    """Number of tokens of the answer to which each token belongs."""
    old: torch.Tensor
    """Log-probability of each token under the weights that sampled it; NaN if these are the current weights."""
    reference: torch.Tensor
    """Log-probability of each token under the reference model."""
    sampled: torch.Tensor
    """Log-probability that the sampler reported for each token."""
    means: Callable[[torch.Tensor], torch.Tensor]
    """Function from a number for each token (fp64 [tokens]) to its mean over the token's answer, without a gradient."""


class AnswerObjective(Objective):
    """Base of objectives whose loss is computed from the tokens of sampled answers."""

    head = "answers"

    @abstractmethod
    def loss(self, tokens: AnswerTokens, weights: torch.Tensor) -> LossAndSums:
        """Contribution of answer tokens to the loss of the step, with sums over the tokens for the metrics. `weights`
        fp64 [terms] scale the sum of each term of the loss.
        """


class ScoreObjective(Objective):
    """Base of objectives on the outputs of a classification head, [documents, outputs]."""

    head = "scores"
    starts_small: bool = False
    """Whether the classification head starts with scores near 0, instead of with the model's own initialisation."""

    @abstractmethod
    def loss(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> LossAndSums:
        """Contribution of `scores` fp32 [documents, num_outputs] with `targets` fp64 [documents] to the loss of the
        step. `weights` fp64 [terms] scale the sum of each term of the loss.
        """


def token_objective(section: ObjectiveConfig) -> TokenObjective:
    """The cross-entropy objective for the run file's section `objective`."""
    return TokenObjective(section.name)


def make_objective(section: ObjectiveConfig) -> Objective:
    """Make the objective for the run file's section `objective`.

    A classification whose number of classes is not given gets two outputs, until the trainer has read the data and
    makes another objective.
    """
    row = section.row
    make = resolve_name(f"ds_finetune.objectives.{row.maker}") if isinstance(row.maker, str) else row.maker
    objective: Objective = make(section)
    unit = objective.terms[0].unit.replace("_", " ")
    assert (objective.name, objective.head, unit) == (row.name, row.head, section.unit), row
    return objective


@dataclass(frozen=True)
class TopLogProbs:
    """A teacher's next-token distributions for a batch [rows, tokens], limited to the k most likely tokens; zeros for
    tokens that are not supervised.
    """

    ids: torch.Tensor
    """Ids of the k most likely tokens, int32 [rows, tokens, k]."""
    log_probs: torch.Tensor
    """Log-probabilities of the tokens `ids`, then of all other tokens together, fp16 [rows, tokens, k + 1]."""


UNKNOWN_EXPERTS = -1
"""Value in `AnswerNumbers.experts` for a token whose experts are unknown."""


@dataclass(frozen=True)
class AnswerNumbers:
    """Log-probabilities of answer tokens that are known before the forward, fp32 [rows, tokens] each, at the positions
    of the labels; NaN if unknown.
    """

    old: torch.Tensor
    """Log-probabilities of answer tokens under the weights that sampled them."""
    reference: torch.Tensor
    """Log-probabilities of answer tokens under the reference model."""
    sampled: torch.Tensor
    """Log-probabilities of answer tokens as the sampler reported them."""
    experts: torch.Tensor | None = None
    """Experts that computed each sampled token's logits, encoded by `model.routers`, int16 [rows, tokens, layers]."""


@dataclass(frozen=True)
class Examples:
    """The documents of a forward in the order of its rows, without padding, for losses that are no sum over tokens."""

    index: torch.Tensor
    """Index of each token's document among the documents of the forward, int64 [rows, tokens]; -1 for padding."""
    starts: torch.Tensor
    """Position of the first token of each document in the flattened rows, int64 [documents]."""
    ends: torch.Tensor
    """Position of the last token of each document in the flattened rows, int64 [documents]."""
    numbers: torch.Tensor
    """Index of each document in the data, int64 [documents]."""
    targets: torch.Tensor
    """Target of each document, fp64 [documents]: a class index, margin, label or advantage."""
    reference: torch.Tensor
    """Log-probability of each document under the reference model, fp64 [documents]; zeros without a reference model."""
    top: TopLogProbs | None = None
    """Stored next-token distributions of a teacher; None without a teacher."""
    answers: AnswerNumbers | None = None
    """Log-probabilities that are known for sampled answers; None for other documents."""


class Distillation(Objective):
    """Distillation objective: mean over supervised tokens of label_weight x cross entropy + (1 - label_weight) x T^2 x
    KL(teacher || model), where T is the temperature.
    """

    name = "distill"
    head = "tokens"
    terms = (Term("supervised_tokens"),)
    sum_names = ("loss", "divergence", "label_loss", "correct", "tokens_of_teacher")

    def __init__(self, section: DistillObjective) -> None:
        self.section = section
        # Stored distributions of a teacher are looked up by document index, so a batch must list its documents.
        self.documents_per_unit = 1 if section.scores is not None else 0

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, the divergence from the teacher and the cross entropy of the labels, in nats per supervised token,
        and the fraction of tokens that are predicted right.

        If a teacher's distributions are read from files, held-out rows have none: their loss is the cross entropy of
        the labels, and the divergence is missing.
        """
        tokens = max(counts["supervised_tokens"], 1)
        means = {name: sums[name] / tokens for name in ("loss", "divergence", "label_loss")}
        if not sums["tokens_of_teacher"]:
            del means["divergence"]
        return means | {"accuracy": sums["correct"] / tokens}
