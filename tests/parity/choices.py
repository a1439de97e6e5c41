"""How near choices are to others: fp32 rounds differently in each layout, and may choose another expert or entry where
two scores are nearly equal.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

EPS = 1e-5
"""Of Adam, whose first update is lr g / (|g| + eps). With 1e-8, gradients that are rounding alone move weights: those of
the first layer's streams, which are equal there, are 1e-10 and of either sign in any layout. That moves an indexer's
scores by 1e-5, and where two of them are 1e-6 apart a query attends to another entry.
"""
NEAREST = 1e-5
"""Least difference of the scores of what is chosen and what is not, entries or experts, relative to the largest score.
With `EPS` and a learning rate of 1e-2, rounding moves the scores of the second step by 4e-6 at most.
"""


class NearestChoice(TorchFunctionMode):
    """While this is entered, the least distance in any `topk` of the last score that is chosen to the first that is
    not, relative to the largest one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.distance = math.inf

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            self._see(args[0].detach(), found.values.shape[-1])
        return found

    def _see(self, scores: torch.Tensor, chosen: int) -> None:
        # Masks are infinite, or the largest number added to scores.
        scores = scores.masked_fill(scores < torch.finfo(scores.dtype).min / 2, -math.inf)
        if not 0 < chosen < scores.shape[-1]:
            return
        last, first_left = scores.topk(chosen + 1).values[..., -2:].unbind(-1)
        largest = scores.masked_fill(scores.isinf(), 0.0).abs().amax(-1)
        distances = ((last - first_left) / largest)[first_left.isfinite()]
        self.distance = min([self.distance, *distances.flatten().tolist()])
