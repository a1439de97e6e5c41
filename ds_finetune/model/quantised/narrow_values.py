"""Attention whose values are narrower than its keys, as in multi-head latent attention (192 and 128 columns)."""

from contextlib import nullcontext
from enum import Enum

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ds_finetune.plan.packed_attention import MAX_WIDTH

_PAD_FROM = 1024
"""Tokens of a document from which values are padded on the CPU: torch 2.13's fused kernel needs equal widths there.
Measured 0.26 to 0.5 of the unfused time from 1,024 tokens on, no gain at 512.
"""


class ValueKernel(Enum):
    """How torch's attention gets values that are narrower than keys."""

    PADDED = "padded"
    """Columns of zeros make them as wide, for kernels that need equal widths such as FlashAttention's."""
    CUDNN = "cudnn"
    """As they are, by cuDNN."""
    MEMORY_EFFICIENT = "memory_efficient"
    """As they are, by the memory-efficient kernel."""
    ANY = "any"
    """As they are, by the kernel that torch chooses."""


_BACKENDS = {
    ValueKernel.CUDNN: SDPBackend.CUDNN_ATTENTION,
    ValueKernel.MEMORY_EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


def value_kernel(query: torch.Tensor, value: torch.Tensor, *, is_masked: bool) -> ValueKernel:
    """The choice for query [rows, heads, tokens, width] and value [rows, heads, tokens, value width], by their device.

    On GPUs FlashAttention computes 1.2 times as much with padded values, and is expected to be faster all the same; it
    takes neither fp32 nor masks, which leaves torch's memory-efficient kernel. `bench/gpu` compares them.
    """
    if value.shape[3] >= query.shape[3]:
        return ValueKernel.ANY
    if query.device.type == "cpu":
        return ValueKernel.PADDED if value.shape[2] >= _PAD_FROM else ValueKernel.ANY
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    takes_flash = is_half and not is_masked and query.shape[3] <= MAX_WIDTH
    return ValueKernel.PADDED if takes_flash else ValueKernel.ANY


def attend(  # noqa: PLR0913 - the arguments of torch's attention
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    kernel: ValueKernel,
    scale: float,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> torch.Tensor:
    """torch's attention by `kernel`; shapes as in torch, returns [rows, heads, tokens, value width].

    RuntimeError of torch where the kernel does not take the tensors.
    """
    width = value.shape[3]
    if kernel is ValueKernel.PADDED:
        value = functional.pad(value, (0, key.shape[3] - width))
    with sdpa_kernel(_BACKENDS[kernel]) if kernel in _BACKENDS else nullcontext():
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=is_causal
        )
    return out[..., :width]
