"""Tensor parallelism: attention heads, MLP widths and the vocabulary are sharded over ranks that compute the same rows.

It follows Megatron-LM (Shoeybi et al., arXiv 1909.08053). In multi-head latent attention all heads share a rotary key.
Its gradient is summed over ranks, unlike in DeepSpeed 0.19.8's AutoTP.
"""

import copy
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of
from ds_finetune.model.experts import restore_full_tables
from ds_finetune.model.parallel.pipeline import ReceiveHiddenStates
from ds_finetune.model.parallel.rank_group import RankGroup, sum_over_ranks

_ATTENTION, _MLP = "self_attn", "mlp"
_SHARDED_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
    "o_groups",
)


class TensorParallelGroup(RankGroup):
    """Ranks that have the shards of tensor parallel weights."""

    def all_reduce_argmax(self, values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Elementwise maximum of `values` over ranks, with its index (int64); of equal maxima, the smallest index."""
        maximum = values.detach().clone()
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self.group)
        first = torch.where(values == maximum, indices, torch.iinfo(torch.int64).max)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group)
        return maximum, first

    def broadcast_from_first(self, values: torch.Tensor) -> torch.Tensor:
        """Overwrite `values` with those of the group's first rank, and return them."""
        dist.broadcast(values, group=self.group, group_src=0)
        return values

    def all_gather_last_dim(self, shard: torch.Tensor) -> torch.Tensor:
        """All-gather a tensor that is sharded along its last dimension. The result has no gradient."""
        shards = [torch.empty_like(shard) for _ in range(self.size)]
        dist.all_gather(shards, shard.contiguous(), group=self.group)
        return torch.cat(shards, dim=-1)


class _CopyToTensorParallelRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicated: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:  # noqa: ANN401
        ctx.tp_group = tp_group
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return ctx.tp_group.all_reduce(grad), None


def copy_to_tensor_parallel_region(replicated: torch.Tensor, tp_group: TensorParallelGroup) -> torch.Tensor:
    """Pass an input, which is equal on all ranks, to sharded weights. Backward sums its gradient over ranks."""
    return _CopyToTensorParallelRegion.apply(replicated, tp_group)  # type: ignore[no-any-return]


class ParallelLinear(nn.Linear):
    """Linear module with this rank's shard of the weight. `forward` multiplies and communicates."""

    tp_group: TensorParallelGroup

    def multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's matrix product, without communication."""
        raise NotImplementedError


class RowParallelLinear(ParallelLinear):
    """Linear module sharded along its input. The bias is replicated, and added after the all-reduce."""

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        """Map this rank's input [..., input / ranks] to the output [..., output], which is equal on all ranks."""
        out = sum_over_ranks(self.multiply(shard), self.tp_group)
        return out if self.bias is None else out + self.bias

    def multiply(self, shard: torch.Tensor) -> torch.Tensor:
        """This rank's summand of the output, without bias, from its input [..., input / ranks]."""
        return functional.linear(shard, self.weight)


class ColumnParallelLinear(ParallelLinear):
    """Linear module sharded along its output. Its input is equal on all ranks."""

    def forward(self, replicated: torch.Tensor) -> torch.Tensor:
        """Map an input [..., input], equal on all ranks, to this rank's output, [..., output / ranks]."""
        return self.multiply(copy_to_tensor_parallel_region(replicated, self.tp_group))

    def multiply(self, copied: torch.Tensor) -> torch.Tensor:
        """Multiply with this rank's shard of the weight. The input has passed `copy_to_tensor_parallel_region`."""
        return nn.Linear.forward(self, copied)


class BiasedExperts(nn.Module):
    """Mixin for sharded experts with biases. The output bias is replicated. Each rank adds the bias divided by the
    number of ranks, so that the all-reduce adds the full bias.
    """

    tp_group: TensorParallelGroup

    @property
    def down_proj_bias(self) -> torch.Tensor:
        """The output bias divided by the number of ranks, [experts, width]. Backward sums its gradient over ranks."""
        bias = self._parameters["down_proj_bias"]
        assert bias is not None
        return copy_to_tensor_parallel_region(bias, self.tp_group) / self.tp_group.size


class VocabParallelEmbedding(nn.Embedding):
    """Embedding sharded along the vocabulary. Each rank embeds ids of other ranks' shards as zeros, and an all-reduce
    adds up the results. `padding_idx` is an id of the full vocabulary.
    """

    tp_group: TensorParallelGroup

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed ids of the full vocabulary [...] as [..., width], equal on all ranks."""
        start = self.tp_group.group_rank * self.num_embeddings
        local_ids = input_ids - start
        is_local = (local_ids >= 0) & (local_ids < self.num_embeddings)
        pad = self.padding_idx - start if self.padding_idx is not None else -1
        embedded = functional.embedding(
            local_ids.where(is_local, 0), self.weight, pad if 0 <= pad < self.num_embeddings else None
        )
        out = sum_over_ranks(embedded * is_local[..., None], self.tp_group)
        # Gemma's embedding multiplies its output by this buffer.
        scale: torch.Tensor | None = getattr(self, "embed_scale", None)
        return out if scale is None else out * scale.to(out.dtype)


class ReceiveOrEmbed(ReceiveHiddenStates):
    """Replaces the embedding on later pipeline stages. If a stage keeps the weight, it keeps a vocabulary shard."""

    tp_group: TensorParallelGroup

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed tokens by the embedding weight on this stage. The result is equal on all tensor parallel ranks."""
        return VocabParallelEmbedding.forward(cast("VocabParallelEmbedding", self), input_ids)


class NormOverShards(nn.Module):
    """RMSNorm over sharded columns. The weight is replicated, but its gradient covers this rank's columns only."""

    tp_group: TensorParallelGroup
    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        """Normalise this rank's columns [..., columns / ranks] by the mean square of all ranks' columns."""
        wide, width = shard.float(), shard.shape[-1]
        squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), self.tp_group)
        # All ranks' outputs depend on this sum of squares, so its gradient must be summed over ranks.
        mean = copy_to_tensor_parallel_region(squares, self.tp_group) / (width * self.tp_group.size)
        start = self.tp_group.group_rank * width
        normed = wide * torch.rsqrt(mean + self.variance_epsilon)
        return self.weight[start : start + width] * normed.to(shard.dtype)


