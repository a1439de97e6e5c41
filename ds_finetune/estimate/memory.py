"""The memory of a run by arithmetic: what a rank holds on its device, in host memory and on disk, and which option
lowers it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ds_finetune.config.schema import RunConfig
from ds_finetune.estimate.activation_rows import activation_rows
from ds_finetune.estimate.rank_weights import RankWeights, weights_of_run
from ds_finetune.estimate.rows import MemoryRow, Place, peak
from ds_finetune.estimate.state_rows import state_rows
from ds_finetune.families.parameters import ModelConfig
from ds_finetune.plan.plan import Plan


@dataclass(frozen=True)
class MemoryEstimate:
    """What the rank that needs most on its device holds; the other ranks of its pipeline stage hold as much.

    Not all rows are held at one time: see `MemoryRow.when`. On CPU ranks the device is the host.
    """

    rows: tuple[MemoryRow, ...]
    stage: int
    """Pipeline stage of the rank."""
    device: Place

    @property
    def device_bytes(self) -> int:
        """Bytes on the device at most."""
        return peak(self.rows, self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of a rank in host memory at most."""
        return peak(self.rows, "host")

    @property
    def disk_bytes(self) -> int:
        """Bytes of the files of the whole run, as if all were on one disk."""
        return peak(self.rows, "disk")


def estimate_memory(config: RunConfig, plan: Plan, model: ModelConfig) -> MemoryEstimate:
    """What the run of `config` needs with the layout of `plan`, where `model` is the config.json of its model.

    ConfigError where the arithmetic of the model type is not known.
    """
    device: Place = "host" if plan.device == "cpu" else "gpu"
    stages = weights_of_run(config, plan, model)
    found = (
        MemoryEstimate(tuple(_rows(config, plan, model, stages, number)), number, device)
        for number in range(len(stages))
    )
    return max(found, key=lambda estimate: estimate.device_bytes)


def _rows(
    config: RunConfig, plan: Plan, model: ModelConfig, stages: tuple[RankWeights, ...], number: int
) -> Iterator[MemoryRow]:
    yield from state_rows(config, plan, model, stages[number])
    yield from activation_rows(config, plan, model, stages, number)
