"""Attention of DeepSeek-V4 by document: to a window of tokens, and to entries that each hold some tokens compressed.

An entry is a mean of the tokens of a window of `compress_rate` tokens, and where windows overlap also of the window
before; a document's last tokens that fill no window are in none. An indexer chooses `index_topk` of them for a query.
Rows are flattened, and the entries of all documents are in the order of their tokens: a query attends to a range of
tokens and in a range of entries, with which some queries at a time are compared.
"""

from collections.abc import Iterator
from copy import copy
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.foreign.transformers_attention import compressed_classes, replace_compressed, rotate_last_pairs
from ds_finetune.model.attention.by_document import BY_DOCUMENT, Documents
from ds_finetune.model.attention.indexed_attention import ScoreInputs, index_scores
from ds_finetune.model.kept_outputs import KeptOutputs, current_outputs

PRODUCTS_AT_ONCE = 2**26
"""Products of queries and keys that are computed at a time, of all heads: 0.25 GiB in fp32."""
_QUERIES = 128
"""Queries at a time, at least, unless their products are too many."""
_LAYOUTS = 8
"""Layouts of documents that are kept: those of a forward by compression rate, for all of its layers."""


class Entries(NamedTuple):
    """The entries of documents whose rows are flattened, and what each token sees of them."""

    windows: torch.Tensor
    """Tokens of each entry's window, int64 [entries, rate]."""
    is_first: torch.Tensor
    """Whether an entry is the first of its document, bool [entries]."""
    positions: torch.Tensor
    """The position in its document of the first token of each entry's window, int64 [entries]."""
    first: torch.Tensor
    """The first entry of each token's document, int64 [tokens]."""
    end: torch.Tensor
    """One past the last entry that each token sees: those whose windows end at it or before, int64 [tokens]."""
    ranges: tuple[np.ndarray, np.ndarray]
    """`first` and `end` in host memory."""


class SeenTokens(NamedTuple):
    """The documents of flattened rows."""

    lengths: Documents
    first_seen: torch.Tensor
    """The first token that each token sees: a window's, or its document's; int64 [tokens]."""


@lru_cache(_LAYOUTS)
def tokens_of(documents: tuple[Documents, ...], window: int, device: torch.device) -> SeenTokens:
    """What tokens see of the rows that consist of `documents`."""
    lengths = tuple(length for row in documents for length in row)
    begins = np.repeat(np.cumsum((0, *lengths))[:-1], lengths)
    first = np.maximum(begins, np.arange(len(begins)) - window + 1)
    return SeenTokens(lengths, torch.from_numpy(first).to(device))


@lru_cache(_LAYOUTS)
def entries_of(lengths: Documents, rate: int, device: torch.device) -> Entries:
    """The entries of documents of these lengths, each for `rate` tokens."""
    sizes = np.array(lengths, dtype=np.int64)
    begins, number = np.cumsum(sizes) - sizes, sizes // rate
    first_entries = np.cumsum(number) - number
    in_document = np.arange(number.sum()) - np.repeat(first_entries, number)
    windows = np.repeat(begins, number)[:, None] + in_document[:, None] * rate + np.arange(rate)
    first, positions = np.repeat(first_entries, sizes), np.arange(sizes.sum()) - np.repeat(begins, sizes)
    end = first + (positions + 1) // rate
    parts = (windows, in_document == 0, in_document * rate, first, end)
    windows_of, is_first, positions_of, first_of, end_of = (torch.from_numpy(part).to(device) for part in parts)
    return Entries(windows_of, is_first, positions_of, first_of, end_of, (first, end))


class _QueryPart(NamedTuple):
    """Some queries, and the tokens and entries that any of them may see."""

    queries: slice
    tokens: slice
    entries: slice


