"""Attention within each document of packed rows, causal or bidirectional, without a mask over the whole row."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from ds_finetune.errors import ModelError
from ds_finetune.foreign.transformers_attention import register_attention, without_search_for_documents, wrap_attention
from ds_finetune.model.attention.kernels import (
    Documents,
    PackedDocuments,
    attend_document,
    attend_packed,
    find_origins,
    pack_documents,
    pads_values,
)
from ds_finetune.model.kept_outputs import save_outputs
from ds_finetune.model.parallel.sequence import SequenceParallelGroup

BY_DOCUMENT = "ds_finetune_by_document"
"""Name of attention by document in transformers' registry of attention implementations."""

FLASH = "flash_attention_2"
"""transformers' name of the attention implementation FlashAttention 2."""
BY_LENGTHS = "ds_finetune_by_lengths"
"""Name of a slow attention implementation for tests on CPUs, which takes FlashAttention's arguments."""

KNOWS_DOCUMENTS = (BY_DOCUMENT, BY_LENGTHS, FLASH)
"""Attention implementations that receive the lengths of documents instead of inferring them from position ids."""

_DocumentBatches = tuple[list[tuple[int, int, int]], torch.Tensor, torch.Tensor, torch.Tensor]
ChosenTokens = tuple[tuple[torch.Tensor | None, ...], ...]
"""Masks of the keys that queries attend to, one for each document of each row: bool [queries, keys], False for later
keys. None instead of a mask means all earlier keys.
"""

_WINDOW_BLOCK = 512
"""Minimum number of queries in a block of sliding-window attention."""
_SHORT = 128
"""On CPUs, documents of up to this many tokens share an attention call; longer documents get a call each."""
_SINK_COLUMNS = 8
_WITHOUT_EFFECT = ("position_ids", "cache_position")
"""Tensor arguments that have no effect on attention by document, because documents are already separated."""


@dataclass(frozen=True)
class _DocumentAttention:
    scaling: float
    window: int | None
    """Size of the sliding window: a query attends to keys less than `window` positions away. None means no window."""
    dropout: float
    is_causal: bool = True
    sinks: torch.Tensor | None = None
    """Attention sinks [heads]: an additional logit in each head's softmax. Its value vector is zero."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention within one document. With causal attention, queries may be the last tokens only. `chosen`
        masks the keys that queries attend to.
        """
        assert chosen is None or self.window is None
        queries, keys, width = query.shape[2], key.shape[2], value.shape[3]
        if self.window is not None and self.is_causal and queries > max(self.window, _WINDOW_BLOCK):
            return self._in_blocks(query, key, value, max(self.window, _WINDOW_BLOCK))
        mask, is_whole = chosen, queries == keys
        assert is_whole or self.is_causal, (queries, keys)
        has_window = self.window is not None and keys > self.window
        if chosen is None and (has_window or not (is_whole or queries == 1)):
            positions = torch.arange(keys, device=query.device)
            distance = positions[keys - queries :, None] - positions
            distance = distance if self.is_causal else distance.abs()
            mask = (distance >= 0) & (distance < (self.window or keys))
        if self.sinks is not None:
            mask = None if mask is None else functional.pad(mask, (1, 0), value=True)
            query, key, value = _with_sinks(query, key, value, self.sinks / self.scaling)
            if mask is None and is_whole:
                # The kernel's causal mask expects as many queries as keys. The sink is an additional key, so a query
                # is added too.
                query = functional.pad(query, (0, 0, 1, 0))
        out = attend_document(
            query,
            key,
            value,
            is_padded=pads_values(query, value, is_masked=mask is not None),
            scale=self.scaling,
            mask=mask,
            dropout=self.dropout,
            is_causal=self.is_causal and mask is None and is_whole,
        )
        return out[:, :, -queries:, :width]

    def of_last_token(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_key: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute attention of each row's last token: query [rows, heads, 1, width], key and value [rows, key heads,
        tokens, width]. `is_key`, bool [rows, 1, 1, tokens], masks the keys that the query attends to.
        """
        if self.window is not None:
            key, value = key[:, :, -self.window :], value[:, :, -self.window :]
            is_key = None if is_key is None else is_key[..., -self.window :]
        (rows, heads, *_), width = query.shape, value.shape[3]
        if self.sinks is None:
            # In grouped-query attention several query heads share a key head. They become queries of one head, so that
            # keys are not copied.
            query = query.reshape(rows, key.shape[1], -1, query.shape[3])
        else:
            groups = heads // key.shape[1]
            is_key = None if is_key is None else functional.pad(is_key, (1, 0), value=True)
            query, key, value = _with_sinks(
                query, repeat_kv(key, groups), repeat_kv(value, groups), self.sinks / self.scaling
            )
        out = attend_document(query, key, value, is_padded=False, scale=self.scaling, mask=is_key, dropout=self.dropout)
        return out[..., :width].reshape(rows, heads, 1, -1)

    def _in_blocks(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int) -> torch.Tensor:
        """Compute sliding-window attention for `size` queries at a time with the keys in their windows, so that no mask
        of all tokens by all tokens is needed.
        """
        assert self.window is not None
        earlier, outs = key.shape[2] - query.shape[2], []
        for begin in range(0, query.shape[2], size):
            part = query[:, :, begin : begin + size]
            seen = slice(max(0, earlier + begin - self.window + 1), earlier + begin + part.shape[2])
            outs.append(self(part, key[:, :, seen], value[:, :, seen]))
        return torch.cat(outs, dim=2)


def _with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Represent sinks by a first key with value zero, whose product with each query of head h is `logits[h]`.

    Added columns, 1 in queries and 0 in other keys, give this product. So kernels without sinks compute attention with
    sinks, and its gradients. Eight columns are added, because GPU kernels need multiples of eight.
    """
    columns = _SINK_COLUMNS
    query = functional.pad(functional.pad(query, (0, 1), value=1.0), (0, columns - 1))
    sink = functional.pad(logits.to(key.dtype).view(1, -1, 1, 1), (key.shape[3], columns - 1))
    key = torch.cat([sink.expand(len(key), -1, -1, -1), functional.pad(key, (0, columns))], dim=2)
    return query, key, functional.pad(value, (0, key.shape[3] - value.shape[3], 1, 0))


