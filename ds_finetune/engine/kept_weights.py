"""The weights of a model at one moment, by which it can compute again while it is trained."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_finetune.engine.patches.deepspeed_gathering import repartitioned


class KeptWeights:
    """A copy of the parameters and buffers of `module.lm` in the memory of the host; of this rank's part of them where
    ranks share tensors out, as under ZeRO-3.
    """

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - the module that DeepSpeed wraps
        self._lm: nn.Module = module.lm
        # DeepSpeed keeps a rank's part of a parameter as its attribute.
        params = [getattr(param, "ds_tensor", param) for param in module.lm.parameters()]
        self._tensors: list[torch.Tensor] = [*params, *module.lm.buffers(), *module.in_fp32.values.values()]
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @contextmanager
    def used(self) -> Iterator[None]:
        """While this is open, the model has these weights, on its device; collective under ZeRO-3."""
        own = [tensor.data for tensor in self._tensors]
        self._set([value.to(now.device) for value, now in zip(self._values, own, strict=True)])
        try:
            yield
        finally:
            self._set(own)

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        with repartitioned(self._lm):
            for tensor, value in zip(self._tensors, values, strict=True):
                tensor.data = value