def local_config(hf_config: PretrainedConfig, tp_size: int) -> PretrainedConfig:
    """Configuration with which transformers builds one tensor parallel shard of a model."""
    config = copy.deepcopy(hf_config)
    if tp_size == 1:
        return config
    if hasattr(config, "num_key_value_heads") and not hasattr(config, "kv_lora_rank"):
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _SHARDED_SIZES:
        # Aliases in `attribute_map` must not be divided twice. A single key-value head is replicated.
        if name not in config.attribute_map and (getattr(config, name, None) or 0) > 1:
            setattr(config, name, getattr(config, name) // tp_size)
    config.pad_token_id = None
    return config


def install_tensor_parallel(lm: PreTrainedModel, tp_group: TensorParallelGroup, *, padding_idx: int | None) -> None:
    """Make the modules of a model built from `local_config` communicate with other tensor parallel ranks, in place.

    `padding_idx` is the embedding's padding id in the full vocabulary.
    """
    embedding = lm.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), type(embedding)
    embedding.padding_idx = padding_idx
    is_later_stage = isinstance(embedding, ReceiveHiddenStates)
    restore_full_tables(lm, embedding.num_embeddings * tp_group.size)
    _change_class(embedding, ReceiveOrEmbed if is_later_stage else VocabParallelEmbedding, tp_group)
    for name, module in lm.named_modules():
        kind = name.rpartition(".")[2]
        if kind == _ATTENTION:
            install_tensor_parallel_attention(module, tp_group, family=family_of(lm.config.model_type))
        elif kind == _MLP:
            install_tensor_parallel_mlp(module, tp_group)


def _change_class(module: nn.Module, parallel_class: type[nn.Module], tp_group: TensorParallelGroup) -> None:
    module.__class__ = parallel_class
    module.tp_group = tp_group  # type: ignore[assignment]


