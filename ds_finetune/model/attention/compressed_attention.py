"""DeepSeek-V4's attention within documents. A query attends to a window of earlier tokens and to compressed entries.

A compressed entry is a weighted mean of the keys of `compress_rate` consecutive tokens; in layers with overlap it also
includes as many tokens before them. Tokens at a document's end that do not fill an entry belong to none. In some layers
an indexer chooses `index_topk` entries for each query.

A sequence parallel rank has the queries of its own tokens, the sliding window before them, and all entries. It computes
those entries whose last token it has, and receives the others.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.foreign.transformers_attention import compressed_classes, replace_compressed, take_cache
from ds_finetune.model.attention.by_document import BY_DOCUMENT, Documents, check_arguments
from ds_finetune.model.attention.compressed_layout import (
    Entries,
    QueryBlock,
    RowShards,
    WindowTokens,
    blocks_of,
    entries_of,
    tokens_of,
)
from ds_finetune.model.attention.indexed_attention import (
    DivergenceCollector,
    IndexerTarget,
    KeyBlock,
    ScoreInputs,
    divergence_from,
    index_scores,
)
from ds_finetune.model.kept_outputs import KeptOutputs, current_outputs
from ds_finetune.model.parallel.sequence import SequenceParallelGroup

PRODUCTS_AT_ONCE = 2**26
"""Maximum number of query-key products in memory at once, over all heads: 0.25 GiB in fp32."""
_SCORES_AT_ONCE = 2**24
"""Maximum number of an indexer's query-key products in memory at once, over all its heads: 64 MiB in fp32."""
_QUERIES = 72
"""Maximum number of queries whose attention is computed in one block. Larger blocks compute more products of queries
with keys outside of their windows; smaller blocks need more operations.
"""
_LOG2_E = 1 / math.log(2)


