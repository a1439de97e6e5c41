"""Patches of modules of torch and bitsandbytes: the device on which linear modules are constructed, dtype conversion of
fake parameters, and four-bit weights on CPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_finetune.foreign.guard import Foreign, replaced

_CONVERSION = Foreign("torch", "nn/modules/module.py:986")
_LINEAR = Foreign("torch", "nn/modules/linear.py")
_PACKING = Foreign("bitsandbytes", "nn/modules.py:573, 613")


@contextmanager
def linears_without_memory() -> Iterator[None]:
    """Context in which linear modules are constructed on the meta device, other modules on torch's default device.

    So a model whose linear modules are quantised one by one is never on the device in full precision.
    """
    constructor = nn.Linear.__init__
    _LINEAR.parameters(constructor, "in_features", "out_features", "bias", "device", "dtype")

    def init(self: nn.Linear, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's own
        constructor(self, *args, **kwargs | {"device": "meta"})

    with replaced(nn.Linear, "__init__", init):
        yield


@contextmanager
def fake_tensors(mode: FakeTensorMode | None = None) -> Iterator[None]:
    """Context in which tensors are fake (without memory and values), and `Module.to` can change the dtype of
    parameters, as transformers 5.24 does when it constructs some models. torch's usual conversion swaps tensors, which
    fails for fake tensors.
    """
    _CONVERSION.source(nn.Module._apply, "torch.utils.swap_tensors(param, param_applied)")

    def take(mine: torch.Tensor, new: torch.Tensor) -> None:
        mine.data = new.data

    with mode or FakeTensorMode(), replaced(torch.utils, "swap_tensors", take):
        yield


def without_cpu_packing(linear: Any) -> None:  # noqa: ANN401 - a Linear4bit
    """Stop bitsandbytes from repacking the quantised weights of a Linear4bit on a CPU with AVX512-BF16.

    It would repack them at the first forward in evaluation mode. Products with repacked weights have no gradient
    (autograd/_functions.py:422).
    """
    _PACKING.attribute(linear, "support_avx512bf16_for_cpu")
    linear.support_avx512bf16_for_cpu = False
