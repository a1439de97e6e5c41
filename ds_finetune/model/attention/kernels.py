"""Attention kernels: torch's scaled_dot_product_attention for one document, also with values narrower than keys as in
multi-head latent attention, and FlashAttention's variable-length kernel for all documents of a forward in one call.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import attention, functional
from transformers import PretrainedConfig

from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.errors import DependencyError, ModelError
from ds_finetune.model.kept_outputs import save_outputs
from ds_finetune.plan.forward import MAX_WIDTH, flash_3_problem, varlen_problem

Documents = tuple[int, ...]
"""Lengths of a row's consecutive documents. Padding counts as a document, so they sum to the row's length."""
Places = NDArray[np.int64]

_COLUMNS = 8
"""The variable-length kernel supports head widths that are multiples of this (torch 2.13, flash_attn/flash_api.cpp)."""


def packs_documents(attention: str, hf_config: PretrainedConfig, *, device: str, precision: str) -> bool:
    """Whether one kernel call computes the attention of all documents of a forward on `device` (`cpu` or `cuda`).
    ModelError if `model.attention: varlen` in the run file asks for it and the GPU does not support it.
    """
    if attention not in OWN_ATTENTIONS or attention == "by_document":
        return False
    if device == "cpu":
        gpu, problem = device, "its kernel runs only on GPUs"
    else:
        gpu, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        problem = varlen_problem(hf_config.to_dict(), precision=precision, capability=capability)
    if problem and attention == "varlen":
        raise ModelError(
            f"model.attention varlen with model_type `{hf_config.model_type}` on {gpu}: {problem}",
            hint="set model.attention: sdpa, which attends document by document there",
        )
    return not problem


_FLASH_3, FLASH_3_MODULE = "FA3", "flash_attn_interface"
"""torch's name of FlashAttention 3, and the module that torch imports to use it (2.13, nn/attention/_fa3.py:65)."""


def problem_of_flash_3(hf_config: PretrainedConfig) -> str:
    """Why this GPU cannot use FlashAttention 3 for packed documents; empty if it can."""
    implementations: list[str] = getattr(attention, "list_flash_attention_impls", list)()
    is_installed = _FLASH_3 in implementations and find_spec(FLASH_3_MODULE) is not None
    capability = torch.cuda.get_device_capability()
    return flash_3_problem(hf_config.to_dict(), capability=capability, is_installed=is_installed)


def choose_flash_attention(hf_config: PretrainedConfig, *, is_wanted: bool) -> None:
    """Make torch's attention use FlashAttention 3 in this process if `is_wanted` and the GPU supports it, else torch's
    own kernels. It is wanted for models with packed documents.

    DependencyError if the package FlashAttention 3 cannot be loaded.
    """
    if not hasattr(attention, "activate_flash_attention_impl"):
        return
    active = attention.current_flash_attention_impl()
    is_taken = is_wanted and not problem_of_flash_3(hf_config)
    if active == _FLASH_3 and not is_taken:
        attention.restore_flash_attention_impl()
    if is_taken and active is None:
        try:
            attention.activate_flash_attention_impl(_FLASH_3)
        except (ImportError, RuntimeError, OSError) as error:
            raise DependencyError(
                f"FlashAttention 3 is installed and cannot be loaded: {error}",
                hint=f"install a FlashAttention 3 that was built for torch {torch.__version__}, or uninstall it",
            ) from error


@dataclass(frozen=True)
class PackedDocuments:
    """Document boundaries in the concatenated rows of a forward, in the form that the variable-length kernel takes."""

    bounds: torch.Tensor
    """Index of each document's first token, followed by the number of tokens: int32 [documents + 1] on the device."""
    longest: int
    """Number of tokens of the longest document."""
    keys: torch.Tensor | None = None
    """Indices of the keys of all documents, int64 [keys]. A document's keys begin with its prefix in an earlier
    document. None if no document has a prefix.
    """
    key_bounds: torch.Tensor | None = None
    """Index of each document's first key, then the number of keys: int32 [documents + 1]. None if `keys` is None."""
    most_keys: int = 0


def pack_documents(
    documents: Sequence[Documents], device: torch.device, shared: Sequence[Documents] | None = None
) -> PackedDocuments:
    """Copy the document boundaries of all rows to `device`, asynchronously."""

    def copied(numbers: Sequence[int] | Places, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)

    lengths = list(chain.from_iterable(documents))
    bounds = copied([0, *accumulate(lengths)], torch.int32)
    if shared is None:
        return PackedDocuments(bounds, max(lengths))
    begins, origins, continued = find_origins(documents, shared)
    parts = zip(origins, continued, begins, lengths, strict=True)
    keys = [np.r_[origin : origin + more, begin : begin + length] for origin, more, begin, length in parts]
    sizes = list(map(len, keys))
    key_bounds = copied([0, *accumulate(sizes)], torch.int32)
    return PackedDocuments(bounds, max(lengths), copied(np.concatenate(keys), torch.int64), key_bounds, max(sizes))