class _VisibleKeys(NamedTuple):
    """Which tokens and compressed entries the queries of a forward attend to."""

    tokens: WindowTokens
    entries: Entries | None
    scored: ScoreInputs | None
    """The indexer's queries and keys; None if queries attend to all earlier compressed entries."""
    topk: int
    scale: float

    def blocks(self, heads: int) -> tuple[QueryBlock, ...]:
        return blocks_of(self.tokens, self.entries, self.topk, _QUERIES, PRODUCTS_AT_ONCE // heads)

    def choose(self, block: QueryBlock) -> torch.Tensor | None:
        """For each query of `block`, indices of the compressed entries with the highest indexer scores, int64 [queries,
        chosen]. They may include entries that the query must not see. None if no query sees more than `topk` entries.

        Scores are computed for one block of entries at a time. Only the best entries so far are kept.
        """
        if self.scored is None or self.entries is None:
            return None
        begin, stop = block.entries.start, block.entries.stop
        seen_before, seen = (numbers[block.queries] for numbers in self.entries.ranges)
        if (seen - seen_before).max() <= self.topk:
            return None
        best: tuple[torch.Tensor, ...] = ()
        query, weight = self.scored.query[block.queries], self.scored.weight[block.queries]
        at_once = max(self.topk, _SCORES_AT_ONCE // query[..., 0].numel())
        for first in range(begin, stop, at_once):
            last = min(first + at_once, stop)
            entry = torch.arange(first, last, device=query.device)
            scores = index_scores(ScoreInputs(query, self.scored.key[first:last], weight), self.scale)
            scores = scores.masked_fill_(~self.sees(block.queries, entry), float("-inf"))
            entry = entry.expand_as(scores)
            if best:
                scores, entry = (torch.cat(pair, dim=1) for pair in zip(best, (scores, entry), strict=True))
            values, indices = scores.topk(min(self.topk, scores.shape[1]))
            best = values, entry.gather(1, indices)
        return best[1]

    def bias(self, block: QueryBlock, chosen: torch.Tensor | None) -> torch.Tensor:
        """Additive attention mask, fp32 [queries, 1, keys]: 0 where a query of `block` sees the key, else -inf."""
        mask = self._mask(block, chosen) if block.mask is None else block.mask
        if block.caches_mask and chosen is None:
            block.mask = mask
        return torch.where(mask, 0.0, float("-inf"))[:, None]

    def _mask(self, block: QueryBlock, chosen: torch.Tensor | None) -> torch.Tensor:
        token = torch.arange(block.tokens.start, block.tokens.stop, device=self.tokens.own.device)
        seen = (token <= self.tokens.own[block.queries, None]) & (token >= self.tokens.first[block.queries, None])
        if self.entries is None:
            return seen
        entry = chosen
        if entry is None:
            entry = torch.arange(block.entries.start, block.entries.stop, device=seen.device)
        return torch.cat([seen, self.sees(block.queries, entry)], dim=1)

    def sees(self, queries: slice, entry: torch.Tensor) -> torch.Tensor:
        """Mask of the compressed entries that each query may see. `entry` has indices of entries: [entries] if they are
        the same for all queries, else [queries, entries].
        """
        assert self.entries is not None
        return (entry >= self.entries.first[queries, None]) & (entry < self.entries.end[queries, None])


class _Attention(torch.autograd.Function):
    """DeepSeek-V4's attention kernel. Keys are also the values, and the softmax has a sink.

    Inputs are query [tokens, heads, width], tokens [tokens, width], compressed entries [entries, width] and sinks
    [heads]. Outputs are [tokens, heads, width]; base-2 logarithms of the softmax's sums, [tokens, heads]; and the
    chosen entries of each block of queries. Query-key products are computed block by block, and recomputed in backward.
    Base 2 is used because exp2 is several times faster than exp on CPUs if many results are 0.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes its inputs by position
        ctx: Any,  # noqa: ANN401
        query: torch.Tensor,
        tokens: torch.Tensor,
        entries: torch.Tensor,
        sinks: torch.Tensor,
        visible: _VisibleKeys,
        scaling: float,
        outputs: KeptOutputs | None,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.visible, ctx.scaling = visible._replace(scored=None), scaling

        def attend() -> tuple[Any, ...]:
            wide = torch.promote_types(query.dtype, torch.float32)
            out, log_sum, chosen = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=wide), []
            for block in visible.blocks(query.shape[1]):
                chosen.append(visible.choose(block))
                keys = _Keys(tokens[block.tokens], entries, block.entries, chosen[-1])
                bias, at = visible.bias(block, chosen[-1]), block.queries
                out[at], log_sum[at] = _attend(query[at], keys, sinks, bias, scaling)
            return out, log_sum, tuple(chosen)

        out, log_sum, chosen = attend() if outputs is None else outputs.keep(attend)
        ctx.save_for_backward(query, tokens, entries, sinks, out, log_sum, *chosen)
        ctx.mark_non_differentiable(log_sum, *(each for each in chosen if each is not None))
        return (out, log_sum, *chosen)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        query, tokens, entries, sinks, out, log_sum, *chosen_of_blocks = ctx.saved_tensors
        d_query = torch.empty_like(query)
        d_tokens, d_entries = (torch.zeros_like(part, dtype=log_sum.dtype) for part in (tokens, entries))
        d_out = (grad.to(log_sum.dtype) * out).sum(-1)
        blocks = ctx.visible.blocks(query.shape[1])
        for block, chosen in zip(blocks, chosen_of_blocks, strict=True):
            at, keys = block.queries, _Keys(tokens[block.tokens], entries, block.entries, chosen)
            logits = torch.add(ctx.visible.bias(block, chosen), keys.products(query[at]), alpha=ctx.scaling * _LOG2_E)
            weights = logits.sub_(log_sum[at, :, None]).exp2_()
            d_logits = keys.products(grad[at]).to(weights.dtype).sub_(d_out[at, :, None])
            d_logits = d_logits.mul_(weights).mul_(ctx.scaling).to(query.dtype)
            d_query[at] = keys.sums(d_logits)
            for each, by in ((d_logits, query[at]), (weights.to(query.dtype), grad[at])):
                keys.add_gradients(each, by, d_tokens[block.tokens], d_entries)
        d_sinks = -((sinks.to(log_sum.dtype) * _LOG2_E - log_sum).exp2() * d_out).sum(0).to(sinks.dtype)
        return d_query, d_tokens.to(tokens.dtype), d_entries.to(entries.dtype), d_sinks, None, None, None


class _Keys:
    """Keys of one block of queries: tokens, and compressed entries (one range, or chosen for each query)."""

    def __init__(self, tokens: torch.Tensor, entries: torch.Tensor, among: slice, chosen: torch.Tensor | None) -> None:
        self._among, self._chosen, self._number = among, chosen, len(tokens)
        self._shared = tokens if chosen is not None else torch.cat([tokens, entries[among]])
        self._own = None if chosen is None else entries[chosen]

    def products(self, query: torch.Tensor) -> torch.Tensor:
        """Query-key products [queries, heads, keys] for queries [queries, heads, width]."""
        shared = query @ self._shared.T
        return shared if self._own is None else torch.cat([shared, query @ self._own.transpose(1, 2)], -1)

    def sums(self, weights: torch.Tensor) -> torch.Tensor:
        """Sums of the keys, weighted by attention `weights`: [queries, heads, width]."""
        if self._own is None:
            return weights @ self._shared
        return (weights[..., : self._number] @ self._shared).add_(weights[..., self._number :] @ self._own)

    def add_gradients(
        self, weights: torch.Tensor, query: torch.Tensor, d_tokens: torch.Tensor, d_entries: torch.Tensor
    ) -> None:
        if self._chosen is None:
            grad = weights.flatten(0, 1).T @ query.flatten(0, 1)
            d_tokens += grad[: self._number]
            d_entries[self._among] += grad[self._number :]
            return
        d_tokens += weights[..., : self._number].flatten(0, 1).T @ query.flatten(0, 1)
        own_grad = weights[..., self._number :].transpose(1, 2) @ query
        d_entries.index_add_(0, self._chosen.flatten(), own_grad.flatten(0, 1).to(d_entries.dtype))


@dataclass(frozen=True)
class _EntryWeights(IndexerTarget):
    """Target of an indexer's training: attention weights of compressed entries (softmax over tokens, entries and sink).

    `tensors` in its methods are query [tokens, heads, width], entries [entries, width], base-2 logarithms of the
    softmax's sums [tokens, heads], and the chosen entries of each block of queries.
    """

    visible: _VisibleKeys

    def blocks(self, index: ScoreInputs, tensors: Sequence[Any]) -> Iterator[KeyBlock]:
        heads = max(index.query.shape[1], tensors[0].shape[1])
        for block in self.visible.blocks(tensors[0].shape[1]):
            entries = block.entries.stop - block.entries.start
            size = max(1, PRODUCTS_AT_ONCE // (heads * max(1, entries)))
            for begin in range(block.queries.start, block.queries.stop, size):
                yield KeyBlock(slice(begin, min(begin + size, block.queries.stop)), block.entries)

    def weights(self, block: KeyBlock, tensors: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        query, entries, log_sum, *chosen = tensors
        entry = torch.arange(block.keys.start, block.keys.stop, device=query.device)
        is_seen = self.visible.sees(block.queries, entry)
        starts = [query_block.queries.start for query_block in self.visible.blocks(query.shape[1])]
        number = bisect_right(starts, block.queries.start) - 1
        if (chosen_entries := chosen[number]) is not None:
            best = chosen_entries[block.queries.start - starts[number] :][: len(is_seen)] - block.keys.start
            is_seen = torch.zeros_like(is_seen).scatter_(1, best, value=True) & is_seen
        bias = torch.where(is_seen, 0.0, float("-inf"))[:, None]
        logits = torch.add(bias, query[block.queries] @ entries[block.keys].T, alpha=self.scaling * _LOG2_E)
        return logits.sub_(log_sum[block.queries, :, None]).exp2_().sum(dim=1), is_seen


def _attend(
    query: torch.Tensor, keys: _Keys, sinks: torch.Tensor, bias: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention to `keys` and sinks. Returns outputs, and base-2 logarithms of the softmax's denominators."""
    logits = torch.add(bias, keys.products(query), alpha=scaling * _LOG2_E)
    sinks = sinks.to(logits.dtype) * _LOG2_E
    most = torch.maximum(logits.amax(-1), sinks)
    weights = logits.sub_(most[..., None]).exp2_()
    total = weights.sum(-1) + (sinks - most).exp2()
    return keys.sums(weights.div_(total[..., None]).to(query.dtype)), most + total.log2()


def rotate_last_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_back: bool = False) -> torch.Tensor:
    """Rotate pairs of the last columns of `x` [rows, tokens, heads, width] by the rotary embedding, or back with
    `is_back` (transformers 5.23, deepseek_v4/modeling_deepseek_v4.py:335-357).
    """
    angles = torch.complex(cos.float(), (-sin if is_back else sin).float())[:, :, None]
    plain, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    turned = torch.view_as_real(torch.view_as_complex(turned.float().unflatten(-1, (-1, 2))) * angles).flatten(-2)
    return torch.cat([plain, turned.to(x.dtype)], -1)


class CompressorByDocument(nn.Module):
    """Mixin for DeepSeek-V4's compressors and indexer in transformers. It computes the compressed entries of each
    document, [entries, width], for all sequence parallel ranks.
    """

    compress_rate: int
    head_dim: int
    kv_proj: nn.Linear
    gate_proj: nn.Linear
    kv_norm: nn.Module
    position_bias: nn.Parameter
    rotary_emb: nn.Module
    rotate = staticmethod(rotate_last_pairs)
    indexer: "IndexerByDocument"
    chooses = False
    """Whether the indexer runs: it is trained, or documents may have more compressed entries than it chooses.
    All forwards use one value, because under ZeRO-3 all ranks must gather the indexer's parameters equally often.
    """

    def forward(self, hidden: torch.Tensor, *others: Any, rows: RowShards | None = None, sp_group: Any = None) -> Any:  # noqa: ANN401
        """Return compressed entries of `rows`, and `ScoreInputs`. Without `rows`, run transformers' forward."""
        if rows is None:
            return super().forward(hidden, *others)
        is_scored = self.chooses and hasattr(self, "indexer")
        scored = self.indexer(hidden, *others, rows=rows, sp_group=sp_group) if is_scored else None
        return self.entries(hidden, rows, sp_group), scored

    @property
    def series(self) -> int:
        """Number of windows of `compress_rate` tokens in a compressed entry: 2 if windows overlap, else 1."""
        return int(self.kv_proj.out_features) // self.head_dim

    def layout(self, rows: RowShards, device: torch.device) -> Entries:
        """Tokens that each compressed entry averages, and entries that each token sees, as index tensors."""
        return entries_of(rows, self.compress_rate, self.series * self.compress_rate - 1, device)

    def entries(
        self, hidden: torch.Tensor, rows: RowShards, sp_group: SequenceParallelGroup | None = None
    ) -> torch.Tensor:
        """Compute the compressed entries (transformers 5.23, deepseek_v4/modeling_deepseek_v4.py:411-433, 646-686)."""
        layout = self.layout(rows, hidden.device)
        value, gate = self.kv_proj(hidden), self.gate_proj(hidden)
        if sp_group is not None:
            before = self.series * self.compress_rate - 1
            value, gate = sp_group.with_tokens_before(torch.cat([value, gate], dim=-1), before).chunk(2, dim=-1)
        # With overlap an entry also averages the window before its own, which a document's first entry lacks.
        windows = [(layout.windows - self.compress_rate).clamp_min(0), layout.windows][-self.series :]
        values, gates = (part.flatten(0, 1).chunk(self.series, dim=-1) for part in (value, gate))
        value, gate = (
            torch.cat([part[at] for part, at in zip(parts, windows, strict=True)], dim=1) for parts in (values, gates)
        )
        bias = torch.cat(self.position_bias.chunk(self.series, dim=-1))
        # The gate of a compressor stays in fp32 after its position bias is added, as in transformers.
        gate = gate + bias.to(torch.promote_types(gate.dtype, torch.float32))
        if self.series > 1:
            is_absent = layout.is_first[:, None] & (torch.arange(len(bias), device=gate.device) < self.compress_rate)
            gate = gate.masked_fill(is_absent[..., None], float("-inf"))
        weight = gate.softmax(dim=1, dtype=torch.promote_types(gate.dtype, torch.float32)).to(value.dtype)
        entries = self.kv_norm((value * weight).sum(dim=1))
        cos, sin = self.rotary_emb(entries[None], position_ids=layout.positions[None], layer_type="compress")
        entries = self.rotate(entries[None, :, None], cos, sin)[:, :, 0]
        if sp_group is None:
            return entries[0]
        padded = functional.pad(entries, (0, 0, 0, max(layout.most, 1) - entries.shape[1]))
        return sp_group.gather_tokens(padded)[0].index_select(0, layout.order)


class IndexerByDocument(CompressorByDocument):
    """Mixin for DeepSeek-V4's indexer in transformers. The indexer's loss trains it and no other module."""

    q_b_proj: nn.Linear
    scorer: Any
    is_trained = False

    def forward(self, hidden: torch.Tensor, *others: Any, rows: RowShards | None = None, sp_group: Any = None) -> Any:  # noqa: ANN401
        """Return the tensors from which scores are computed. Without `rows`, run transformers' forward."""
        if rows is None:
            return super().forward(hidden, *others)
        hidden, (low_rank, positions) = hidden.detach(), others[:2]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.is_trained):
            query = self.q_b_proj(low_rank.detach()).unflatten(-1, (-1, self.head_dim))
            cos, sin = self.rotary_emb(hidden, position_ids=positions, layer_type="compress")
            query = self.rotate(query, cos, sin)
            weight = self.scorer.weights_proj(hidden).float() * self.scorer.weights_scaling
            return ScoreInputs(query.flatten(0, 1), self.entries(hidden, rows, sp_group), weight.flatten(0, 1))