OWN_WINDOW = -1
"""Value of the argument `sliding_window` that stands for the window of the attention module itself."""


def attend_by_document(  # noqa: PLR0913 - transformers' interface
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    documents: tuple[Documents, ...] | None = None,
    shared: tuple[Documents, ...] | None = None,
    sp_group: SequenceParallelGroup | None = None,
    sliding_window: int | None = OWN_WINDOW,
    dropout: float = 0.0,
    s_aux: torch.Tensor | None = None,
    chosen: ChosenTokens | None = None,
    packed: PackedDocuments | None = None,
    is_key: torch.Tensor | None = None,
    **others: Any,  # noqa: ANN401 - what other implementations take
) -> tuple[torch.Tensor, None]:
    """Compute attention within documents, as an attention implementation of transformers.

    Query is [rows, heads, tokens, width], key and value [rows, key heads, tokens, width]; the result is [rows, tokens,
    heads, value width]. If `is_causal` of the module is false, attention is bidirectional, as in transformers 5.23
    (integrations/sdpa_attention.py:143).

    - `documents`: lengths of the documents of each row. None means one document per row. If there are fewer queries
      than keys, queries are the last tokens (decoding with a cache).
    - `shared`: for each document, how many first tokens of an earlier document it attends to as its prefix.
    - `sp_group`: sequence parallel group. Tensors hold this rank's tokens, while `documents` describes full rows.
    - `sliding_window`: size of the window in tokens, None without a window. Left out, it is the module's attribute
      `sliding_window`. In encoders the window reaches as far in both directions.
    - `s_aux`: attention sinks [heads], an additional logit in each head's softmax (gpt_oss/modeling_gpt_oss.py:244).
    - `chosen`: masks of the keys that queries attend to (sparse attention).
    - `packed`: `documents` as arguments of a kernel that computes all documents in one call. Attention with sinks,
      dropout or chosen keys still needs a call per document.
    - `is_key`: mask of the keys that the single query of each row attends to, bool [rows, 1, 1, keys].

    ModelError if another argument would change the result.
    """
    check_arguments(module, others)
    assert attention_mask is None, "attention by document does not support masked tokens inside a row"
    if sp_group is not None:
        query, key, value = sp_group.gather_tokens_scatter_heads(query, key, value)
        # Each rank has its heads' part of the sinks' gradient and zeros elsewhere, so the sum over ranks is complete.
        s_aux = None if s_aux is None else s_aux.chunk(sp_group.size)[sp_group.group_rank]
    # Models with a window in masks do not pass it as argument (transformers 5.23, qwen2_moe/modeling_qwen2_moe.py:254).
    window = getattr(module, "sliding_window", None) if sliding_window == OWN_WINDOW else sliding_window
    is_causal = getattr(module, "is_causal", True)
    attend = _DocumentAttention(scaling, window, dropout, is_causal, s_aux)
    if packed is not None and s_aux is None and chosen is None and not dropout:
        out = attend_packed((query, key, value), packed, scaling=scaling, window=window, is_causal=is_causal)
    elif query.shape[2] == 1 and documents is None and chosen is None:
        out = attend.of_last_token(query, key, value, is_key).transpose(1, 2)
    else:
        assert is_key is None, "only single queries attend to chosen keys of their rows"
        out = _attend_to_rows(attend, (query, key, value), documents, shared, chosen).transpose(1, 2)
    out = out.contiguous()
    return out if sp_group is None else sp_group.gather_heads_scatter_tokens(out), None


