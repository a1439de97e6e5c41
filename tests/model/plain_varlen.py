"""A plain stand-in for `torch.nn.attention.varlen.varlen_attn`, which runs on GPUs alone: torch 2.13's signature and
the demands of its kernel, one document after another.
"""

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention import varlen


def plain_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """[tokens, heads, width], and keys and values with as many heads or fewer -> [tokens, heads, width]."""
    check_arguments(query, key, value, (cu_seq_q, cu_seq_k), (max_q, max_k), enable_gqa=enable_gqa)
    groups, (before, behind) = query.shape[1] // key.shape[1], window_size
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    outs = []
    for (begin, end), (first, last) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        query_, key_, value_ = (part.transpose(0, 1) for part in (query[begin:end], key[first:last], value[first:last]))
        # The last query is at the place of the last key (flash_attn/src/mask.h: seqlen_k - seqlen_q).
        positions = torch.arange(last - first, device=query.device)
        distance = positions[begin - end :, None] - positions
        keys = last - first
        seen = (distance <= (before if before >= 0 else keys)) & (-distance <= (behind if behind >= 0 else keys))
        scores = query_ @ key_.mT * (query.shape[2] ** -0.5 if scale is None else scale)
        outs.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value_)
    return torch.cat(outs, 1).transpose(0, 1)


def check_arguments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: Any, longest: Any, *, enable_gqa: bool
) -> None:
    """torch 2.13, nn/attention/varlen.py:406-424 and aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp
    (mha_varlen_fwd), but for the dtype.
    """
    assert query.shape[2] == key.shape[2] == value.shape[2] <= 256
    assert len(bounds[0]) == len(bounds[1])
    assert query.shape[2] % 8 == 0
    assert key.shape == value.shape
    assert query.shape[1] % key.shape[1] == 0
    # torch 2.11 takes fewer key heads than query heads without an argument, and does not know this one.
    takes_argument = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters
    assert enable_gqa == takes_argument or query.shape[1] == key.shape[1]
    assert all(part.stride(-1) == 1 for part in (query, key, value))
    for each, most, part in zip(bounds, longest, (query, key), strict=True):
        assert each.dtype == torch.int32
        assert each.is_contiguous()
        assert (int(each[0]), int(each[-1])) == (0, len(part))
        assert type(most) is int
        assert most == int(each.diff().max())
