"""The slices of the programme: what each measures, the most informative first, and the seconds that it may take."""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Part:
    """What one process measures: `work` is a function of this package, by its module and name."""

    name: str
    work: str
    seconds: int
    """After which it is ended."""
    argument: str = ""
    """Passed to `work`, which takes a Recorder, a folder for its files, and `is_tiny` too."""

    def function(self) -> Any:  # noqa: ANN401
        """The function `work`, imported."""
        module, name = self.work.split(".")
        found = getattr(import_module(f"bench.gpu.{module}"), name)
        return partial(found, argument=self.argument) if self.argument else found


SLICES: dict[str, tuple[Part, ...]] = {
    "kernels": (
        Part("machine", "machine.machine", 30),
        Part("tests", "checks.kernel_tests", 130),
        Part("sizes", "kernels.kernels", 80),
        Part("choices", "choices.choices", 70),
    ),
    "training": (
        Part("selftest", "checks.layouts", 160),
        Part("losses", "comparisons.losses", 130),
    ),
    "memory": (
        Part("waits", "comparisons.waits", 90),
        Part("memory", "memory.memory", 110),
    ),
    "throughput": (
        Part("full-1.5b", "throughput.throughput", 120, "full 1.5B"),
        Part("lora-7b", "throughput.throughput", 160, "LoRA 7B"),
        Part("lora-16b", "throughput.throughput", 240, "LoRA 16B of experts"),
    ),
}
"""Parts run one after another. A slice takes less than ten minutes, and the first three together under fourteen."""