def install_tensor_parallel_attention(attention: Any, tp_group: TensorParallelGroup, *, family: Family) -> None:  # noqa: ANN401 - an attention module of any family
    """Add tensor parallel communication to an attention module that has a shard of the heads, in place."""
    if family.compresses:
        # The key-value head and compressed entries are replicated, and `for_heads` sums their gradients over ranks.
        _change_class(attention.q_b_proj, ColumnParallelLinear, tp_group)
        _change_class(attention.o_b_proj, RowParallelLinear, tp_group)
        attention.for_heads = partial(copy_to_tensor_parallel_region, tp_group=tp_group)
        return
    _change_class(attention.o_proj, RowParallelLinear, tp_group)
    if not hasattr(attention, "kv_a_proj_with_mqa"):

        def copy_hidden_states(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if "hidden_states" in kwargs:
                copied = copy_to_tensor_parallel_region(kwargs["hidden_states"], tp_group)
                return args, kwargs | {"hidden_states": copied}
            return (copy_to_tensor_parallel_region(args[0], tp_group), *args[1:]), kwargs

        attention.register_forward_pre_hook(copy_hidden_states, with_kwargs=True)
        for name in ("q", "k"):
            norm = getattr(attention, f"{name}_norm", None)
            if norm is not None and family.normalises_over_heads:
                _change_class(norm, NormOverShards, tp_group)
                # MiniMax M2 builds the norm for this rank's heads only (minimax_m2/modeling_minimax_m2.py:292).
                width = getattr(attention, f"{name}_proj").out_features * tp_group.size
                norm.weight = nn.Parameter(norm.weight.new_ones(width), requires_grad=norm.weight.requires_grad)
            if norm is not None and norm.weight.requires_grad:
                # A rank computes the replicated norm weight's gradient from its own heads, so gradients are summed.
                norm.weight.register_hook(tp_group.all_reduce)
        return
    query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
    for projection in (query, attention.kv_b_proj):
        _change_class(projection, ColumnParallelLinear, tp_group)
    rank = attention.kv_lora_rank

    def copy_rotary_key(_: nn.Module, __: Any, latents: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Mark the rotary key as an input of sharded heads. Latents need no mark, because their norm is replicated."""
        rotary_key = copy_to_tensor_parallel_region(latents[..., rank:], tp_group)
        return torch.cat([latents[..., :rank], rotary_key], dim=-1)

    attention.kv_a_proj_with_mqa.register_forward_hook(copy_rotary_key)


def install_tensor_parallel_mlp(mlp: Any, tp_group: TensorParallelGroup) -> None:  # noqa: ANN401 - an MLP or a mixture of experts of any family
    """Make an MLP or mixture of experts with a shard of the inner width communicate, in place."""

    def copy_input(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (copy_to_tensor_parallel_region(args[0], tp_group),)

    def copy_to_experts(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Mark hidden states and routing weights as inputs of sharded experts, so that backward sums their gradients
        over ranks. The router itself is replicated.
        """
        hidden, indices, weights = args
        return (
            copy_to_tensor_parallel_region(hidden, tp_group),
            indices,
            copy_to_tensor_parallel_region(weights, tp_group),
        )

    if not hasattr(mlp, "experts"):
        mlp.register_forward_pre_hook(copy_input)
        _change_class(mlp.down_proj, RowParallelLinear, tp_group)
        return
    mlp.experts.register_forward_pre_hook(copy_to_experts)
    if hasattr(mlp.experts, "down_proj_bias"):
        kind = type(mlp.experts)
        _change_class(mlp.experts, type(f"TensorParallel{kind.__name__}", (BiasedExperts, kind), {}), tp_group)
    if getattr(mlp, "shared_experts", None) is not None:
        assert mlp.shared_experts.down_proj.bias is None, "every rank would add the bias"
        mlp.shared_experts.register_forward_pre_hook(copy_input)

    def reduce_output(_: nn.Module, __: Any, out: Any) -> Any:  # noqa: ANN401 - some also return the router's scores
        if isinstance(out, tuple):
            return sum_over_ranks(out[0], tp_group), *out[1:]
        return sum_over_ranks(out, tp_group)

    mlp.register_forward_hook(reduce_output)
