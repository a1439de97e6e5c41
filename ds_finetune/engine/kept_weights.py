"""The weights of a model at one moment, by which it can compute again while it is trained."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class KeptWeights:
    """A copy of the parameters and buffers of `lm` in the memory of the host; of their parts where ranks share tensors
    out. ZeRO-3 has them elsewhere.
    """

    def __init__(self, lm: nn.Module) -> None:
        self._tensors = [*lm.parameters(), *lm.buffers()]
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @contextmanager
    def used(self) -> Iterator[None]:
        """While this is open, the model has these weights, on its device."""
        own = [tensor.data for tensor in self._tensors]
        self._set([value.to(now.device) for value, now in zip(self._values, own, strict=True)])
        try:
            yield
        finally:
            self._set(own)

    def _set(self, values: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.data = value
