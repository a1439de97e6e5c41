"""Frozen weights of linear modules in four bits (Dettmers et al., QLoRA, arXiv 2305.14314), with bitsandbytes 0.50.

The format is NF4 with a scale for each block of 64 numbers. The scales of 256 blocks are quantised to eight bits with a
common scale (double quantisation, the default of `Linear4bit`). A weight is quantised on its device as soon as it is
fully read. At ZeRO-3 every rank quantises the full weight, and keeps all scales, but only its part of the numbers.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.foreign.torch_nn import without_cpu_packing
from ds_finetune.model.build.skeleton import Fragment, Where


def install_four_bit(lm: PreTrainedModel, names: Iterable[str], *, device: str) -> None:
    """Replace the linear modules `names` of `lm` by modules whose weights are quantised to NF4 on `device`, as soon as
    they are written through `four_bit_or`. Modules on other pipeline stages are skipped.

    Without ZeRO-3 `lm` was built inside `linears_without_memory` (foreign/torch_nn.py), and its other linear modules
    get uninitialised memory here. With ZeRO-3 its parameters were partitioned at construction.
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    modules = dict(lm.named_modules())
    for name in (name for name in names if name in modules):
        linear: Any = modules[name]
        assert type(linear) is nn.Linear, type(linear)
        dtype, width, out = linear.weight.dtype, linear.in_features, linear.out_features
        is_partitioned = hasattr(linear.weight, "ds_tensor")
        quantised = Linear4bit(width, out, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta")
        if is_partitioned:
            quantised.__class__ = type("PartitionedLinear4bit", (_RegatheredLinear, Linear4bit), {})
        empty = torch.empty(out, width, dtype=dtype, device="meta")
        quantised.weight = Params4bit(empty, requires_grad=False, quant_type="nf4", module=quantised)
        quantised.weight.meant_for = torch.device(device)
        if linear.bias is not None:
            bias = linear.bias if is_partitioned else nn.Parameter(torch.empty_like(linear.bias, device=device))
            quantised.bias = bias
        without_cpu_packing(quantised)
        lm.set_submodule(name, quantised)
    for module in lm.modules():
        for leaf, param in module.named_parameters(recurse=False):
            if param.is_meta and not is_four_bit(param):
                setattr(module, leaf, nn.Parameter(torch.empty_like(param, device=device)))


class _RegatheredProduct(torch.autograd.Function):
    """Product with a four-bit weight, which backward reads from the parameter again.

    bitsandbytes' function would save the gathered weight for backward (0.50.2, autograd/_functions.py:321, 358), so
    that ZeRO-3 could not release it.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: Any) -> torch.Tensor:  # noqa: ANN401
        from bitsandbytes import matmul_4bit

        ctx.weight = weight
        product: torch.Tensor = matmul_4bit(hidden, weight.data, quant_state=weight.quant_state)
        return product

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return grad @ dequantised(ctx.weight).to(grad.dtype), None


class _RegatheredLinear(nn.Module):
    """Mixin for a `Linear4bit` whose weight ZeRO-3 gathers in each forward and backward."""

    weight: Any
    bias: torch.Tensor | None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _RegatheredProduct.apply(hidden, self.weight)
        return product if self.bias is None else product + self.bias


def is_four_bit(param: torch.Tensor) -> bool:
    """Whether a parameter is stored in four bits, or will be as soon as its values are read."""
    return hasattr(param, "quant_state")


Partition = Callable[[list[nn.Parameter]], None]
"""Function that partitions unsharded parameters under ZeRO-3."""


def four_bit_or(other: Where, partition: Partition | None = None) -> Where:
    """Extend `other` to four-bit weights. `other` returns a fragment: the part of a parameter that this rank stores.

    A four-bit weight's fragment is the full tensor in 16 bits, to be written in `with fragment.opened()`; at the end of
    that block the weight is quantised, and divided by `partition` if it is given.
    """

    def where(tensor: torch.Tensor) -> Fragment:
        if not is_four_bit(tensor):
            return other(tensor)
        shape = shape_of(tensor)
        return Fragment(0, prod(shape), shape, partial(_quantise_when_closed, tensor, partition))

    return where


@contextmanager
def _quantise_when_closed(param: Any, partition: Partition | None) -> Iterator[torch.Tensor]:  # noqa: ANN401 - bitsandbytes' Params4bit
    assert param.quant_state is None, "a weight is quantised once"
    from bitsandbytes.nn import Params4bit

    values = torch.empty_like(param, device=param.meant_for).as_subclass(torch.Tensor)
    yield values.view(-1)
    module = param.module
    module.weight = Params4bit(values, requires_grad=False, quant_type="nf4", module=module).to(param.meant_for)
    module.weight.model_parallel = False
    if partition is not None:
        partition([module.weight])


def shape_of(param: Any) -> tuple[int, ...]:  # noqa: ANN401 - bitsandbytes' Params4bit, or any tensor
    """Shape of a weight in the model, even if it is stored in four bits."""
    state = getattr(param, "quant_state", None)
    return tuple(param.shape if state is None else state.shape)


def dtype_of(param: Any) -> torch.dtype:  # noqa: ANN401
    """Dtype of a weight in matrix products, even if it is stored in four bits."""
    state = getattr(param, "quant_state", None)
    return param.dtype if state is None else state.dtype  # type: ignore[no-any-return]


def dequantised(param: Any) -> torch.Tensor:  # noqa: ANN401
    """Value of a parameter, without gradient. A four-bit weight is dequantised to its compute dtype."""
    if getattr(param, "quant_state", None) is None:
        return param.detach()  # type: ignore[no-any-return]
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(param.data, param.quant_state)  # type: ignore[no-any-return]
