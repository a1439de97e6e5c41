"""The memory that a rank may take: of its device, and its share of the memory of its host."""

from dataclasses import dataclass

from ds_finetune.config.units import GIB
from ds_finetune.plan.estimate.memory import MemoryEstimate, StateBytes
from ds_finetune.plan.search.micro_batch import SPARE

HOST_SHARE = 3
"""Times the memory of its accelerators that a node is assumed to have, as a DGX H100 has: 2 TB for 8 x 80 GB."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a rank may take; of both, `SPARE` is left free."""

    device_bytes: int
    """Of its accelerator; on CPU ranks that of its host too."""
    host_bytes: int
    """Of its host's memory, which the ranks of the host share."""

    def excess(self, memory: MemoryEstimate) -> int:
        """Bytes that an estimate needs beyond the budget, on the device or on the host, whichever is more; 0 where it
        fits.
        """
        return max(0, self.device_excess(memory), memory.host_bytes - self.of(self.host_bytes))

    def least_excess(self, states: StateBytes) -> int:
        """Bytes that a run needs beyond the budget at least, by its states alone."""
        return max(0, states.device - self.of(self.device_bytes), states.host - self.of(self.host_bytes))

    def device_excess(self, memory: MemoryEstimate) -> int:
        """The same on the device alone; below 0 where it fits."""
        return memory.device_bytes - self.of(self.device_bytes)

    @staticmethod
    def of(num_bytes: int) -> int:
        """Bytes that may be taken of `num_bytes`."""
        return int((1 - SPARE) * num_bytes)

    def problem(self, memory: MemoryEstimate) -> str:
        """What does not fit, with both values; empty where all does."""
        device = (memory.device_bytes, self.of(self.device_bytes), "on its device")
        host = (memory.host_bytes, self.of(self.host_bytes), "in its share of the host's memory")
        # The device of a CPU rank is its host.
        places = (host,) if memory.device == "host" else (device, host)
        texts = [f"{_gib(need)} of {_gib(most)} {where}" for need, most, where in places if need > most]
        return f"needs {' and '.join(texts)}" if texts else ""

    def text(self, memory: MemoryEstimate) -> str:
        """How much of its memory a run takes that fits."""
        if memory.device == "host":
            need, share = _gib(memory.host_bytes), _gib(self.host_bytes)
            return f"fits: {need} of a rank's share of {share} of the host's memory; {SPARE:.0%} stay free"
        return (
            f"fits: {_gib(memory.device_bytes)} of {_gib(self.device_bytes)} on the device, and of the host's memory "
            f"{_gib(memory.host_bytes)} of a rank's share of {_gib(self.host_bytes)}; {SPARE:.0%} of both stay free"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f} GiB"
