"""DeepSeek sparse attention (DeepSeek-V3.2) within documents.

For each query an indexer scores the earlier tokens of its document, and the query attends to the `index_topk` best. In
documents of up to `index_topk` tokens it attends to all. So an indexer that is not trained runs only if documents may
be longer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.foreign.transformers_attention import attention_function, replace_forward, rotate, take_cache
from ds_finetune.model.attention.by_document import BY_DOCUMENT, ChosenTokens, Documents
from ds_finetune.model.parallel.rank_group import RankGroup
from ds_finetune.model.parallel.sequence import SequenceParallelGroup

SCORES_AT_ONCE = 2**27
"""Maximum number of an indexer's scores [heads, queries, keys] in memory at once: 0.5 GiB in fp32."""


class ScoreInputs(NamedTuple):
    """Queries, keys and head weights of an indexer. For a single document the tensors have no batch dimension."""

    query: torch.Tensor
    """Indexer queries [batch, tokens, heads, width]."""
    key: torch.Tensor
    """Indexer keys [batch, tokens, width]; with a cache there are more keys than queries."""
    weight: torch.Tensor
    """Weights of the indexer's heads, fp32 [batch, tokens, heads]."""


class KeyBlock(NamedTuple):
    """A block of queries, and the range of keys that they attend to."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class IndexerTarget(ABC):
    """The target of an indexer's training: the attention weights of its layer. Methods compute these from the
    attention's `tensors`, such as queries and keys.
    """

    scale: float
    """Factor by which the indexer's query-key products are multiplied."""
    groups: tuple[RankGroup, ...]
    """Process groups whose ranks have different heads, over which attention weights are summed."""
    scaling: float
    """Factor by which the query-key products of attention are multiplied."""

    @abstractmethod
    def blocks(self, index: ScoreInputs, tensors: Sequence[Any]) -> Iterator[KeyBlock]:
        """Split the queries into blocks that bound the memory of query-key products."""

    @abstractmethod
    def weights(self, block: KeyBlock, tensors: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention weights of a block's keys, fp32 [queries, keys], summed over this rank's heads, and a mask of the
        keys that each query sees, bool [queries, keys].
        """


def index_scores(part: ScoreInputs, scale: float) -> torch.Tensor:
    """Indexer scores of one document, fp32 [queries, keys]: sum over heads of w ReLU(q k) (DeepSeek-V3.2, eq. 1)."""
    scores = (part.query.float() @ part.key.float().T * scale).relu()
    return (part.weight[:, None] @ scores)[:, 0]


def divergences(
    scored: ScoreInputs,
    target: IndexerTarget,
    attention: tuple[torch.Tensor, torch.Tensor],
    *,
    documents: Sequence[Sequence[int]],
    chosen: Sequence[Sequence[torch.Tensor | None]] | None,
) -> torch.Tensor:
    """KL divergence D_KL(p || softmax(I)) of each query in nats, fp32 [batch, tokens]. p are attention weights. I are
    indexer scores, computed from `scored`, the only argument that gets a gradient.

    `attention` has queries and keys of this rank's heads, [batch, heads, tokens, width]. `documents` has the lengths of
    each row's documents. `chosen` has a mask of the keys that queries attend to for each document, bool [queries,
    keys]. None instead of a mask, or of all masks, means all earlier tokens.
    """
    rows = []
    for row, lengths in enumerate(documents):
        index = [part[row].split(tuple(lengths)) for part in scored]
        split = [part[row].detach().split(tuple(lengths), dim=1) for part in attention]
        masks = [None] * len(lengths) if chosen is None else chosen[row]
        parts = zip(*index, *split, masks, strict=True)
        rows.append(torch.cat([divergence_from(target, ScoreInputs(*part[:3]), *part[3:]) for part in parts]))
    return torch.stack(rows)


def divergence_from(target: IndexerTarget, scored: ScoreInputs, *tensors: torch.Tensor | None) -> torch.Tensor:
    """KL divergence D_KL(p || softmax(I)) of each query in nats, fp32 [queries]. `tensors` give the attention weights
    p, and `scored` the indexer scores I. Only `scored` gets a gradient.
    """
    return _Divergence.apply(target, *scored, *tensors)  # type: ignore[no-any-return]


class _Divergence(torch.autograd.Function):
    """Computes the divergences of indexers in blocks of queries. Backward recomputes the query-key products."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        target: IndexerTarget,
        index_query: torch.Tensor,
        index_key: torch.Tensor,
        index_weight: torch.Tensor,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(index_query, index_key, index_weight, *tensors)
        ctx.target = target
        index = ScoreInputs(index_query, index_key, index_weight)
        blocks = target.blocks(index, tensors)
        return torch.cat([_divergence(_block_of(index, block), target, block, tensors) for block in blocks])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        # Activation checkpointing does not allow a second read of `saved_tensors`.
        saved, target = ctx.saved_tensors, ctx.target
        index, tensors = ScoreInputs(*saved[:3]), saved[3:]
        index_grads = ScoreInputs(*(torch.zeros_like(tensor, dtype=torch.float32) for tensor in index))
        for block in target.blocks(index, tensors):
            with torch.enable_grad():
                leaves = ScoreInputs(*(tensor.detach().requires_grad_() for tensor in _block_of(index, block)))
                values = _divergence(leaves, target, block, tensors)
                grads = torch.autograd.grad(values, leaves, grad[block.queries])
            for total, block_grad in zip(_block_of(index_grads, block), grads, strict=True):
                total += block_grad
        d_index = (total.to(tensor.dtype) for total, tensor in zip(index_grads, index, strict=True))
        return (None, *d_index, *(None for _ in tensors))


