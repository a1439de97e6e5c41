"""Optimizers that a run file may name: their classes, the keys of `optim` that they use, and their state."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer of DeepSpeed 0.19.8 (runtime/config.py:63), of torch.optim or of bitsandbytes."""

    type: str
    """Name of the optimizer's class, or DeepSpeed's name for it."""
    keys: tuple[str, ...]
    """Keys of `optim` that the optimizer uses."""
    state_bytes: float
    """Maximum bytes of state per parameter."""
    of: str = "deepspeed"
    """Package of the class: deepspeed, torch or bitsandbytes."""
    needs_unsharded: str = ""
    """Why a step needs unsharded parameters; empty for an elementwise optimizer."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Fixed arguments of the class."""


_ADAM = ("lr", "betas", "eps", "weight_decay")
OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow("AdamW", _ADAM, 8),
    "adam": OptimizerRow("Adam", _ADAM, 8),
    "lamb": OptimizerRow("Lamb", _ADAM, 8, needs_unsharded="its trust ratio is a ratio of whole parameters' norms"),
    "lion": OptimizerRow("Lion", ("lr", "betas", "weight_decay"), 4),
    "adagrad": OptimizerRow("Adagrad", ("lr", "eps"), 4),
    "muon": OptimizerRow("Muon", _ADAM, 8),
    "sgd": OptimizerRow("SGD", ("lr", "weight_decay"), 0, "torch"),
    "radam": OptimizerRow("RAdam", _ADAM, 8, "torch", fixed={"decoupled_weight_decay": True}),
    "adamax": OptimizerRow("Adamax", ("lr", "betas", "eps"), 8, "torch"),
    "rmsprop": OptimizerRow("RMSprop", ("lr", "eps"), 4, "torch"),
    # Adafactor's state is one fp32 number per row and column of a matrix, which is 4 / rows + 4 / columns bytes per
    # element: 0.25 if both are 32.
    "adafactor": OptimizerRow(
        "Adafactor", ("lr", "weight_decay"), 0.25, "torch", "its second moment is one of whole rows and columns"
    ),
    # AdamW8bit's state is two bytes per element, and two fp32 scales per block of 256 elements.
    "adamw8bit": OptimizerRow(
        "AdamW8bit", _ADAM, 2 + 8 / 256, "bitsandbytes", "blocks of 256 numbers of a parameter have one scale"
    ),
}
"""Optimizers by lower-case name. A row without the key `weight_decay` is an optimizer that would add decay to the
gradient.
"""
