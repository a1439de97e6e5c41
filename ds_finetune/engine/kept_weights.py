"""A copy of a model's weights at one moment, with which it can run again later in training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ds_finetune.engine.patches.deepspeed_gathering import repartitioned


class KeptWeights:
    """A host copy of the parameters and buffers of `module.lm`; under ZeRO-3, of this rank's partitions."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - the module that DeepSpeed wraps
        self._lm: nn.Module = module.lm
        # DeepSpeed keeps a rank's partition of a parameter in this attribute.
        params = [getattr(param, "ds_tensor", param) for param in module.lm.parameters()]
        self._tensors: list[torch.Tensor] = [*params, *module.lm.buffers(), *module.in_fp32.values.values()]
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within this context the model has the kept weights, on its device; collective under ZeRO-3."""
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
