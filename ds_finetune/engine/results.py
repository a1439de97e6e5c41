"""Results of an optimizer step and of an evaluation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_finetune.engine.document_scores import NO_SCORES, DocumentScores
from ds_finetune.engine.groups.communication import StepCommunication
from ds_finetune.engine.router_balance import RouterChoices
from ds_finetune.engine.step_reading import StepReading
from ds_finetune.model.loss.extra_loss import TotalLoss


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank but for `communication`.

    `metrics` are those of the objective, `loss` first; `culprit` names the parameter and the rank of a non-finite
    gradient.
    """

    metrics: Mapping[str, float]
    grad_norm: float
    num_tokens: int
    num_supervised_tokens: int
    skipped: bool
    culprit: str
    num_examples: int = 0
    """Pairs, marked answers or labelled texts; 0 where the loss is a sum over tokens."""
    router_choices: RouterChoices | None = None
    """What the routers chose; None where the model has none."""
    communication: StepCommunication | None = None
    """What this rank's collectives were, which other ranks' may differ from; None where there is one rank."""

    @property
    def loss(self) -> float:
        """The loss of the global batch."""
        return self.metrics["loss"]


@dataclass(frozen=True)
class HeldOutScores:
    """Metrics of the objective over every held-out row once, and their number of units."""

    metrics: Mapping[str, float]
    counts: Mapping[str, float]
    is_per_token: bool = True
    """Whether the loss is a mean over tokens, so that it has a perplexity."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """The sums from which the metrics are computed."""
    scores: DocumentScores = field(default_factory=NO_SCORES.copy, repr=False)
    """Scores and targets of all documents, where a metric needs them together."""

    @property
    def loss(self) -> float:
        """The loss over all held-out rows."""
        return self.metrics["loss"]


def step_result(
    reading: StepReading, loss: TotalLoss, grad_norm: float, *, own_norms: Mapping[str, float], is_skipped: bool
) -> StepResult:
    """The result of a step from what was read before the optimizer's, which names no culprit yet."""
    counts = reading.counts
    own = {f"{name}_grad_norm": math.inf if is_skipped else norm for name, norm in own_norms.items()}
    return StepResult(
        metrics={**loss.metrics(loss.named(reading.sums), counts), **own},
        grad_norm=grad_norm,
        num_tokens=int(counts["tokens"]),
        num_supervised_tokens=int(counts["supervised_tokens"]),
        num_examples=int(counts["examples"]),
        skipped=is_skipped,
        culprit="",
        router_choices=reading.choices,
    )
