"""Tensor parallelism: heads, inner widths and the vocabulary cut over ranks that work on the same rows.

Shoeybi et al., Megatron-LM (arXiv 1909.08053), and for multi-head latent attention its shared rotary key, whose
gradient has to be summed over the ranks that use it: DeepSpeed 0.19.8's AutoTP does not.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.model.parallel.pipeline import Received
from ds_finetune.model.parallel.rank_group import RankGroup

_ATTENTION, _MLP = "self_attn", "mlp"
_CUT_NUMBERS = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "vocab_size",
)


class TensorGroup(RankGroup):
    """Ranks that hold the parts of each tensor; rank i holds the i-th."""

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in a tensor of its own."""
        summed = part.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self.group)
        return summed

    def largest(self, values: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest of each value over ranks, and the first of the `places` (int64) that have it."""
        top = values.detach().clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self.group)
        first = torch.where(values == top, places, torch.iinfo(torch.int64).max)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self.group)
        return top, first

    def side_by_side(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks along the last dimension; no gradient."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


class _CopyIn(torch.autograd.Function):
    """What every rank goes on with in its own way: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:  # noqa: ANN401
        ctx.tensor = tensor
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return ctx.tensor.total(grad), None


class _SumOut(torch.autograd.Function):
    """The sum of what the ranks hold; each part's gradient is the sum's."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:  # noqa: ANN401
        return tensor.total(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return grad, None


def copy_in(given: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """Hand `given`, the same on every rank, to what is cut."""
    return _CopyIn.apply(given, tensor)  # type: ignore[no-any-return]


def sum_out(part: torch.Tensor, tensor: TensorGroup) -> torch.Tensor:
    """Take the sum of what is cut, the same on every rank."""
    return _SumOut.apply(part, tensor)  # type: ignore[no-any-return]


class RowLinear(nn.Linear):
    """A linear layer cut along its input; the bias is added to the sum."""

    tensor: TensorGroup

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's [..., input / ranks] -> [..., output], the same on every rank."""
        whole = sum_out(functional.linear(part, self.weight), self.tensor)
        return whole if self.bias is None else whole + self.bias


class ColumnLinear(nn.Linear):
    """A linear layer cut along its output, whose input every rank has."""

    tensor: TensorGroup

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """[..., input] -> this rank's [..., output / ranks]."""
        return super().forward(copy_in(given, self.tensor))


class VocabularyEmbedding(nn.Embedding):
    """An embedding cut along the vocabulary; rows of other ranks count as zeros in the sum. `padding_idx` is the whole
    model's.
    """

    tensor: TensorGroup

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids of the whole vocabulary [...] -> [..., width], the same on every rank."""
        start = self.tensor.place * self.num_embeddings
        local = input_ids - start
        is_here = (local >= 0) & (local < self.num_embeddings)
        pad = self.padding_idx - start if self.padding_idx is not None else -1
        found = functional.embedding(
            local.where(is_here, 0), self.weight, pad if 0 <= pad < self.num_embeddings else None
        )
        return sum_out(found * is_here[..., None], self.tensor)


def local_config(hf_config: PretrainedConfig, parts: int) -> PretrainedConfig:
    """The configuration from which transformers builds one of `parts` equal parts of a model."""
    config = copy.deepcopy(hf_config)
    if parts == 1:
        return config
    if hasattr(config, "num_key_value_heads") and not hasattr(config, "kv_lora_rank"):
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in _CUT_NUMBERS:
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name) // parts)
    config.pad_token_id = None
    return config


def install_tensor_parallel(lm: PreTrainedModel, tensor: TensorGroup, *, padding_idx: int | None) -> None:
    """Make the modules of a model built from `local_config` work together with those of the other ranks."""
    embedding = lm.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding), type(embedding)
    embedding.padding_idx = padding_idx
    if not isinstance(embedding, Received):
        _become(embedding, VocabularyEmbedding, tensor)
    for name, module in lm.named_modules():
        kind = name.rpartition(".")[2]
        if kind == _ATTENTION:
            _install_attention(module, tensor)
        elif kind == _MLP:
            _install_mlp(module, tensor)


def _become(module: nn.Module, kind: type[nn.Module], tensor: TensorGroup) -> None:
    module.__class__ = kind
    module.tensor = tensor  # type: ignore[assignment]


def _install_attention(attention: Any, tensor: TensorGroup) -> None:  # noqa: ANN401 - an attention module of any family
    _become(attention.o_proj, RowLinear, tensor)
    if not hasattr(attention, "kv_a_proj_with_mqa"):
        attention.register_forward_pre_hook(lambda _, args, kwargs: _copied(args, kwargs, tensor), with_kwargs=True)
        for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm")):
            if norm is not None and norm.weight.requires_grad:
                # Shared by all heads, of which this rank sees its own.
                norm.weight.register_hook(tensor.total)
        return
    for projection in (attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj, attention.kv_b_proj):
        _become(projection, ColumnLinear, tensor)
    rank = attention.kv_lora_rank

    def share_rotary_key(_: nn.Module, __: Any, latents: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Latents go through a normalisation that every rank has whole; the rotary key goes to the heads as it is."""
        return torch.cat([latents[..., :rank], copy_in(latents[..., rank:], tensor)], dim=-1)

    attention.kv_a_proj_with_mqa.register_forward_hook(share_rotary_key)


def _copied(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensor: TensorGroup
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": copy_in(kwargs["hidden_states"], tensor)}
    return (copy_in(args[0], tensor), *args[1:]), kwargs


def _install_mlp(mlp: Any, tensor: TensorGroup) -> None:  # noqa: ANN401 - an MLP or a mixture of experts of any family
    if not hasattr(mlp, "experts"):
        mlp.register_forward_pre_hook(lambda _, args: (copy_in(args[0], tensor),))
        _become(mlp.down_proj, RowLinear, tensor)
        return

    def copy_to_experts(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The router is whole on every rank; its weights meet this rank's share of each expert's output."""
        hidden, indices, weights = args
        return copy_in(hidden, tensor), indices, copy_in(weights, tensor)

    mlp.experts.register_forward_pre_hook(copy_to_experts)
    if getattr(mlp, "shared_experts", None) is not None:
        assert mlp.shared_experts.down_proj.bias is None, "a bias would be added on every rank"
        mlp.shared_experts.register_forward_pre_hook(lambda _, args: (copy_in(args[0], tensor),))
    # One sum for routed and shared experts.
    mlp.register_forward_hook(lambda _, __, out: sum_out(out, tensor))
