"""Causal attention over each document of a packed row, without a mask over the whole row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import flash_attention_mask

from ds_finetune.model.sequence import SequenceGroup

BY_DOCUMENT = "ds_finetune_by_document"
"""Name of this attention in a model's configuration."""

Documents = tuple[int, ...]
"""Lengths of the documents that lie one behind the other in a row, padding as one of them; they fill the row."""

_PAD_FROM = 1024
"""Tokens of a document from which values narrower than keys are padded on the CPU: torch 2.13's fused kernel wants equal
widths there. Measured 0.26 to 0.5 of the unfused time from 1,024 tokens on, no gain at 512."""


@dataclass(frozen=True)
class _Causal:
    """Causal attention within one document."""

    scaling: float
    window: int | None
    """Tokens a query sees at most, itself included."""
    dropout: float

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The queries are the last tokens of the document whose keys and values are given."""
        queries, keys, width = query.shape[2], key.shape[2], value.shape[3]
        if query.device.type == "cpu" and keys >= _PAD_FROM and width < key.shape[3]:
            value = functional.pad(value, (0, key.shape[3] - width))
        mask, is_whole = None, queries == keys
        if (self.window is not None and keys > self.window) or not (is_whole or queries == 1):
            places = torch.arange(keys, device=query.device)
            behind = places[keys - queries :, None] - places
            mask = (behind >= 0) & (behind < (self.window or keys))
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=self.dropout, scale=self.scaling, is_causal=mask is None and is_whole
        )
        return out[..., :width]


def attend_by_document(  # noqa: PLR0913 - transformers' interface
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    documents: tuple[Documents, ...] | None = None,
    sequence: SequenceGroup | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **_: Any,  # noqa: ANN401 - what other implementations take
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [rows, heads, tokens, width], key and value [rows, key heads, tokens, width].

    Returns [rows, tokens, heads, value width]. `documents` has one entry a row; None takes each row as one document,
    or, with fewer queries than keys, the queries as its last tokens (decoding with a cache). Given a `sequence` group, the
    tokens are this rank's of rows that its ranks share, and `documents` are of the whole rows.
    """
    assert attention_mask is None, "rows with masked tokens inside are not attended to by document"
    if sequence is not None:
        query, key, value = sequence.whole_rows(query, key, value)
    groups = query.shape[1] // key.shape[1]
    parts = (query, repeat_kv(key, groups), repeat_kv(value, groups))
    causal = _Causal(scaling, sliding_window, dropout)
    if documents is None:
        out = causal(*parts)
    else:
        rows = zip(*(tensor.split(1) for tensor in parts), documents, strict=True)
        out = torch.cat([_row(causal, row, lengths) for *row, lengths in rows])
    out = out.transpose(1, 2).contiguous()
    return out if sequence is None else sequence.own_tokens(out), None


def _row(causal: _Causal, parts: Sequence[torch.Tensor], lengths: Documents) -> torch.Tensor:
    documents = zip(*(tensor.split(lengths, dim=2) for tensor in parts), strict=True)
    return torch.cat([causal(*document) for document in documents], dim=2)


AttentionInterface.register(BY_DOCUMENT, attend_by_document)
# Gives no mask for rows without masked tokens, and the mask itself otherwise, which `attend_by_document` refuses.
AttentionMaskInterface.register(BY_DOCUMENT, flash_attention_mask)
