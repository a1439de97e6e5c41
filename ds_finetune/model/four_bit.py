"""Frozen weights of linear modules in four bits (Dettmers et al., QLoRA, arXiv 2305.14314), stored and multiplied by
bitsandbytes 0.50.

The format is NF4 with a scale for each block of 64 numbers. The scales of 256 blocks are quantised to eight bits with
a common scale (double quantisation, the default of `Linear4bit`). A weight is quantised on its final device as soon as
its last number has been read.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.model.build import Fragment, whole
from ds_finetune.patches.bitsandbytes_linear import without_cpu_packing

_BLOCK, _NESTED = 64, 256
_TABLES = 4 * (16 + 256 + 1)
"""Bytes that each weight needs besides its blocks: both lookup tables and the mean of its scales, in fp32."""


def fits_four_bit(shape: tuple[int, ...]) -> bool:
    """Whether rows of a weight consist of whole blocks.

    Otherwise bitsandbytes 0.50.2 quantises correctly but dequantises wrongly on CPUs (backends/cpu/ops.py:137): blocks
    continue from row to row, and its kernel starts a new block with each row. Measured error: 15 to 40% instead of 9%.
    """
    return len(shape) == 2 and shape[1] % _BLOCK == 0


def nf4_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a weight of `shape`: half a byte per number, one per block, four per 256 blocks, and the tables."""
    numel = prod(shape)
    blocks = -(-numel // _BLOCK)
    return -(-numel // 2) + blocks + 4 * -(-blocks // _NESTED) + _TABLES


def install_four_bit(lm: PreTrainedModel, names: Iterable[str], *, device: str) -> None:
    """Replace the linear modules `names` of `lm` by modules that hold NF4 on `device` once their weights are written
    through `four_bit_or_whole`; pipeline stages have those of their own layers.

    `lm` was built inside `linears_without_memory` (patches/torch_nn.py); its other linear modules get uninitialised
    memory here.
    """
    here = dict(lm.named_modules())
    for name in names:
        if name in here:
            lm.set_submodule(name, _four_bit(here[name], device))
    for module in lm.modules():
        for leaf, param in module.named_parameters(recurse=False):
            if param.is_meta and not is_four_bit(param):
                setattr(module, leaf, nn.Parameter(torch.empty_like(param, device=device)))


def _four_bit(linear: nn.Module, device: str) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    assert type(linear) is nn.Linear, type(linear)
    dtype = linear.weight.dtype
    made = Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    made.weight = Params4bit(
        torch.empty_like(linear.weight, device="meta"), requires_grad=False, quant_type="nf4", module=made
    )
    made.weight.meant_for = torch.device(device)
    if linear.bias is not None:
        made.bias = nn.Parameter(torch.empty_like(linear.bias, device=device))
    without_cpu_packing(made)
    return made


def is_four_bit(param: torch.Tensor) -> bool:
    """Whether a parameter is, or is to be, held in four bits."""
    return hasattr(param, "quant_state")


def four_bit_or_whole(tensor: torch.Tensor) -> Fragment:
    """The fragment of a tensor that this rank holds entirely; one in four bits is quantised when the fragment is
    closed.
    """
    if not is_four_bit(tensor):
        return whole(tensor)
    shape = shape_of(tensor)
    return Fragment(0, prod(shape), shape, partial(_quantise_when_closed, tensor))


@contextmanager
def _quantise_when_closed(param: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - bitsandbytes' Params4bit
    assert param.quant_state is None, "a weight is quantised once"
    from bitsandbytes.nn import Params4bit

    values = torch.empty_like(param, device=param.meant_for).as_subclass(torch.Tensor)
    yield values.view(-1)
    module = param.module
    module.weight = Params4bit(values, requires_grad=False, quant_type="nf4", module=module).to(param.meant_for)
    module.weight.model_parallel = False


def shape_of(param: Any) -> tuple[int, ...]:  # noqa: ANN401 - bitsandbytes' Params4bit, or any tensor
    """Shape of the weight that a parameter holds, in four bits or not."""
    state = getattr(param, "quant_state", None)
    return tuple(param.shape if state is None else state.shape)


def dtype_of(param: Any) -> torch.dtype:  # noqa: ANN401
    """The dtype in which a parameter takes part in computation."""
    state = getattr(param, "quant_state", None)
    return param.dtype if state is None else state.dtype  # type: ignore[no-any-return]


def dequantised(param: Any) -> torch.Tensor:  # noqa: ANN401
    """A parameter without its gradient; one in four bits is dequantised into a copy in its dtype."""
    if getattr(param, "quant_state", None) is None:
        return param.detach()  # type: ignore[no-any-return]
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(param.data, param.quant_state)  # type: ignore[no-any-return]