def _block_of(index: ScoreInputs, block: KeyBlock) -> ScoreInputs:
    return ScoreInputs(index.query[block.queries], index.key[block.keys], index.weight[block.queries])


def _divergence(
    index: ScoreInputs, target: IndexerTarget, block: KeyBlock, tensors: tuple[torch.Tensor | None, ...]
) -> torch.Tensor:
    with torch.no_grad():
        weights, is_seen = target.weights(block, tensors)
        for group in target.groups:
            weights = group.all_reduce(weights)
        # If a query sees no key, its attention weights sum to 0 and must not be divided by the sum.
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    scores = index_scores(index, target.scale).masked_fill(~is_seen, float("-inf"))
    # For an unseen key, weight 0 times log-probability -inf would be NaN, so the log-probability is 0.
    logs = scores.log_softmax(dim=-1).masked_fill(~is_seen, 0.0)
    return (torch.xlogy(weights, weights) - weights * logs).sum(dim=-1)


class _DocumentWeights(IndexerTarget):
    """Target of an indexer's training within one document. `tensors` are query and key [heads, tokens, width] and a
    mask of chosen tokens, bool [tokens, tokens], or None for all earlier tokens.
    """

    def blocks(self, index: ScoreInputs, tensors: Sequence[Any]) -> Iterator[KeyBlock]:
        tokens, heads = len(index.query), max(index.query.shape[1], len(tensors[0]))
        at_once = max(1, SCORES_AT_ONCE // (tokens * heads))
        for begin in range(0, tokens, at_once):
            end = min(begin + at_once, tokens)
            yield KeyBlock(slice(begin, end), slice(0, end))

    def weights(self, block: KeyBlock, tensors: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, chosen = tensors
        if chosen is None:
            positions = torch.arange(block.keys.stop, device=query.device)
            is_seen = positions <= positions[block.queries, None]
        else:
            is_seen = chosen[block.queries, block.keys]
        logits = query[:, block.queries].float() @ key[:, block.keys].float().transpose(1, 2) * self.scaling
        return logits.masked_fill(~is_seen, float("-inf")).softmax(dim=-1).sum(dim=0), is_seen


class Choice(NamedTuple):
    """The tokens that a layer's indexer chose. Later layers without an indexer may use them too."""

    tokens: ChosenTokens | None
    """Masks of the chosen tokens; None if queries attend to all earlier tokens."""
    scored: ScoreInputs | None
    """The tensors from which the indexer's scores are computed, with a gradient; None if the indexer is not trained."""


class DivergenceCollector:
    """Collects, in a forward, how much the indexer scores of each layer diverge from its attention weights."""

    def __init__(self, groups: tuple[RankGroup, ...], *, attends_to_all: bool) -> None:
        self.groups = groups
        self.attends_to_all = attends_to_all
        """Whether queries attend to all earlier tokens, not to the chosen ones, as when only indexers are trained."""
        self.is_listening = False
        self.divergences: dict[int, torch.Tensor] = {}
        """Divergences of a forward's indexers in nats, fp32 [rows, tokens], by layer number."""

    def is_needed(self, *, in_training: bool) -> bool:
        """Whether a layer must compute its divergence: in a forward with loss, and when activation checkpointing
        recomputes this forward, because recomputation must save the same tensors.
        """
        return self.is_listening or (in_training and torch.is_grad_enabled())

    def add(self, layer: int, values: torch.Tensor) -> None:
        """Store the divergences of a layer, except during recomputation."""
        if self.is_listening:
            self.divergences[layer] = values


class IndexedAttention(nn.Module):
    """Mixin for transformers' latent attention with an indexer. It computes the same as transformers 5.23
    (deepseek_v32/modeling_deepseek_v32.py:410-480), but the indexer chooses tokens within documents, without a mask of
    the row.
    """

    config: PretrainedConfig
    layer_idx: int
    attention_dropout: float
    scaling: float
    o_proj: nn.Linear
    indexer: Any
    expand_kv: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    rotate = staticmethod(rotate)
    rotates_pairs: bool
    """Whether the indexer's rotary embedding rotates pairs of adjacent columns instead of the two halves."""
    chooses = False
    """Whether indexers run: they are trained, or documents of the run may exceed `index_topk`. All forwards use one
    value, because under ZeRO-3 all ranks must gather the indexer's parameters equally often.
    """
    returns_choice = False
    """Whether the forward also returns the chosen tokens, for later layers without an indexer."""
    collector: DivergenceCollector | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        *,
        prev_topk_indices: Choice | None = None,
        **others: Any,  # noqa: ANN401 - a cache, and what attention implementations take
    ) -> tuple[Any, ...]:
        """Attention of hidden states [batch, tokens, width]. Returns hidden states, None instead of weights and, with
        `returns_choice`, the chosen tokens. A layer without an indexer uses `prev_topk_indices` of an earlier layer.
        """
        cache: Any = take_cache(others)
        choice = prev_topk_indices
        low_rank, query, latent, rotary_key = _project(self, hidden_states, position_embeddings)
        if cache is not None:
            latent, rotary_key = cache.update(latent, rotary_key, self.layer_idx)
        is_by_document = self.config._attn_implementation == BY_DOCUMENT
        if self.indexer is not None and is_by_document and (self.chooses or cache is not None):
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.collector is not None):
                scored = _inputs_of_scores(self, hidden_states.detach(), low_rank.detach(), position_embeddings)
            if cache is not None:
                scored = scored._replace(key=cache.update_indexer(scored.key, self.layer_idx))
            if others.get("sp_group") is not None:
                scored = ScoreInputs(*map(others["sp_group"].gather_tokens, scored))
            is_warmup = self.collector is not None and self.collector.attends_to_all
            tokens = None if is_warmup else _choose(self, scored, others.get("documents"))
            choice = Choice(tokens, None if self.collector is None else scored)
        elif choice is None and cache is not None and latent.shape[2] > self.config.index_topk:
            raise ModelError(
                f"a text of {latent.shape[2]} tokens is longer than index_topk {self.config.index_topk}, and this "
                "layer got no chosen tokens from an indexer",
                hint="set model.attention: sdpa, and leave out parallel.pp",
            )
        key, value = self.expand_kv(latent, rotary_key)
        if self.collector is not None and cache is None and self.collector.is_needed(in_training=self.training):
            self.collector.add(self.layer_idx, self._divergences(choice, query, key, others))
        out, _ = attention_function(self.config._attn_implementation)(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **others | ({} if choice is None or choice.tokens is None else {"chosen": choice.tokens}),
        )
        outputs = self.o_proj(out.flatten(2)), None
        return (*outputs, choice) if self.returns_choice else outputs

    def _divergences(
        self, choice: Choice | None, query: torch.Tensor, key: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        """Divergence of indexer scores from attention weights in nats, for this rank's tokens, fp32 [rows, tokens]."""
        assert self.collector is not None
        assert choice is not None, self.layer_idx
        assert choice.scored is not None, self.layer_idx
        query, key = query.detach(), key.detach()
        sp_group: SequenceParallelGroup | None = others.get("sp_group")
        if sp_group is not None:
            query, key = sp_group.gather_tokens_scatter_heads(query, key)
        values = divergences(
            choice.scored,
            _DocumentWeights(self.config.index_head_dim**-0.5, self.collector.groups, self.scaling),
            (query, key),
            documents=others.get("documents") or ((query.shape[2],),) * len(query),
            chosen=choice.tokens,
        )
        return values if sp_group is None else sp_group.shard(values)


def _project(
    attention: Any,  # noqa: ANN401 - latent attention of transformers, mixed with IndexedAttention
    hidden: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project hidden states [batch, tokens, width] to low-rank queries [batch, tokens, rank], queries [batch, heads,
    tokens, width], latents [batch, 1, tokens, rank] and rotary keys [batch, 1, tokens, rotary width].
    """
    nope, rope = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    low_rank = attention.q_a_layernorm(attention.q_a_proj(hidden))
    query = attention.q_b_proj(low_rank).unflatten(-1, (-1, nope + rope)).transpose(1, 2)
    plain, rotated = query.split([nope, rope], dim=-1)
    latent, rotary_key = attention.kv_a_proj_with_mqa(hidden).split([attention.kv_lora_rank, rope], dim=-1)
    rotated, rotary_key = attention.rotate("pairs", rotated, rotary_key[:, None], *position_embeddings)
    return low_rank, torch.cat([plain, rotated], dim=-1), attention.kv_a_layernorm(latent)[:, None], rotary_key


def _inputs_of_scores(
    attention: IndexedAttention,
    hidden: torch.Tensor,
    low_rank: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> ScoreInputs:
    """Queries, keys and head weights of an indexer, as transformers 5.23 computes them
    (deepseek_v32/modeling_deepseek_v32.py:212-235). In glm_moe_dsa the rotary embedding rotates adjacent columns.
    """
    indexer, rope = attention.indexer, attention.indexer.qk_rope_head_dim
    query = indexer.wq_b(low_rank).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    kind, query_and_key = "pairs" if attention.rotates_pairs else "halves", (query, key)
    rotated = attention.rotate(
        kind, *(each[..., :rope].transpose(1, 2) for each in query_and_key), *position_embeddings
    )
    query, key = (
        torch.cat([part.transpose(1, 2), original[..., rope:]], dim=-1)
        for part, original in zip(rotated, query_and_key, strict=True)
    )
    weight = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5
    return ScoreInputs(query, key[:, :, 0], weight)


@torch.no_grad()
def _choose(
    attention: IndexedAttention, scored: ScoreInputs, documents: tuple[Documents, ...] | None
) -> ChosenTokens | None:
    """Masks of the keys that each query attends to, by row and document. A mask is None for a document of at most
    `index_topk` tokens; the result is None if all documents are that short.
    """
    if documents is None:
        documents = ((scored.key.shape[1],),) * len(scored.key)
    limit, scale = attention.config.index_topk, attention.indexer.softmax_scale
    if all(length <= limit for row in documents for length in row):
        return None
    chosen = []
    for row, lengths in enumerate(documents):
        # With a KV cache each row is one document, and queries are its last tokens.
        is_last = scored.query.shape[1] < sum(lengths)
        parts = [part[row].split(lengths) if not is_last else (part[row],) for part in scored]
        chosen.append(
            tuple(
                None if len(document.key) <= limit else _best(document, limit, scale)
                for document in map(ScoreInputs._make, zip(*parts, strict=True))
            )
        )
    return tuple(chosen)


def _best(document: ScoreInputs, limit: int, scale: float) -> torch.Tensor:
    """Mask of each query's `limit` best keys among itself and earlier tokens, bool [queries, keys]."""
    queries, keys = len(document.query), len(document.key)
    positions = torch.arange(keys, device=document.key.device)
    is_chosen = torch.zeros(queries, keys, dtype=torch.bool, device=document.key.device)
    at_once = max(1, SCORES_AT_ONCE // (keys * document.query.shape[1]))
    for begin in range(0, queries, at_once):
        part = slice(begin, begin + at_once)
        index = index_scores(ScoreInputs(document.query[part], document.key, document.weight[part]), scale)
        is_later = positions > positions[keys - queries :][part, None]
        best = index.masked_fill(is_later, float("-inf")).topk(min(limit, keys)).indices
        is_chosen[part] = is_chosen[part].scatter(1, best, value=True) & ~is_later
    return is_chosen


def install_indexed_attention(lm: PreTrainedModel) -> None:
    """Make latent attention with an indexer work within documents, in place. Models without indexers are unchanged."""
    indexer = family_of(lm.config.model_type).indexer
    if indexer is None or indexer.chooses_entries:
        return
    for name, module in lm.named_modules():
        if name.endswith(".self_attn"):
            replace_forward(module, IndexedAttention)
            attention: Any = module
            attention.rotates_pairs, attention.returns_choice = indexer.rotates_pairs, indexer.is_shared


def expect_documents(lm: PreTrainedModel, *, longest: int) -> None:
    """Turn on the model's indexers, in place, if they choose fewer tokens than the `longest` document has."""
    limit = longest_document(lm.config)
    if limit is None or longest <= limit:
        return
    for module in lm.modules():
        if hasattr(module, "chooses"):
            module.chooses = True


def train_indexers(lm: PreTrainedModel, collector: DivergenceCollector) -> list[tuple[int, bool]]:
    """Make attention layers report the divergences of their indexers to `collector`, in place. Returns (layer number,
    whether the layer has an indexer of its own) for the layers of this rank.
    """
    trained = []
    for module in lm.modules():
        if isinstance(module, IndexedAttention):
            module.chooses, module.collector = True, collector
            trained.append((module.layer_idx, module.indexer is not None))
        elif (indexer := getattr(getattr(module, "compressor", None), "indexer", None)) is not None:
            # DeepSeek-V4's attention has its indexer in a compressor (model/attention/compressed_attention.py).
            module.collector, module.compressor.chooses, indexer.is_trained = collector, True, True
            trained.append((module.layer_idx, True))
    return trained


def longest_document(hf_config: PretrainedConfig) -> int | None:
    """Length up to which indexers choose all tokens of a document; None for a model without indexers."""
    indexer = family_of(hf_config.model_type).indexer
    return None if indexer is None else indexer.longest_document(hf_config.to_dict())
