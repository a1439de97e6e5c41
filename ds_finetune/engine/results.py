"""Results of a step and of an evaluation, which the host reads with one all-reduce and one device synchronisation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.communication import StepCommunication
from ds_finetune.engine.loss_normalisation import UNITS, unit_counts
from ds_finetune.engine.rank_rows import copy_to_device
from ds_finetune.errors import RunError
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import StageOutput
from ds_finetune.objectives.objective import LossAndSums
from ds_finetune.plan.mesh import Mesh

DocumentScores = NDArray[np.float64]
"""The first output of the classification head and the target of each document, fp64 [documents, 2]."""
NO_SCORES: DocumentScores = np.zeros((0, 2))


def scores_of(out: LossAndSums | StageOutput, micro: MicroBatch) -> DocumentScores:
    """Scores and targets of the documents of a forward; empty on a pipeline stage before the last."""
    if not isinstance(out, LossAndSums) or out.scores is None:
        return NO_SCORES
    assert micro.examples is not None
    return np.stack([out.scores[:, 0].double().cpu().numpy(), micro.examples.targets.cpu().numpy()], axis=1)


def gather_scores(parts: list[DocumentScores], mesh: Mesh) -> DocumentScores:
    """Gather the scores of all ranks on every rank. Ranks with the same rows contribute once."""
    is_first = mesh.coordinate("tp") == mesh.coordinate("sp") == 0
    own_scores = np.concatenate([NO_SCORES, *parts]) if is_first else NO_SCORES
    return np.concatenate(all_gather_object(own_scores))


@dataclass(frozen=True)
class StepReading:
    """Sums and counts over a step's global batch, identical on every rank."""

    sums: list[float]
    """Sums from which the loss is computed, in the order of `TotalLoss.sum_names`."""
    has_bad_gradient: bool
    counts: dict[str, float]
    """Numbers of units (tokens, documents, ...) in the global batch, by name of the unit."""
    counted: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """Counts of auxiliary losses, such as tokens per expert, by name: on the device, and a copy on the host."""


def read_step(
    sums: torch.Tensor, is_bad: torch.Tensor, counts: torch.Tensor, extras: Sequence[ExtraLoss], mesh: Mesh
) -> StepReading:
    """Sum the results of all ranks and read them; collective. `sums`, fp64 [sums], and the scalar `is_bad` are results
    of this rank's forwards. `counts`, fp64 [units], are the numbers of units in its rows. A value that several ranks
    share counts once.
    """
    tables = {extra.name: table for extra in extras if (table := extra.counted(mesh)) is not None}
    numbers = torch.cat([sums, is_bad.to(sums)[None], counts, *(table.flatten() for table in tables.values())])
    dist.all_reduce(numbers)
    sizes = [len(sums), 1, len(counts), *(table.numel() for table in tables.values())]
    totals, bad, units, *on_host = numbers.cpu().split(sizes)
    device_counts = numbers.split(sizes)[3:]
    return StepReading(
        sums=(totals / mesh.tp).tolist(),
        has_bad_gradient=bool(bad > 0),
        counts=dict(zip(UNITS, (units / mesh.sharing).tolist(), strict=True)),
        counted={
            name: (on_device.view_as(table), host_count.view(table.shape))
            for (name, table), on_device, host_count in zip(tables.items(), device_counts, on_host, strict=True)
        },
    )


def check_counts(expected: Mapping[str, float], counts: Mapping[str, float]) -> None:
    """Raise RunError if `counts`, summed over all ranks' rows, differ from `expected`, which divide the loss."""
    for unit, number in counts.items():
        if number != expected[unit]:
            raise RunError(
                f"the rows of all ranks have {number:,.0f} {unit.replace('_', ' ')}, but by this rank's data they have "
                f"{expected[unit]:,.0f}: the ranks read different data",
                hint="make the data files equal on all hosts",
            )


def global_counts(batch: Batch, mesh: Mesh, device: torch.device) -> torch.Tensor:
    """Numbers of units in the global batch, fp64 [units] on `device`; summed over ranks unless `batch` has them."""
    if batch.global_counts is not None:
        return copy_to_device(unit_counts(batch.global_counts), device)
    counts = copy_to_device(unit_counts(batch.counts), device)
    dist.all_reduce(counts)
    return counts / mesh.sharing


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, identical on every rank except `communication`. `metrics` are those of the loss,
    `loss` first. `culprit` names the parameter and the rank of a non-finite gradient.
    """

    metrics: Mapping[str, float]
    grad_norm: float
    num_tokens: int
    num_supervised_tokens: int
    skipped: bool
    culprit: str
    num_examples: int = 0
    """Number of pairs, labelled completions or labelled texts; 0 if the loss is a sum over tokens."""
    counted: Mapping[str, Any] = field(default_factory=dict)
    """Counts of auxiliary losses in the step, such as tokens per expert, by the name of the loss."""
    communication: StepCommunication | None = None
    """Bytes and seconds of this rank's collectives in the step; None with a single rank."""

    @property
    def loss(self) -> float:
        """The loss of the global batch."""
        return self.metrics["loss"]


@dataclass(frozen=True)
class HeldOutScores:
    """Metrics of the objective over all held-out rows, and the numbers of units. Each row counts once."""

    metrics: Mapping[str, float]
    counts: Mapping[str, float]
    is_per_token: bool = True
    """Whether the loss is a mean over tokens, so that it has a perplexity."""
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums over all held-out rows, by name, from which the metrics are computed."""
    scores: DocumentScores = field(default_factory=NO_SCORES.copy, repr=False)
    """Scores and targets of all documents; empty unless a metric needs them."""

    @property
    def loss(self) -> float:
        """The loss over all held-out rows."""
        return self.metrics["loss"]