def _attend_to_rows(
    attend: _DocumentAttention,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    documents: tuple[Documents, ...] | None,
    shared: tuple[Documents, ...] | None,
    chosen: ChosenTokens | None,
) -> torch.Tensor:
    query, groups = parts[0], parts[0].shape[1] // parts[1].shape[1]
    parts = (query, repeat_kv(parts[1], groups), repeat_kv(parts[2], groups))
    if documents is None and chosen is None:
        return attend(*parts)
    if documents is not None and chosen is None and attend.is_causal and query.device.type == "cpu":
        batches = document_batches(documents, shared)
        if shared is not None or len(batches[0]) < sum(map(len, documents)):
            return _attend_in_batches(attend, parts, batches)
    assert shared is None, "documents continue others in one call for all of them, or on CPUs"
    of_rows = [None] * len(query) if documents is None else documents
    rows = zip(*(tensor.split(1) for tensor in parts), of_rows, chosen or [None] * len(query), strict=True)
    return torch.cat([_row(attend, row, lengths, of_row) for *row, lengths, of_row in rows])


def _attend_in_batches(
    attend: _DocumentAttention, parts: Sequence[torch.Tensor], batches: _DocumentBatches
) -> torch.Tensor:
    """Compute attention within documents, in batches of documents of similar length. Padding at their ends has no
    effect, because attention is causal. A document's keys begin with those of its prefix in an earlier document.
    """
    shapes, order, of_keys, token_rows = batches
    sizes = [[rows * tokens, *[rows * (continued + tokens)] * 2] for rows, tokens, continued in shapes]
    ordered = [
        part.transpose(1, 2).flatten(0, 1).index_select(0, index).split(lengths)
        for part, index, lengths in zip(parts, (order, of_keys, of_keys), zip(*sizes, strict=True), strict=True)
    ]
    outs = []
    for (rows, *_), batch in zip(shapes, zip(*ordered, strict=True), strict=True):
        out = attend(*(part.unflatten(0, (rows, -1)).transpose(1, 2) for part in batch))
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, token_rows).unflatten(0, (len(parts[0]), -1)).transpose(1, 2)


