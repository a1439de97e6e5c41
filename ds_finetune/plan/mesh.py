"""The grid of ranks: each rank's coordinates along the axes of parallelism, the groups of ranks, and the parallel
layouts that are tested.
"""

import math
from dataclasses import dataclass
from typing import Literal, Self, get_args

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import FAMILIES
from ds_finetune.plan.batch import divisors

Axis = Literal["pp", "dp", "sp", "tp"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""Axes of the grid of ranks, outermost first. Ranks along the last axes communicate most and are therefore adjacent."""


@dataclass(frozen=True)
class Mesh:
    """Sizes of pipeline, data, sequence and tensor parallelism; ranks are numbered row-major over `AXES`.

    Ranks that differ only in `pp`, `sp` or `tp` work on the same rows: each has a part of the rows or of the model.
    The dp x sp ranks are divided into expert parallel groups of `ep` consecutive ranks.
    """

    rank: int
    dp: int
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, *, world_size: int, rank: int) -> Self:
        """The grid of `world_size` ranks, with `dp` = ranks / (tp x pp x sp); ConfigError where sizes do not divide."""
        inner = {"tp": parallel.tp, "pp": parallel.pp, "sp": parallel.sp}
        size = math.prod(inner.values())
        dp, rest = divmod(world_size, size)
        if rest:
            text = " x ".join(f"{axis} {n}" for axis, n in inner.items() if n > 1)
            legal = " or ".join(str(n * size) for n in (dp, dp + 1) if n)
            raise ConfigError(
                f"{world_size} ranks are not a multiple of parallel {text} = {size}",
                hint=f"start {legal} ranks, or set smaller sizes",
            )
        if dp * parallel.sp % parallel.ep:
            legal = ", ".join(map(str, divisors(dp * parallel.sp)))
            raise ConfigError(
                f"parallel.ep {parallel.ep} does not divide the {dp * parallel.sp} ranks of dp {dp} x sp {parallel.sp}",
                hint=f"set parallel.ep to one of {legal}",
            )
        return cls(rank, dp, **inner, ep=parallel.ep)

    def __str__(self) -> str:
        """Text with dp and the sizes above one, such as `dp 4 x sp 2`."""
        sizes = ("dp", "pp", "sp", "tp", "ep")
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in sizes if axis == "dp" or getattr(self, axis) > 1)

    @property
    def expert_index(self) -> int:
        """Index of this rank in its expert parallel group, which is also the index of its shard of the experts."""
        return self.expert_index_of(self.rank)

    def expert_index_of(self, rank: int) -> int:
        """Index of the rank `rank` in the expert parallel group that contains it."""
        return (self.coordinate("dp", rank) * self.sp + self.coordinate("sp", rank)) % self.ep

    def expert_groups(self) -> list[list[int]]:
        """The expert parallel groups; each rank is in exactly one."""
        return [
            line[start : start + self.ep] for line in self.groups("dp", "sp") for start in range(0, len(line), self.ep)
        ]

    def expert_holders(self) -> list[list[int]]:
        """Groups of ranks that together hold every expert of a stage once: the expert parallel groups of all ranks of a
        tensor parallel group.
        """
        groups: dict[tuple[int, int], list[int]] = {}
        for line in self.expert_groups():
            groups.setdefault((self.coordinate("pp", line[0]), line[0] // self.tp), []).extend(line)
        return [sorted(ranks) for ranks in groups.values()]

    @property
    def leader(self) -> int:
        """The first rank of the pipeline stage to which this rank belongs."""
        return self.coordinate("pp") * self.dp * self.sp * self.tp

    def holders_of_leader(self) -> list[int]:
        """Ranks of this rank's stage, its leader among them, that together hold each parameter of the stage once."""
        return next(line for line in self.expert_holders() if self.leader in line)

    def same_expert_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same experts; each rank is in exactly one group."""
        return [line[start :: self.ep] for line in self.groups("dp", "sp") for start in range(self.ep)]

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return math.prod(self._sizes)

    @property
    def sharing(self) -> int:
        """Number of ranks that work on the same rows of data."""
        return self.sp * self.tp * self.pp

    def num_groups(self, *, vpp: int = 1) -> int:
        """Number of process groups of a rank with `vpp` model chunks: the default group, those that `open_groups`
        opens, and, unless tp or pp divides the model, DeepSpeed's copy of the default group.
        """
        sizes = dict(zip(AXES, self._sizes, strict=True))
        asked: list[tuple[Axis, ...]] = [(axis,) for axis in ("pp", "sp", "tp") if sizes[axis] > 1]
        is_divided = self.tp * self.pp > 1
        asked += [("pp", "tp"), ("dp", "sp")] if is_divided else []
        # Parallel axes of size 1 need no process group.
        lines = {tuple(axis for axis in axes if sizes[axis] > 1) for axes in asked}
        return 1 + len(lines) + (not is_divided) + 2 * (self.ep > 1) + 4 * (vpp > 1)

    def coordinate(self, axis: Axis, rank: int | None = None) -> int:
        """Coordinate of a rank (this one by default) along an axis."""
        inner = math.prod(self._sizes[AXES.index(axis) + 1 :])
        return (self.rank if rank is None else rank) // inner % self._sizes[AXES.index(axis)]

    def groups(self, *axes: Axis) -> list[list[int]]:
        """Groups of ranks whose coordinates differ only along `axes`, in ascending order; they partition all ranks."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(tuple(self.coordinate(axis, rank) for axis in AXES if axis not in axes), []).append(rank)
        return list(groups.values())

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)


PARALLEL_AXES = ("pp", "sp", "tp", "ep")


@dataclass(frozen=True)
class ParallelLayout:
    """Axes with more than one rank besides data parallelism, and the ZeRO stages that they are tested with."""

    axes: frozenset[str]
    stages: tuple[int, ...]

    @property
    def families(self) -> tuple[str, ...]:
        """Model types whose row in the table of families has all axes of this layout."""
        return tuple(name for name, family in FAMILIES.items() if self.axes <= family.parallel_axes)


TESTED_LAYOUTS = tuple(
    ParallelLayout(frozenset(axes.split()), (0, 1) if "pp" in axes else (0, 1, 2, 3))
    for axes in ("sp", "tp", "sp tp", "ep", "sp ep", "tp ep", "pp", "pp tp", "pp sp", "pp ep", "pp tp ep", "pp sp ep")
)
"""Layouts that tests/parity/test_parallel.py compares with a PyTorch reference loop."""


def nearest_layout(axes: frozenset[str], stage: int) -> str:
    """The row of `TESTED_LAYOUTS` nearest to a layout with these axes, for a hint."""
    row = min(TESTED_LAYOUTS, key=lambda row: (len(row.axes ^ axes), min(abs(stage - other) for other in row.stages)))
    return (
        f"{' and '.join(f'parallel.{axis}' for axis in sorted(row.axes))} with zero stage "
        f"{', '.join(map(str, row.stages))}"
    )
