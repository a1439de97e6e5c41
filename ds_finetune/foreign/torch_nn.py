"""torch.nn: the device on which modules are constructed, and the conversion of fake parameters."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_finetune.foreign.guard import Foreign, replaced

_CONVERSION = Foreign("torch", "nn/modules/module.py:986")
_LINEAR = Foreign("torch", "nn/modules/linear.py")


@contextmanager
def linears_without_memory() -> Iterator[None]:
    """Context in which linear modules are constructed on the meta device.

    A model whose linear modules are quantised one by one is thus never on the device in full precision. Its other
    modules are constructed on the device that `torch.device` sets.
    """
    constructor = nn.Linear.__init__
    _LINEAR.parameters(constructor, "in_features", "out_features", "bias", "device", "dtype")

    def init(self: nn.Linear, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's own
        constructor(self, *args, **kwargs | {"device": "meta"})

    with replaced(nn.Linear, "__init__", init):
        yield


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Context in which tensors are fake, without memory or values, and `Module.to` can change dtypes of parameters.
    transformers 5.24 changes dtypes when it constructs some models. torch would swap fake tensors, which fails for
    tensors that their mode tracks.
    """
    _CONVERSION.source(nn.Module._apply, "torch.utils.swap_tensors(param, param_applied)")

    def take(mine: torch.Tensor, new: torch.Tensor) -> None:
        mine.data = new.data

    with mode or FakeTensorMode(), replaced(torch.utils, "swap_tensors", take):
        yield