@lru_cache(maxsize=4)
def document_batches(documents: tuple[Documents, ...], shared: tuple[Documents, ...] | None) -> _DocumentBatches:
    """Group documents into batches for `_attend_in_batches`.

    Returns for each batch its number of documents, the number of tokens of the longest one, and the length of the
    prefix that each one has in an earlier document. Three int64 index tensors follow:
    - for each batched query, the index of its token in the flattened rows; padding repeats a document's last token,
    - for each batched key, the index of its token in the flattened rows,
    - for each token of the flattened rows, the index of its query in the batches.
    """
    lengths = np.array([length for row in documents for length in row])
    begins, origins, continued = find_origins(documents, shared or [(0,) * len(row) for row in documents])
    alike = defaultdict[tuple[int, int, int], list[int]](list)
    for number, (length, more) in enumerate(zip(lengths.tolist(), continued.tolist(), strict=True)):
        step = max(8, 2 ** (length.bit_length() - 3))
        alike[-(-length // step) * step, number if length > _SHORT else -1, more].append(number)
    shapes, order, keys, is_token = [], [], [], []
    for (*_, more), numbers in alike.items():
        columns, ends = np.arange(lengths[numbers].max()), lengths[numbers, None]
        shapes.append((len(numbers), len(columns), more))
        token_indices = begins[numbers, None] + np.minimum(columns, ends - 1)
        order.append(token_indices.ravel())
        keys.append(np.hstack([origins[numbers, None] + np.arange(more), token_indices]).ravel())
        is_token.append((columns < ends).ravel())
    tokens, of_keys = np.concatenate(order), np.concatenate(keys)
    token_rows = np.flatnonzero(np.concatenate(is_token))
    order_of_tokens = torch.from_numpy(token_rows[np.argsort(tokens[token_rows])])
    return shapes, torch.from_numpy(tokens), torch.from_numpy(of_keys), order_of_tokens


def check_arguments(module: nn.Module, others: Mapping[str, Any]) -> None:
    """ModelError if one of the arguments `others`, which attention by document ignores, would change the result."""
    if unknown := _unknown(others):
        raise ModelError(
            f"{type(module).__name__} passes `{unknown[0]}` to its attention, "
            "which attention by document does not implement",
            hint="set model.attention: eager",
        )


def _unknown(others: Mapping[str, Any]) -> list[str]:
    tensors = {name for name, value in others.items() if isinstance(value, torch.Tensor)} - set(_WITHOUT_EFFECT)
    plain = {"softcap": (None,), "is_causal": (None, True)}
    return sorted(tensors) + [name for name, values in plain.items() if others.get(name) not in values]


def mask_context(lm: PreTrainedModel) -> AbstractContextManager[None]:
    """Context in which `lm` makes masks without searching position ids for documents, if it receives their lengths."""
    knows_documents = lm.config._attn_implementation in KNOWS_DOCUMENTS
    return without_search_for_documents() if knows_documents else nullcontext()


def flash_arguments(documents: Sequence[Documents], device: torch.device) -> dict[str, Any]:
    """Keyword arguments that tell FlashAttention where documents begin in the concatenated rows of a batch.

    transformers 5.23 derives them only for batches of one row (modeling_flash_attention_utils.py:574). torch's kernels
    take boundaries in int32 and maximum lengths as Python integers.
    """
    packed = pack_documents(documents, device)
    bounds, longest = packed.bounds, packed.longest
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def attend_by_lengths(  # noqa: PLR0913 - transformers' interface
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,  # noqa: ANN401 - what other implementations take
) -> tuple[torch.Tensor, None]:
    """Slow attention for tests on CPUs, which takes documents as FlashAttention does (`flash_arguments`). Without those
    arguments each row is one document.
    """
    assert attention_mask is None, "this attention does not support masked tokens inside a row"
    rows, _, tokens, width = query.shape
    lengths = [tokens] * rows if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    groups = query.shape[1] // key.shape[1]
    parts = (query, repeat_kv(key, groups), repeat_kv(value, groups))
    flat = [part.transpose(0, 1).flatten(1, 2)[None] for part in parts]
    if unknown := [name for name in _unknown(others) if name != "cu_seq_lens_k"]:
        raise TypeError(f"{type(module).__name__} passes `{unknown[0]}` to its attention")
    attend = _DocumentAttention(width**-0.5 if scaling is None else scaling, sliding_window, 0.0)
    out = _row(attend, flat, tuple(lengths))
    return out[0].unflatten(1, (rows, tokens)).permute(1, 2, 0, 3).contiguous(), None


def _row(
    attend: _DocumentAttention,
    parts: Sequence[torch.Tensor],
    lengths: Documents | None,
    chosen: Sequence[torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """Compute attention within the documents of one row. If `lengths` is None, the row is one document."""
    split = [[tensor] if lengths is None else tensor.split(lengths, dim=2) for tensor in parts]
    documents = zip(*split, chosen or [None] * len(split[0]), strict=True)
    return torch.cat([attend(*document) for document in documents], dim=2)


register_attention(BY_DOCUMENT, attend_by_document)
register_attention(BY_LENGTHS, attend_by_lengths)
for _name in ("sdpa", FLASH):
    wrap_attention(_name, save_outputs)