class CompressedAttention(nn.Module):
    """Mixin for transformers' attention of DeepSeek-V4: adds attention within documents, and indexer training."""

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
    rotate = staticmethod(rotate_last_pairs)
    collector: DivergenceCollector | None = None
    """Receives the divergences of the layer's indexer. None if the layer has no trained indexer."""
    for_heads: Callable[[torch.Tensor], torch.Tensor] = staticmethod(lambda shared: shared)
    """Function applied to the keys that all heads share. Its backward sums gradients over tensor parallel ranks."""

    def forward(  # noqa: PLR0913 - transformers' interface
        self,
        hidden_states: torch.Tensor,
        position_embeddings: dict[str, tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        documents: tuple[Documents, ...] | None = None,
        sp_group: SequenceParallelGroup | None = None,
        **others: Any,  # noqa: ANN401 - a cache, and what other implementations take
    ) -> tuple[torch.Tensor, None]:
        """Attention of hidden states [batch, tokens, width]. Returns hidden states, and None for attention weights.
        With a cache transformers' own attention runs.
        """
        cached = take_cache(others)
        if not self.by_document or cached is not None:
            if self.by_document and attention_mask is None:
                attention_mask = self._cached_mask(hidden_states, cached)
            given = (position_embeddings, position_ids, attention_mask, cached)
            return super().forward(hidden_states, *given)  # type: ignore[no-any-return]
        check_arguments(self, others)
        assert attention_mask is None, "attention by document does not support masked tokens inside a row"
        rows, length = hidden_states.shape[:2]
        cos, sin = position_embeddings[self.rope_layer_type]
        low_rank = self.q_a_norm(self.q_a_proj(hidden_states))
        query = self.q_b_norm(self.q_b_proj(low_rank).unflatten(-1, (-1, self.head_dim)))
        tokens = self.kv_norm(self.kv_proj(hidden_states))[:, :, None]
        query, tokens = (self.rotate(part, cos, sin) for part in (query, tokens))
        sp, rank = (1, 0) if sp_group is None else (sp_group.size, sp_group.group_rank)
        shards = RowShards(documents or ((length * sp,),) * rows, sp, rank)
        if sp_group is not None:
            tokens = sp_group.with_tokens_before(tokens, self.sliding_window - 1)
        query, tokens = query.flatten(0, 1), tokens[:, :, 0].flatten(0, 1)
        window = tokens_of(shards, self.sliding_window, hidden_states.device)
        entries, visible = tokens[:0], _VisibleKeys(window, None, None, 0, 1.0)
        if self.compressor is not None:
            entries, scored = self.compressor(hidden_states, low_rank, position_ids, rows=shards, sp_group=sp_group)
            visible = visible._replace(entries=self.compressor.layout(shards, hidden_states.device))
            if scored is not None:
                indexer: Any = self.compressor.indexer
                visible = visible._replace(scored=scored, topk=indexer.index_topk, scale=indexer.scorer.softmax_scale)
        out = self._attend(query, self.for_heads(tokens), self.for_heads(entries), visible)
        out = self.rotate(out.unflatten(0, (rows, length)), cos, sin, is_back=True)
        out = out.reshape(rows, length, self.config.o_groups, -1)
        return self.o_b_proj(self.o_a_proj(out).flatten(2)), None

    def _attend(
        self, query: torch.Tensor, tokens: torch.Tensor, entries: torch.Tensor, visible: _VisibleKeys
    ) -> torch.Tensor:
        """Attention outputs [tokens, heads, width]. If the layer's indexer is trained, the collector gets the
        divergence of its scores from the attention weights of compressed entries.
        """
        scored, collector = visible.scored, self.collector
        if collector is not None and collector.attends_to_all:
            visible = visible._replace(scored=None, topk=0)
        out, *others = _Attention.apply(query, tokens, entries, self.sinks, visible, self.scaling, current_outputs())
        if collector is not None and collector.is_needed(in_training=self.training):
            assert scored is not None, self.layer_idx
            target = _EntryWeights(visible.scale, collector.groups, self.scaling, visible._replace(scored=None))
            collector.add(self.layer_idx, divergence_from(target, scored, query.detach(), entries.detach(), *others))
        return out  # type: ignore[no-any-return]

    def _cached_mask(self, hidden: torch.Tensor, cache: Any) -> torch.Tensor:  # noqa: ANN401 - transformers' Cache
        layer, number = cache.layers[self.layer_idx], hidden.shape[1]
        cached = layer.keys.shape[-2] if layer.is_initialized else 0
        distance = torch.arange(cached, cached + number)[:, None] - torch.arange(cached + number)
        seen = (distance >= 0) & (distance < self.sliding_window)
        mask = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, float("-inf"))
        return mask.to(hidden.device)[None, None]


def install_compressed_attention(lm: PreTrainedModel) -> None:
    """Make the attention of a DeepSeek-V4 model work within documents, in place. Other models are unchanged."""
    if not family_of(lm.config.model_type).compresses:
        return
    if lm.config.attention_dropout:
        raise ModelError(
            f"attention_dropout {lm.config.attention_dropout} of model_type `{lm.config.model_type}` is not supported",
            hint="set attention_dropout to 0 in config.json",
        )
    by_document = lm.config._attn_implementation == BY_DOCUMENT
    mixins = (CompressedAttention, CompressorByDocument, CompressorByDocument, IndexerByDocument)
    mixin_of: dict[type[nn.Module], type[nn.Module]] = dict(zip(compressed_classes(), mixins, strict=True))
    for module in lm.modules():
        mixin = mixin_of.get(type(module))
        if mixin is not None:
            replace_compressed(module, mixin)
        if mixin is CompressedAttention:
            # With a KV cache transformers' own attention runs. It reads this copy of the configuration: `eager`.
            module.config, module.by_document = copy(module.config), by_document
            if by_document:
                module.config._attn_implementation = "eager"