def find_origins(documents: Sequence[Documents], shared: Sequence[Documents]) -> tuple[Places, Places, Places]:
    """For each document three numbers: index of its first token in the flattened rows; index there of its prefix, the
    first tokens of an earlier document; and length of the prefix.
    """
    lengths, continued = (np.fromiter(chain.from_iterable(each), dtype=np.int64) for each in (documents, shared))
    begins = lengths.cumsum() - lengths
    return begins, begins[np.maximum.accumulate(np.where(continued == 0, np.arange(len(begins)), 0))], continued


@save_outputs
def varlen_attn(*parts: Any, **options: Any) -> object:  # noqa: ANN401 - what torch's takes
    """torch's variable-length kernel. It is imported at the first call, because the import loads torch's compiler."""
    from torch.nn.attention import varlen

    return varlen.varlen_attn(*parts, **options)


@cache
def _grouped_queries() -> dict[str, Any]:
    """Keyword argument for grouped-query attention: torch 2.13 rejects fewer key heads than query heads without it
    (nn/attention/varlen.py:419); torch 2.11 does not have it.
    """
    from torch.nn.attention import varlen

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


def attend_packed(
    parts: Sequence[torch.Tensor],
    packed: PackedDocuments,
    *,
    scaling: float,
    window: int | None = None,
    is_causal: bool = True,
) -> torch.Tensor:
    """Compute attention of all documents in one call, in fp16 or bf16 on a GPU. `parts` are query [rows, heads, tokens,
    width], key and value [rows, key heads, tokens, width or value width]. Returns [rows, tokens, heads, value width].

    Queries attend to tokens less than `window` positions away, and in causal attention to no later ones. Heads are
    padded with zeros to the kernel's width. The kernel aligns a document's queries with its last keys, so the keys of a
    document may begin with its prefix.
    """
    rows, _, tokens, value_width = parts[2].shape
    widest = max(part.shape[3] for part in parts)
    query, key, value = (_flatten(part, width=-(-widest // _COLUMNS) * _COLUMNS) for part in parts)
    key_bounds, most_keys = packed.bounds, packed.longest
    if packed.keys is not None and packed.key_bounds is not None:
        key, value = key.index_select(0, packed.keys), value.index_select(0, packed.keys)
        key_bounds, most_keys = packed.key_bounds, packed.most_keys
    reach = -1 if window is None or window >= most_keys else window - 1
    out = varlen_attn(
        query,
        key,
        value,
        packed.bounds,
        key_bounds,
        packed.longest,
        most_keys,
        scale=scaling,
        window_size=(reach, 0 if is_causal else reach),
        **_grouped_queries(),
    )
    assert isinstance(out, torch.Tensor)
    return out[:, :, :value_width].unflatten(0, (rows, tokens))


def _flatten(part: torch.Tensor, *, width: int) -> torch.Tensor:
    """Reshape [rows, heads, tokens, columns] to [rows * tokens, heads, width], padded with columns of zeros."""
    flat = part.transpose(1, 2).flatten(0, 1)
    return functional.pad(flat, (0, width - flat.shape[2])) if flat.shape[2] < width else flat


_PAD_FROM = 1024
"""On CPUs, values are padded to the width of keys in documents of at least this many tokens, because torch 2.13's fused
kernel needs equal widths. From 1,024 tokens on it took 0.26 to 0.5 of the unfused time; at 512 it saved no time.
"""


def pads_values(query: torch.Tensor, value: torch.Tensor, *, is_masked: bool) -> bool:
    """Whether to pad values [rows, heads, tokens, value width] to the width of queries [rows, heads, tokens, width].

    On GPUs FlashAttention needs equal widths. Padding adds a fifth of the operations, but FlashAttention should still
    be faster (not measured). With fp32 or a mask, torch uses its memory-efficient kernel, which takes unequal widths.
    """
    if value.shape[3] >= query.shape[3]:
        return False
    if query.device.type == "cpu":
        return value.shape[2] >= _PAD_FROM
    return query.dtype in (torch.float16, torch.bfloat16) and not is_masked and query.shape[3] <= MAX_WIDTH


_attend = save_outputs(functional.scaled_dot_product_attention)


def attend_document(  # noqa: PLR0913 - the arguments of torch's attention
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_padded: bool,
    scale: float,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> torch.Tensor:
    """Call torch's scaled_dot_product_attention. Returns [rows, heads, tokens, value width].

    `is_padded` pads values with zeros to the width of keys, for kernels that need equal widths, such as FlashAttention.
    """
    width = value.shape[3]
    out = _attend(
        query,
        key,
        functional.pad(value, (0, key.shape[3] - width)) if is_padded else value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scale,
        is_causal=is_causal,
    )
    return out[..., :width]
