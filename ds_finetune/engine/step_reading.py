"""What the host reads of a step before the optimizer's: one reduction over all ranks, and one wait for the device."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_finetune.data.batches import Batch
from ds_finetune.engine.loss_normalisation import UNITS, unit_counts
from ds_finetune.engine.rank_rows import copy_to_device
from ds_finetune.engine.router_balance import RouterChoices, choices_of, table_of_choices
from ds_finetune.errors import RunError
from ds_finetune.model.experts.routers import RouterCollector
from ds_finetune.plan.mesh import Mesh


@dataclass(frozen=True)
class StepReading:
    """Numbers of a global batch, the same on every rank."""

    sums: list[float]
    """Sums of the loss, in the order of its names."""
    has_bad_gradient: bool
    """Whether a gradient is not finite on any rank."""
    counts: dict[str, float]
    """Numbers of units."""
    table: torch.Tensor
    """What the routers chose, on the device, as `router_balance.table_of_choices` has it; empty without routers."""
    choices: RouterChoices | None
    """The same as the host knows it; None without routers."""


def read_step(
    sums: torch.Tensor, is_bad: torch.Tensor, counts: torch.Tensor, routers: RouterCollector | None, mesh: Mesh
) -> StepReading:
    """Add up what each rank has, and read it; collective.

    `sums` fp64 [sums] and `is_bad`, a scalar, are those of this rank's forwards, `counts` fp64 [units] the units of its
    rows. Ranks that have the same ones count once.
    """
    table = sums.new_zeros(0) if routers is None else table_of_choices(routers, mesh)
    numbers = torch.cat([sums, is_bad.to(sums)[None], counts, table.flatten()])
    dist.all_reduce(numbers)
    sizes = [len(sums), 1, len(counts), table.numel()]
    totals, bad, units, chosen = numbers.cpu().split(sizes)
    return StepReading(
        sums=(totals / mesh.tp).tolist(),
        has_bad_gradient=bool(bad > 0),
        counts=dict(zip(UNITS, (units / mesh.sharing).tolist(), strict=True)),
        table=numbers.split(sizes)[-1].view_as(table),
        choices=None if routers is None else choices_of(chosen.view(table.shape), routers.plan),
    )


def check_counts(expected: Mapping[str, float], counts: Mapping[str, float]) -> None:
    """RunError where the rows of all ranks have other `counts` than `expected`, by which the loss was divided."""
    for unit, number in counts.items():
        if number != expected[unit]:
            raise RunError(
                f"the rows of all ranks have {number:,.0f} {unit.replace('_', ' ')}, but by this rank's data they have "
                f"{expected[unit]:,.0f}: the ranks read different data",
                hint="give every host the same data files",
            )


def global_counts(batch: Batch, mesh: Mesh, device: torch.device) -> torch.Tensor:
    """Numbers of units of the global batch, fp64 [units] on `device`: as the data knows them, or added up over all
    ranks, each of which counts its own rows.
    """
    if batch.global_counts is not None:
        return copy_to_device(unit_counts(batch.global_counts), device)
    counts = copy_to_device(unit_counts(batch.counts), device)
    dist.all_reduce(counts)
    return counts / mesh.sharing
