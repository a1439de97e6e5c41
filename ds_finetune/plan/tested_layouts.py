"""The parallel layouts that a run may use, each compared with a PyTorch reference loop by tests."""

from collections.abc import Mapping
from dataclasses import dataclass

from ds_finetune.families.table import FAMILIES

AXES = ("pp", "sp", "tp", "ep")
"""Parallel axes besides data parallelism."""
ROW_BYTES = 16
"""Number of bytes of which each row of an expert's matrix must be a multiple, for torch's grouped product."""
WEIGHT_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a weight by precision."""


@dataclass(frozen=True)
class ParallelLayout:
    """Axes with more than one rank besides data parallelism, and the ZeRO stages that they are tested with."""

    axes: frozenset[str]
    stages: tuple[int, ...]

    @property
    def families(self) -> tuple[str, ...]:
        """Model types whose row in the table of families has all of these axes."""
        return tuple(name for name, family in FAMILIES.items() if self.axes <= family.parallel_axes)


TESTED_LAYOUTS = (
    ParallelLayout(frozenset({"sp"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"tp"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"sp", "tp"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"ep"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"sp", "ep"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"tp", "ep"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"pp"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "tp"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "sp"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "ep"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "tp", "ep"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "sp", "ep"}), (0, 1)),
)
"""Layouts that tests/parity/test_parallel.py compares with a PyTorch reference loop."""


def nearest_layout(axes: frozenset[str], stage: int) -> str:
    """The row of `TESTED_LAYOUTS` nearest to a layout with these axes, for a hint."""
    row = min(TESTED_LAYOUTS, key=lambda row: (len(row.axes ^ axes), min(abs(stage - other) for other in row.stages)))
    return (
        f"{' and '.join(f'parallel.{axis}' for axis in sorted(row.axes))} with zero stage "
        f"{', '.join(map(str, row.stages))}"
    )


def wider(precision: str) -> str:
    """Hint for experts whose rows are not a multiple of 16 bytes."""
    other = "train a model of other widths"
    return other if precision == "fp32" else f"set train.precision to fp32, or {other}"
