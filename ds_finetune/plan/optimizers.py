"""The optimizers that a run file may name: whose class each is, what it takes of `optim`, and what it keeps."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OptimizerRow:
    """An optimizer of DeepSpeed 0.19.8 (runtime/config.py:63), of torch.optim or of bitsandbytes."""

    type: str
    """Name of its class, or DeepSpeed's name for it."""
    keys: tuple[str, ...]
    """Keys of `optim` that it takes."""
    state_bytes: float
    """Bytes of state for each parameter, at most."""
    of: str = "deepspeed"
    """Package that has the class: deepspeed, torch or bitsandbytes."""
    needs_whole: str = ""
    """Why its step needs whole parameters; empty where each number's step depends on that number alone."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the class that are always given."""


_ADAM = ("lr", "betas", "eps", "weight_decay")
OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow("AdamW", _ADAM, 8),
    "adam": OptimizerRow("Adam", _ADAM, 8),
    "lamb": OptimizerRow("Lamb", _ADAM, 8, needs_whole="its trust ratio is a ratio of whole parameters' norms"),
    "lion": OptimizerRow("Lion", ("lr", "betas", "weight_decay"), 4),
    "adagrad": OptimizerRow("Adagrad", ("lr", "eps"), 4),
    "muon": OptimizerRow("Muon", _ADAM, 8),
    "sgd": OptimizerRow("SGD", ("lr", "weight_decay"), 0, "torch"),
    "radam": OptimizerRow("RAdam", _ADAM, 8, "torch", fixed={"decoupled_weight_decay": True}),
    "adamax": OptimizerRow("Adamax", ("lr", "betas", "eps"), 8, "torch"),
    "rmsprop": OptimizerRow("RMSprop", ("lr", "eps"), 4, "torch"),
    # A number for each row and column: 4 / rows + 4 / columns bytes, of matrices with 32 or more of both.
    "adafactor": OptimizerRow(
        "Adafactor", ("lr", "weight_decay"), 0.25, "torch", "its second moment is one of whole rows and columns"
    ),
    # Two bytes, and two fp32 scales for each block of 256.
    "adamw8bit": OptimizerRow(
        "AdamW8bit", _ADAM, 2 + 8 / 256, "bitsandbytes", "blocks of 256 numbers of a parameter have one scale"
    ),
}
"""By the name in lower case. Those that lack `weight_decay` would add it to the gradient."""
