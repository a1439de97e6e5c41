"""The documents of one forward."""

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Examples:
    """The documents of one forward in the order of its rows, without padding, for objectives whose loss is not a sum
    over tokens.
    """

    index: torch.Tensor
    """Number of each token's document within this forward, int64 [rows, tokens]; -1 for padding."""
    starts: torch.Tensor
    """Position of the first token of each document in the flattened rows, int64 [documents]."""
    ends: torch.Tensor
    """Position of the last token of each document in the flattened rows, int64 [documents]."""
    numbers: torch.Tensor
    """Number of each document in the data, int64 [documents]."""
    targets: torch.Tensor
    """Target of each document, fp64 [documents]."""
    reference: torch.Tensor
    """Log-probability of each document under the reference model, fp64 [documents]; zeros where there is none."""

    def to(self, device: torch.device) -> "Examples":
        """The same on `device`; copies from pinned memory do not wait."""
        moved = {each.name: getattr(self, each.name).to(device, non_blocking=True) for each in fields(self)}
        return replace(self, **moved)
