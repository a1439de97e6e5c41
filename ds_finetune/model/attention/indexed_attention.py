"""DeepSeek sparse attention (DeepSeek-V3.2) within documents.

An indexer scores the earlier tokens of a document for each query, and the query attends to the `index_topk` best. In a
document of at most `index_topk` tokens these are all tokens, so an indexer that is not trained only runs where a
document may be longer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
"""Bound on scores in memory at once, fp32 [heads, queries, keys]: 0.5 GiB."""


class ScoreInputs(NamedTuple):
    """Inputs of an indexer's scores. The tensors of a single document have no batch dimension."""

    query: torch.Tensor
    """Indexer queries [batch, tokens, heads, width]."""
    key: torch.Tensor
    """Indexer keys [batch, tokens, width]; with a cache there are more keys than queries."""
    weight: torch.Tensor
    """Weights of the indexer's heads, fp32 [batch, tokens, heads]."""


class KeyPart(NamedTuple):
    """A block of queries, and the range of keys that any of them may attend to."""

    queries: slice
    keys: slice


class FollowedWeights(Protocol):
    """Interface of an attention whose weights are the target distribution of an indexer. Its methods get the
    attention's tensors, such as queries and keys.
    """

    @property
    def scale(self) -> float:
        """Factor of the indexer's query-key products."""

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Groups of ranks that hold the layer's other heads."""

    def parts(self, index: ScoreInputs, tensors: Sequence[Any]) -> Iterator[KeyPart]:
        """Split all queries into blocks."""

    def weights(self, part: KeyPart, tensors: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention weights of a block's keys, fp32 [queries, keys], summed over this rank's heads. The second result
        is a mask of the keys that each query sees, bool [queries, keys].
        """


def index_scores(part: ScoreInputs, scale: float) -> torch.Tensor:
    """An indexer's score of each key for each query of one document, fp32 [queries, keys]: the sum over heads of
    w ReLU(q k) (DeepSeek-V3.2's report, eq. 1).
    """
    scores = (part.query.float() @ part.key.float().T * scale).relu()
    return (part.weight[:, None] @ scores)[:, 0]


def divergences(
    scored: ScoreInputs,
    followed: FollowedWeights,
    attention: tuple[torch.Tensor, torch.Tensor],
    *,
    documents: Sequence[Sequence[int]],
    chosen: Sequence[Sequence[torch.Tensor | None]] | None,
) -> torch.Tensor:
    """KL divergence D_KL(p || softmax(I)) of each query in nats, fp32 [batch, tokens], with attention weights p and
    indexer scores I. Only `scored` gets a gradient.

    `attention` has queries and keys of this rank's heads, [batch, heads, tokens, width]. `documents` are the lengths of
    the documents of each row. `chosen` are masks of the keys that queries attend to, bool [queries, keys] for each
    document. None, for one document or for all, means all earlier tokens.
    """
    rows = []
    for row, lengths in enumerate(documents):
        index = [part[row].split(tuple(lengths)) for part in scored]
        split = [part[row].detach().split(tuple(lengths), dim=1) for part in attention]
        masks = [None] * len(lengths) if chosen is None else chosen[row]
        parts = zip(*index, *split, masks, strict=True)
        rows.append(torch.cat([divergence_from(followed, ScoreInputs(*part[:3]), *part[3:]) for part in parts]))
    return torch.stack(rows)


def divergence_from(followed: FollowedWeights, scored: ScoreInputs, *tensors: torch.Tensor | None) -> torch.Tensor:
    """KL divergence D_KL(p || softmax(I)) of each query in nats, fp32 [queries]. p are the attention weights computed
    from `tensors`, normalised over keys, and I the indexer's scores. Only the scores' inputs `scored` get a gradient.
    """
    return _Divergence.apply(followed, *scored, *tensors)  # type: ignore[no-any-return]


class _Divergence(torch.autograd.Function):
    """Computes divergences in blocks of queries. Products of queries and keys are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        followed: FollowedWeights,
        index_query: torch.Tensor,
        index_key: torch.Tensor,
        index_weight: torch.Tensor,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(index_query, index_key, index_weight, *tensors)
        ctx.followed = followed
        index = ScoreInputs(index_query, index_key, index_weight)
        parts = followed.parts(index, tensors)
        return torch.cat([_divergence(_of_part(index, part), followed, part, tensors) for part in parts])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        # Saved tensors are read only once, because activation checkpointing allows no second read.
        saved, followed = ctx.saved_tensors, ctx.followed
        index, tensors = ScoreInputs(*saved[:3]), saved[3:]
        index_grads = ScoreInputs(*(torch.zeros_like(tensor, dtype=torch.float32) for tensor in index))
        for part in followed.parts(index, tensors):
            with torch.enable_grad():
                leaves = ScoreInputs(*(tensor.detach().requires_grad_() for tensor in _of_part(index, part)))
                values = _divergence(leaves, followed, part, tensors)
                grads = torch.autograd.grad(values, leaves, grad[part.queries])
            for total, of_part in zip(_of_part(index_grads, part), grads, strict=True):
                total += of_part
        of_index = (total.to(tensor.dtype) for total, tensor in zip(index_grads, index, strict=True))
        return (None, *of_index, *(None for _ in tensors))


def _of_part(index: ScoreInputs, part: KeyPart) -> ScoreInputs:
    return ScoreInputs(index.query[part.queries], index.key[part.keys], index.weight[part.queries])


def _divergence(
    index: ScoreInputs, followed: FollowedWeights, part: KeyPart, tensors: tuple[torch.Tensor | None, ...]
) -> torch.Tensor:
    """KL divergence of an indexer's scores from attention weights, for each query of a block, fp32 [queries]."""
    with torch.no_grad():
        weights, is_seen = followed.weights(part, tensors)
        for group in followed.groups:
            weights = group.all_reduce(weights)
        # A query without any visible key has weights that sum to 0, by which they must not be divided.
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    scores = index_scores(index, followed.scale).masked_fill(~is_seen, float("-inf"))
    # An invisible key has weight 0 and log-probability -inf. Their product is NaN, so the latter is set to 0.
    logs = scores.log_softmax(dim=-1).masked_fill(~is_seen, 0.0)
    return (torch.xlogy(weights, weights) - weights * logs).sum(dim=-1)


@dataclass(frozen=True)
class _DocumentWeights:
    """Attention weights within one document, as the target of an indexer. The tensors are query and key [heads, tokens,
    width] and a mask of chosen tokens, bool [tokens, tokens], or None for all earlier tokens.
    """

    scale: float
    groups: tuple[RankGroup, ...]
    scaling: float

    def parts(self, index: ScoreInputs, tensors: Sequence[Any]) -> Iterator[KeyPart]:
        tokens, heads = len(index.query), max(index.query.shape[1], len(tensors[0]))
        at_once = max(1, SCORES_AT_ONCE // (tokens * heads))
        for begin in range(0, tokens, at_once):
            end = min(begin + at_once, tokens)
            yield KeyPart(slice(begin, end), slice(0, end))

    def weights(self, part: KeyPart, tensors: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, chosen = tensors
        if chosen is None:
            positions = torch.arange(part.keys.stop, device=query.device)
            is_seen = positions <= positions[part.queries, None]
        else:
            is_seen = chosen[part.queries, part.keys]
        logits = query[:, part.queries].float() @ key[:, part.keys].float().transpose(1, 2) * self.scaling
        return logits.masked_fill(~is_seen, float("-inf")).softmax(dim=-1).sum(dim=0), is_seen


class Choice(NamedTuple):
    """Tokens that a layer's indexer chose, which later layers without an indexer may use too."""

    tokens: ChosenTokens | None
    """The chosen tokens; None where queries attend to all earlier tokens."""
    scored: ScoreInputs | None
    """Inputs of the indexer's scores, with a gradient; None where the indexer is not trained."""


class DivergenceCollector:
    """Collects, for each layer of a forward, the divergence of the indexer's scores from the attention weights."""

    def __init__(self, groups: tuple[RankGroup, ...], *, attends_to_all: bool) -> None:
        self.groups = groups
        self.attends_to_all = attends_to_all
        """Whether queries attend to all earlier tokens instead of the chosen ones."""
        self.is_listening = False
        self.divergences: dict[int, torch.Tensor] = {}
        """Divergence of each query in nats, fp32 [rows, tokens], by number of the layer."""

    def is_needed(self, *, in_training: bool) -> bool:
        """Whether a layer must compute its divergence: in forwards of the loss, and where activation checkpointing
        recomputes such a forward in backward, since recomputation must save the same tensors.
        """
        return self.is_listening or (in_training and torch.is_grad_enabled())

    def add(self, layer: int, values: torch.Tensor) -> None:
        """Store the divergences of a layer, except during recomputation."""
        if self.is_listening:
            self.divergences[layer] = values


class IndexedAttention(nn.Module):
    """Mixin for a family's latent attention. It computes what transformers 5.23 does
    (deepseek_v32/modeling_deepseek_v32.py:410-480), but chooses tokens within each document instead of using a mask
    over the row.
    """

    config: PretrainedConfig
    layer_idx: int
    attention_dropout: float
    scaling: float
    o_proj: nn.Linear
    indexer: Any
    expand_kv: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    rotate = staticmethod(rotate)
    """Applies the rotary embedding to queries and keys."""
    rotates_pairs: bool
    """Whether the indexer's rotary embedding rotates pairs of neighbouring columns instead of the two halves."""
    chooses = False
    """Whether indexers run, because they are trained or documents may be longer than `index_topk`. This does not depend
    on the documents of one forward, since under ZeRO-3 every rank must gather the indexer's parameters equally often.
    """
    collector: DivergenceCollector | None = None
    """Collects the loss of trained indexers. None where indexers are not trained."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        **others: Any,  # noqa: ANN401 - a cache, and what attention implementations take
    ) -> tuple[Any, ...]:
        """Map hidden states [batch, tokens, width] to hidden states and, in place of attention weights, None."""
        out, _ = self._attend(hidden_states, position_embeddings, attention_mask, None, others)
        return out, None

    def _attend(
        self,
        hidden: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        choice: Choice | None,
        others: dict[str, Any],
    ) -> tuple[torch.Tensor, Choice | None]:
        """Return hidden states after attention, and the choice of tokens. A layer without an indexer uses `choice`,
        which comes from an earlier layer.
        """
        cache: Any = take_cache(others)
        low_rank, query, latent, rotary_key = _project(self, hidden, position_embeddings)
        if cache is not None:
            latent, rotary_key = cache.update(latent, rotary_key, self.layer_idx)
        is_by_document = self.config._attn_implementation == BY_DOCUMENT
        if self.indexer is not None and is_by_document and (self.chooses or cache is not None):
            scored = _score_inputs(self, hidden, low_rank, position_embeddings)
            if cache is not None:
                scored = scored._replace(key=cache.update_indexer(scored.key, self.layer_idx))
            if others.get("sp_group") is not None:
                scored = ScoreInputs(*map(others["sp_group"].gather_tokens, scored))
            choice = self._choice(scored, others.get("documents"))
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
        return self.o_proj(out.flatten(2)), choice

    def _choice(self, scored: ScoreInputs, documents: tuple[Documents, ...] | None) -> Choice:
        if self.collector is None:
            return Choice(_choose(self, scored, documents), None)
        return Choice(None if self.collector.attends_to_all else _choose(self, scored, documents), scored)

    def _divergences(
        self, choice: Choice | None, query: torch.Tensor, key: torch.Tensor, others: dict[str, Any]
    ) -> torch.Tensor:
        """Divergence of the indexer's scores from attention in nats, for this rank's tokens, fp32 [rows, tokens]."""
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


class IndexedAttentionWithChoice(IndexedAttention):
    """Indexed attention that also returns its choice of tokens, for layers that share it."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        *,
        prev_topk_indices: Choice | None = None,
        **others: Any,  # noqa: ANN401
    ) -> tuple[Any, ...]:
        """Return hidden states, None for the attention weights, and the choice of tokens (None without an indexer)."""
        out, choice = self._attend(hidden_states, position_embeddings, attention_mask, prev_topk_indices, others)
        return out, None, choice


def _project(
    attention: Any,  # noqa: ANN401 - latent attention of transformers, mixed with IndexedAttention
    hidden: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Project hidden states [batch, tokens, width] to low-rank queries [batch, tokens, rank], queries [batch, heads,
    tokens, width], latents [batch, 1, tokens, rank] and rotated keys [batch, 1, tokens, rotary width].
    """
    nope, rope = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    low_rank = attention.q_a_layernorm(attention.q_a_proj(hidden))
    query = attention.q_b_proj(low_rank).unflatten(-1, (-1, nope + rope)).transpose(1, 2)
    plain, rotated = query.split([nope, rope], dim=-1)
    latent, rotary_key = attention.kv_a_proj_with_mqa(hidden).split([attention.kv_lora_rank, rope], dim=-1)
    rotated, rotary_key = attention.rotate("pairs", rotated, rotary_key[:, None], *position_embeddings)
    return low_rank, torch.cat([plain, rotated], dim=-1), attention.kv_a_layernorm(latent)[:, None], rotary_key


def _score_inputs(
    attention: IndexedAttention,
    hidden: torch.Tensor,
    low_rank: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> ScoreInputs:
    with torch.set_grad_enabled(torch.is_grad_enabled() and attention.collector is not None):
        return _inputs_of_scores(attention, hidden.detach(), low_rank.detach(), position_embeddings)


def _inputs_of_scores(
    attention: IndexedAttention,
    hidden: torch.Tensor,
    low_rank: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> ScoreInputs:
    """Compute queries, keys and head weights of the indexer as transformers 5.23,
    deepseek_v32/modeling_deepseek_v32.py:212-235. In glm_moe_dsa the rotary embedding rotates pairs.
    """
    indexer, rope = attention.indexer, attention.indexer.qk_rope_head_dim
    query = indexer.wq_b(low_rank).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(hidden))[:, :, None]
    turn, query_and_key = "pairs" if attention.rotates_pairs else "halves", (query, key)
    rotated = attention.rotate(
        turn, *(each[..., :rope].transpose(1, 2) for each in query_and_key), *position_embeddings
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
    """Masks of the tokens that each query attends to, by row and document. The mask is None for a document of at most
    `index_topk` tokens; the result is None if all documents are that short.
    """
    if documents is None:
        documents = ((scored.key.shape[1],),) * len(scored.key)
    limit, scale = attention.config.index_topk, attention.indexer.softmax_scale
    if all(length <= limit for row in documents for length in row):
        return None
    chosen = []
    for row, lengths in enumerate(documents):
        # With a cache the queries are the last tokens of the row's only document.
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
    """Mask of the `limit` best keys of each query among itself and earlier tokens, bool [queries, keys]."""
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
    """Make attention with an indexer work by document, in place; models without indexers are unchanged."""
    indexer = family_of(lm.config.model_type).indexer
    if indexer is None or indexer.chooses_entries:
        return
    for name, module in lm.named_modules():
        if name.endswith(".self_attn"):
            replace_forward(module, IndexedAttentionWithChoice if indexer.is_shared else IndexedAttention)
            module.rotates_pairs = indexer.rotates_pairs  # type: ignore[assignment]


def expect_documents(lm: PreTrainedModel, *, longest: int) -> None:
    """Enable the model's indexers, in place, if documents of `longest` tokens are longer than what they choose."""
    limit = longest_document(lm.config)
    if limit is None or longest <= limit:
        return
    for module in lm.modules():
        if hasattr(module, "chooses"):
            module.chooses = True


def train_indexers(lm: PreTrainedModel, collector: DivergenceCollector) -> list[tuple[int, bool]]:
    """Make the attention of each layer report its divergences to `collector`, in place. Returns the numbers of the
    layers on this rank, and whether each has an indexer of its own.
    """
    trained = []
    for module in lm.modules():
        if isinstance(module, IndexedAttention):
            module.chooses, module.collector = True, collector
            trained.append((module.layer_idx, module.indexer is not None))
        elif (indexer := getattr(getattr(module, "compressor", None), "indexer", None)) is not None:
            # The module is the attention of DeepSeek-V4 (model/attention/compressed_attention.py).
            module.collector, module.compressor.chooses, indexer.is_trained = collector, True, True
            trained.append((module.layer_idx, True))
    return trained


def longest_document(hf_config: PretrainedConfig) -> int | None:
    """Maximum number of tokens of a document in which the indexer leaves out no token; None without a limit."""
    indexer = family_of(hf_config.model_type).indexer
    return None if indexer is None else indexer.longest_document(hf_config.to_dict())