class _Seen(NamedTuple):
    """What queries attend to, for all parts of a forward."""

    tokens: torch.Tensor
    """The first token that each query sees, int64 [tokens]."""
    entries: Entries | None
    scored: ScoreInputs | None
    """What an indexer scores entries from; None where queries see all up to their own."""
    topk: int
    scale: float
    """The scale of products that the indexer makes."""

    def parts(self, heads: int, window: int) -> Iterator[_QueryPart]:
        """All queries, some at a time."""
        number, begin = len(self.tokens), 0
        first, end = self.entries.ranges if self.entries is not None else (np.zeros(number, int),) * 2
        while begin < number:
            size = min(max(window, _QUERIES), number - begin)
            keys = size + window + int(end[begin + size - 1] - first[begin])
            last = begin + max(1, min(size, PRODUCTS_AT_ONCE // (heads * keys)))
            yield _QueryPart(
                slice(begin, last),
                slice(max(0, begin - window + 1), last),
                slice(int(first[begin]), int(end[last - 1])),
            )
            begin = last

    def choose(self, part: _QueryPart) -> torch.Tensor | None:
        """The numbers of the best entries of `part` for each query, int64 [queries, chosen], some of which it may not
        see; None where it sees so few that all are chosen.
        """
        if self.scored is None or self.entries is None or part.entries.stop - part.entries.start <= self.topk:
            return None
        query, key, weight = self.scored
        found = ScoreInputs(query[part.queries], key[part.entries], weight[part.queries])
        scores = index_scores(found, self.scale).masked_fill(~self._entries(part, None), float("-inf"))
        return scores.topk(self.topk).indices

    def mask(self, part: _QueryPart, chosen: torch.Tensor | None) -> torch.Tensor:
        """Whether each query of `part` attends to each of its tokens and entries, bool [queries, 1, keys]."""
        device = self.tokens.device
        query = torch.arange(part.queries.start, part.queries.stop, device=device)[:, None]
        token = torch.arange(part.tokens.start, part.tokens.stop, device=device)
        seen = (token <= query) & (token >= self.tokens[part.queries, None])
        return (seen if self.entries is None else torch.cat([seen, self._entries(part, chosen)], dim=1))[:, None]

    def _entries(self, part: _QueryPart, chosen: torch.Tensor | None) -> torch.Tensor:
        assert self.entries is not None
        entry = torch.arange(part.entries.start, part.entries.stop, device=self.tokens.device)
        first, end = self.entries.first[part.queries, None], self.entries.end[part.queries, None]
        seen = (entry >= first) & (entry < end)
        return seen if chosen is None else torch.zeros_like(seen).scatter_(1, chosen, value=True) & seen


class _Attention(torch.autograd.Function):
    """Attention whose values are its keys and whose softmax has a sink: query [tokens, heads, width], tokens [tokens,
    width], entries [entries, width] and sinks [heads] to [tokens, heads, width].

    Numbers for each query and key are computed for some queries at a time, and again in backward.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes its inputs by position
        ctx: Any,  # noqa: ANN401
        query: torch.Tensor,
        tokens: torch.Tensor,
        entries: torch.Tensor,
        sinks: torch.Tensor,
        seen: _Seen,
        window: int,
        scaling: float,
        outputs: KeptOutputs | None,
    ) -> torch.Tensor:
        ctx.seen, ctx.window, ctx.scaling = seen._replace(scored=None), window, scaling

        def attend() -> tuple[Any, ...]:
            found = [_attend(query, tokens, entries, sinks, seen, part, scaling) for part in seen.parts(*sizes)]
            outs, logs, chosen = zip(*found, strict=True)
            return torch.cat(outs), torch.cat(logs), chosen

        sizes = (query.shape[1], window)
        out, log_sum, ctx.chosen = attend() if outputs is None else outputs.keep(attend)
        ctx.save_for_backward(query, tokens, entries, sinks, out, log_sum)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        query, tokens, entries, sinks, out, log_sum = ctx.saved_tensors
        of_query = torch.empty_like(query)
        of_tokens, of_entries = (torch.zeros_like(part, dtype=log_sum.dtype) for part in (tokens, entries))
        of_out = (grad.to(log_sum.dtype) * out).sum(-1)
        parts = ctx.seen.parts(query.shape[1], ctx.window)
        for part, chosen in zip(parts, ctx.chosen, strict=True):
            at, keys = part.queries, torch.cat([tokens[part.tokens], entries[part.entries]])
            logits = _logits(query[at], keys, ctx.seen.mask(part, chosen), ctx.scaling)
            weights = (logits - log_sum[at, :, None]).exp()
            of_logits = weights * ((grad[at] @ keys.T).to(weights.dtype) - of_out[at, :, None]) * ctx.scaling
            flat = of_logits.to(keys.dtype).flatten(0, 1)
            of_query[at] = (flat @ keys).view_as(query[at])
            of_keys = flat.T @ query[at].flatten(0, 1) + weights.to(keys.dtype).flatten(0, 1).T @ grad[at].flatten(0, 1)
            of_tokens[part.tokens] += of_keys[: part.tokens.stop - part.tokens.start]
            of_entries[part.entries] += of_keys[part.tokens.stop - part.tokens.start :]
        of_sinks = -((sinks - log_sum).exp() * of_out).sum(0).to(sinks.dtype)
        return of_query, of_tokens.to(tokens.dtype), of_entries.to(entries.dtype), of_sinks, None, None, None, None


def _attend(  # noqa: PLR0913
    query: torch.Tensor,
    tokens: torch.Tensor,
    entries: torch.Tensor,
    sinks: torch.Tensor,
    seen: _Seen,
    part: _QueryPart,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The output of the queries of `part`, the logarithms of their softmax's sums, and the chosen entries."""
    chosen, keys = seen.choose(part), torch.cat([tokens[part.tokens], entries[part.entries]])
    logits = _logits(query[part.queries], keys, seen.mask(part, chosen), scaling)
    log_sum = torch.logaddexp(logits.logsumexp(-1), sinks.to(logits.dtype))
    return (logits - log_sum[..., None]).exp().to(keys.dtype) @ keys, log_sum, chosen


def _logits(query: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """At least fp32 [queries, heads, keys]."""
    products = query @ keys.T
    products = products.to(torch.promote_types(products.dtype, torch.float32)) * scaling
    return products.masked_fill_(~mask, float("-inf"))


class CompressorByDocument(nn.Module):
    """Mixed into transformers' compressors and indexer: the entries of each document, [entries, width]."""

    compress_rate: int
    head_dim: int
    kv_proj: nn.Linear
    gate_proj: nn.Linear
    kv_norm: nn.Module
    position_bias: nn.Parameter
    rotary_emb: nn.Module
    indexer: "IndexerByDocument"
    chooses = False
    """Whether documents may have more entries than an indexer chooses. Under ZeRO-3 its parameters are gathered, which
    all ranks must do equally often, so this is not decided by the documents of a forward."""

    def forward(self, hidden: torch.Tensor, *others: Any, lengths: Documents | None = None) -> Any:  # noqa: ANN401
        """transformers' own result, and with `lengths` entries and what an indexer scores them from, of flattened
        rows.
        """
        if lengths is None:
            return super().forward(hidden, *others)
        is_scored = self.chooses and hasattr(self, "indexer")
        scored = self.indexer(hidden, *others, lengths=lengths) if is_scored else None
        return self.entries(hidden, lengths), scored

    def entries(self, hidden: torch.Tensor, lengths: Documents) -> torch.Tensor:
        """transformers 5.23, deepseek_v4/modeling_deepseek_v4.py:411-433, 646-686."""
        layout, rows = entries_of(lengths, self.compress_rate, hidden.device), hidden.flatten(0, 1)
        value, gate = (project(rows)[layout.windows] for project in (self.kv_proj, self.gate_proj))
        # transformers keeps the bias in fp32, and the sum with it.
        gate = gate + self.position_bias.to(torch.promote_types(gate.dtype, torch.float32))
        if value.shape[-1] > self.head_dim:
            value, gate = _with_window_before(value, layout.is_first, 0.0), _with_window_before(gate, layout.is_first)
        weight = gate.softmax(dim=1, dtype=torch.promote_types(gate.dtype, torch.float32)).to(value.dtype)
        found = self.kv_norm((value * weight).sum(dim=1))
        cos, sin = self.rotary_emb(found[None], position_ids=layout.positions[None], layer_type="compress")
        return rotate_last_pairs()(found[None, None], cos, sin)[0, 0]


def _with_window_before(both: torch.Tensor, is_first: torch.Tensor, absent: float = float("-inf")) -> torch.Tensor:
    """From [windows, rate, 2 x width] the first columns of the window before, which a document's first window has not,
    and the last columns of the window itself: [windows, 2 x rate, width].
    """
    before, own = both.chunk(2, dim=-1)
    before = before.roll(1, 0).masked_fill(is_first[:, None, None], absent)
    return torch.cat([before, own], dim=1)


class IndexerByDocument(CompressorByDocument):
    """Mixed into transformers' indexer, which has no gradient."""

    q_b_proj: nn.Linear
    scorer: Any

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, *others: Any, lengths: Documents | None = None) -> Any:  # noqa: ANN401
        """transformers' own result, and with `lengths` what it scores the entries of flattened rows from."""
        if lengths is None:
            return super().forward(hidden, *others)
        low_rank, positions = others[:2]
        query = self.q_b_proj(low_rank).unflatten(-1, (-1, self.head_dim))
        cos, sin = self.rotary_emb(hidden, position_ids=positions, layer_type="compress")
        query = rotate_last_pairs()(query, cos, sin, unsqueeze_dim=2)
        weight = self.scorer.weights_proj(hidden).float() * self.scorer.weights_scaling
        return ScoreInputs(query.flatten(0, 1), self.entries(hidden, lengths), weight.flatten(0, 1))


class CompressedAttention(nn.Module):
    """Mixed into transformers' attention of DeepSeek-V4."""

    config: PretrainedConfig
    by_document: bool
    q_a_proj: nn.Module
    q_a_norm: nn.Module
    q_b_proj: nn.Module
    q_b_norm: nn.Module
    kv_proj: nn.Module
    kv_norm: nn.Module
    o_a_proj: nn.Module
    o_b_proj: nn.Module
    rope_layer_type: str
    layer_idx: int
    head_dim: int
    scaling: float
    sliding_window: int
    sinks: nn.Parameter
    compressor: CompressorByDocument | None

    def forward(  # noqa: PLR0913 - transformers' interface
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,  # noqa: ANN401 - transformers' Cache
        documents: tuple[Documents, ...] | None = None,
        **others: Any,  # noqa: ANN401 - what attention implementations take
    ) -> tuple[torch.Tensor, None]:
        """Hidden states [batch, tokens, width] before and after; None in place of attention weights.

        With a cache, the attention is transformers' own, which needs a mask where BY_DOCUMENT has none.
        """
        if not self.by_document or past_key_values is not None:
            if self.by_document and attention_mask is None:
                attention_mask = self._cached_mask(hidden_states, past_key_values)
            given = (position_embeddings, position_ids, attention_mask, past_key_values)
            return super().forward(hidden_states, *given)  # type: ignore[no-any-return]
        assert attention_mask is None, "attention by document does not support masked tokens inside a row"
        assert others.get("sp_group") is None, "the layout was refused"
        rows, length = hidden_states.shape[:2]
        cos, sin = position_embeddings[self.rope_layer_type]
        rotate: Any = rotate_last_pairs()
        low_rank = self.q_a_norm(self.q_a_proj(hidden_states))
        query = self.q_b_norm(self.q_b_proj(low_rank).unflatten(-1, (-1, self.head_dim)))
        tokens = self.kv_norm(self.kv_proj(hidden_states))[:, :, None]
        query, tokens = (rotate(part, cos, sin, unsqueeze_dim=2).flatten(0, 1) for part in (query, tokens))
        layout = tokens_of(documents or ((length,),) * rows, self.sliding_window, hidden_states.device)
        entries, seen = tokens[:0, 0], _Seen(layout.first_seen, None, None, 0, 1.0)
        if self.compressor is not None:
            entries, scored = self.compressor(hidden_states, low_rank, position_ids, lengths=layout.lengths)
            of_entries = entries_of(layout.lengths, self.compressor.compress_rate, hidden_states.device)
            seen = _Seen(layout.first_seen, of_entries, scored, *_choice_of(self.compressor))
        sizes = (self.sliding_window, self.scaling)
        out = _Attention.apply(query, tokens[:, 0], entries, self.sinks, seen, *sizes, current_outputs())
        out = rotate(out.unflatten(0, (rows, length)), cos, -sin, unsqueeze_dim=2)
        out = out.reshape(rows, length, self.config.o_groups, -1)
        return self.o_b_proj(self.o_a_proj(out).flatten(2)), None

    def _cached_mask(self, hidden: torch.Tensor, cache: Any) -> torch.Tensor:  # noqa: ANN401 - transformers' Cache
        """What the next tokens of a text see of those in the window: [1, 1, tokens, cached tokens + tokens]."""
        layer, number = cache.layers[self.layer_idx], hidden.shape[1]
        cached = layer.keys.shape[-2] if layer.is_initialized else 0
        distance = torch.arange(cached, cached + number)[:, None] - torch.arange(cached + number)
        seen = (distance >= 0) & (distance < self.sliding_window)
        mask = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, float("-inf"))
        return mask.to(hidden.device)[None, None]


def _choice_of(compressor: CompressorByDocument) -> tuple[int, float]:
    """How many entries the indexer of a compressor chooses, and the scale of its products."""
    indexer: Any = getattr(compressor, "indexer", None)
    return (0, 1.0) if indexer is None else (indexer.index_topk, indexer.scorer.softmax_scale)


@cache
def _mixins() -> dict[type[nn.Module], type[nn.Module]]:
    attention, sparse, heavy, indexer = compressed_classes()
    by_class = {attention: CompressedAttention, sparse: CompressorByDocument, heavy: CompressorByDocument}
    return {**by_class, indexer: IndexerByDocument}


def install_compressed_attention(lm: PreTrainedModel) -> None:
    """Make attention of DeepSeek-V4 work by document, in place; other models stay as they are."""
    if not family_of(lm.config.model_type).compresses:
        return
    if lm.config.attention_dropout:
        raise ModelError(
            f"attention_dropout {lm.config.attention_dropout} with model_type `{lm.config.model_type}` is not known",
            hint="set it to 0 in config.json",
        )
    by_document = lm.config._attn_implementation == BY_DOCUMENT
    for module in lm.modules():
        mixin = _mixins().get(type(module))
        if mixin is not None:
            replace_compressed(module, mixin)
        if mixin is CompressedAttention:
            # transformers' own attention, with a cache, is eager.
            module.config, module.by_document = copy(module.config), by_document
            if by_document:
                module.config._attn_implementation = "eager"
