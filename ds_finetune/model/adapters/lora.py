"""Modules of LoRA adapters (Hu et al., arXiv 2106.09685), and merging adapters into weights.

A frozen weight W [out, in] becomes W + alpha / rank x B A with A [rank, in] and B [out, rank]. Fused experts [experts,
out, in] have an A and a B per expert. Results equal those of peft 0.21; `export/adapter.py` writes peft's format.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from ds_finetune.config.sections import LoraConfig
from ds_finetune.families.family import Family
from ds_finetune.foreign.guard import replaced
from ds_finetune.model.build.skeleton import Where
from ds_finetune.model.experts import multiply, project, run_experts
from ds_finetune.model.parallel.expert import ExpertParallelExperts, MarkParameter
from ds_finetune.model.parallel.rank_group import RankGroup
from ds_finetune.model.parallel.sharding import UNSHARDED, ModelShard, TensorShard
from ds_finetune.model.parallel.tensor import ParallelLinear
from ds_finetune.model.quantised.four_bit import dtype_of, is_four_bit, shape_of
from ds_finetune.model.weights.load import seed_of
from ds_finetune.model.weights.names import weight_of
from ds_finetune.plan.lora_targets import ROUTED, ROUTER, LoraTarget, Shape, is_transposed

_CHUNK_NUMEL = 2**20


class _Adapted(nn.Module):
    lora_scale: float


class _LowRankLinear(_Adapted):
    lora_A: torch.Tensor  # noqa: N815 - peft's name
    lora_B: torch.Tensor  # noqa: N815

    lora_dropout: float
    lora_columns: tuple[int, int]
    """First input column of this rank's shard of the weight, and number of input columns of the full weight."""

    def _low_rank(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training and self.lora_dropout:
            # Each tensor parallel rank samples the mask for all columns and takes its own part, so that all ranks use
            # the same mask.
            start, columns = self.lora_columns
            mask = functional.dropout(hidden.new_ones(*hidden.shape[:-1], columns), self.lora_dropout)
            hidden = hidden * mask.narrow(-1, start, hidden.shape[-1])
        return functional.linear(functional.linear(hidden, self.lora_A), self.lora_B).mul_(self.lora_scale)


class _AdaptedLinear(_LowRankLinear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._low_rank(hidden).add_(super().forward(hidden))  # type: ignore[no-any-return]


class _AdaptedParallelLinear(_LowRankLinear):
    """A tensor parallel linear module with a LoRA adapter. One all-reduce sums the outputs of both."""

    def multiply(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._low_rank(hidden).add_(super().multiply(hidden))  # type: ignore[misc]


class _AdaptedRouter(_Adapted):
    weight: torch.Tensor
    lora_A: torch.Tensor  # noqa: N815 - peft's name
    lora_B: torch.Tensor  # noqa: N815

    def forward(self, *args: Any) -> Any:  # noqa: ANN401 - the family's own
        merged = self.weight + (self.lora_B @ self.lora_A) * self.lora_scale
        # An instance attribute `weight` hides the parameter of this name until it is deleted, because Python looks into
        # `__dict__` before it calls nn.Module.__getattr__, which finds parameters.
        self.__dict__["weight"] = merged
        try:
            return super().forward(*args)
        finally:
            del self.__dict__["weight"]


class _LowRankExperts(_Adapted):
    num_experts: int
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]

    def _run(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Run routed experts with adapters, which peft would merge into a copy of all experts in each forward."""
        return run_experts(self, hidden, top_k_index, top_k_weights, self._project)

    def _project(self, rows: torch.Tensor, ends: torch.Tensor, leaf: str) -> torch.Tensor:
        low = multiply(rows, getattr(self, f"{leaf}_lora_A"), ends)
        low = multiply(low, getattr(self, f"{leaf}_lora_B"), ends)
        # Adding in place avoids a third tensor as wide as gate and up projections together.
        return low.mul_(self.lora_scale).add_(project(self, rows, ends, leaf))  # type: ignore[no-any-return]


class _AdaptedExperts(_LowRankExperts):
    forward = _LowRankExperts._run


class _AdaptedLocalExperts(_LowRankExperts):
    run_experts = _LowRankExperts._run


def _adapted_class(module: nn.Module, kind: str) -> type[_Adapted]:
    if kind == ROUTER:
        return _AdaptedRouter
    if kind == ROUTED:
        return _AdaptedLocalExperts if isinstance(module, ExpertParallelExperts) else _AdaptedExperts
    return _AdaptedParallelLinear if isinstance(module, ParallelLinear) else _AdaptedLinear


@dataclass(frozen=True)
class AdapterPlacement:
    """How adapters' parameters are sharded: this rank's part in tensor and expert parallelism, and ZeRO's partition."""

    where: Where
    model_shard: ModelShard = UNSHARDED
    tp_group: RankGroup | None = None
    mark_expert: MarkParameter | None = None
    """Function that tells DeepSpeed that an adapter's parameter is sharded by expert parallelism."""
    partition: Callable[[list[nn.Parameter]], None] = lambda _: None
    """Function that partitions new parameters under ZeRO-3. The default does nothing."""

    def prepare(self, param: nn.Parameter, shard: TensorShard, *, weight_shard: TensorShard) -> None:
        """Mark an adapter's parameter, so that the right ranks sum its gradient and gradient norms count it once.

        `shard` is this rank's shard of the parameter, `weight_shard` its shard of the adapted weight.
        """
        # DeepSpeed 0.19.8 counts a parameter in gradient norms on each tensor parallel rank only if `model_parallel` is
        # true (runtime/utils.py:134).
        param.model_parallel = shard.dim is not None  # type: ignore[attr-defined]
        if shard.is_expert_parallel and self.mark_expert is not None:
            self.mark_expert(param)
        if self.tp_group is not None and weight_shard.dim is not None and shard.dim is None:
            # Each tensor parallel rank has a part of the gradient of a replicated factor A or B; the parts are summed.
            param.register_hook(self.tp_group.all_reduce)


Initial = Callable[[str, Shape], Mapping[str, torch.Tensor]]
"""Function from the name and shape of a weight to its initial adapter {"A": [..., rank, in], "B": [..., out, rank]}."""


def install_lora(  # noqa: PLR0913
    lm: PreTrainedModel,
    targets: Sequence[LoraTarget],
    lora: LoraConfig,
    *,
    seed: int,
    placement: AdapterPlacement,
    start: Initial | None = None,
) -> None:
    """Freeze `lm` and add adapters to its modules among `targets`, in the dtype of the adapted weights.

    `start` gives initial values. By default B is zero and A uniform within 1 / sqrt(in), as in peft (0.21,
    tuners/lora/layer.py, reset_lora_parameters), with a seed that depends on the weight's name.
    """
    lm.requires_grad_(False)
    modules, initial = dict(lm.named_modules()), start or partial(initial_factors, rank=lora.rank, seed=seed)
    for target in targets:
        if target.name in modules:
            _adapt(modules[target.name], target, lora, initial=initial, placement=placement)


def _adapt(
    module: Any,  # noqa: ANN401 - a module that can be adapted
    target: LoraTarget,
    lora: LoraConfig,
    *,
    initial: Initial,
    placement: AdapterPlacement,
) -> None:
    kind = type(module)
    module.__class__ = type(f"Adapted{kind.__name__}", (_adapted_class(module, target.kind), kind), {})
    module.lora_scale = lora.scale
    module.lora_dropout = lora.dropout
    new_parameters = []
    for leaf, shape in target.shapes.items():
        weight = module._parameters[leaf]
        local_shape = shape_of(weight) if is_four_bit(weight) else placement.where(weight).shape
        weight_shard = placement.model_shard.tensor_shard(f"{target.name}.{leaf}", local_shape)
        assert weight_shard.full_shape == shape, (target.name, leaf, weight_shard.full_shape, shape)
        if target.kind == ROUTED and module.is_transposed:
            local_shape, shape = ((*size[:-2], size[-1], size[-2]) for size in (local_shape, shape))
        for side, values in initial(f"{target.name}.{leaf}", shape).items():
            leaf_name = f"{'' if leaf == 'weight' else leaf + '_'}lora_{side}"
            name = f"{target.name}.{leaf_name}"
            *experts, out, width = local_shape
            local = (*experts, lora.rank, width) if side == "A" else (*experts, out, lora.rank)
            shard = placement.model_shard.tensor_shard(name, local)
            param = nn.Parameter(shard.slice(values).view(local).to(weight.device, dtype_of(weight)))
            placement.prepare(param, shard, weight_shard=weight_shard)
            if side == "A":
                module.lora_columns = shard.offsets[-1], shard.global_shape[-1]
            module.register_parameter(leaf_name, param)
            new_parameters.append(param)
    placement.partition(new_parameters)


def initial_factors(name: str, shape: Shape, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Initial adapter of the weight `name` in fp32: random A [..., rank, in] and zero B [..., out, rank]."""
    *experts, out, width = shape
    bound = width**-0.5
    generator = torch.Generator().manual_seed(seed_of(seed, f"{name}.lora_A"))
    return {
        "A": torch.empty(*experts, rank, width).uniform_(-bound, bound, generator=generator),
        "B": torch.zeros(*experts, out, rank),
    }


@contextmanager
def adapters_off(lm: nn.Module) -> Iterator[None]:
    """Context in which adapters have scale 0, so that `lm` computes exactly what it would without them.

    Adapter modules still run, so that ZeRO-3 gathers parameters in the usual order.
    """
    adapted = [module for module in lm.modules() if isinstance(module, _Adapted)]
    assert adapted, "the model has no adapters"
    with ExitStack() as stack:
        for module in adapted:
            stack.enter_context(replaced(module, "lora_scale", 0.0))
        yield


@dataclass(frozen=True)
class Factors:
    """The adapter of one weight: A [..., rank, in], B [..., out, rank] and the scale of B A."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def shape(self) -> Shape:
        """Shape of the adapted weight."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def as_stored(self, name: str, family: Family) -> Self:
        """The adapter of the weight `name` as checkpoints store it, with A and B swapped for a transposed weight."""
        return replace(self, a=self.b.mT, b=self.a.mT) if is_transposed(name, family) else self

    def delta(self, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened product scale * B A, fp32 [numel]."""
        rows, width = self.b.shape[-2], self.a.shape[-1]
        first, last = start // width, -(-(start + numel) // width)
        a, b = self.a.reshape(-1, *self.a.shape[-2:]), self.b.reshape(-1, *self.b.shape[-2:])
        parts = [
            b[expert, max(first - expert * rows, 0) : last - expert * rows].float() @ a[expert].float()
            for expert in range(first // rows, -(-last // rows))
        ]
        begin = start - first * width
        return torch.cat(parts).view(-1)[begin : begin + numel] * self.scale


def factors_of(adapters: Mapping[str, torch.Tensor], scale: float) -> dict[str, Factors]:
    """Collect the factors A and B of each weight, by the weight's name. `adapters` has factors by their own names."""
    sides = {weight_of(name): tensor for name, tensor in adapters.items()}
    return {
        weight: Factors(tensor, sides[weight, "B"], scale) for (weight, side), tensor in sides.items() if side == "A"
    }


def merge_adapters(
    tensors: Iterator[tuple[str, torch.Tensor | None]], factors: Mapping[str, Factors], family: Family
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the full CPU `tensors` of a model by name, with adapters added in fp32 and the sums rounded to the tensor's
    dtype. Only one merged tensor exists at a time.
    """
    for name, tensor in tensors:
        adapter = factors.get(name)
        # A local variable would keep the merged tensor in memory until the caller takes the next one.
        yield name, tensor if tensor is None or adapter is None else _sum(tensor, adapter.as_stored(name, family))


def _sum(tensor: torch.Tensor, adapter: Factors) -> torch.Tensor:
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    flat, source = out.view(-1), tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_NUMEL):
        part = source[start : start + _CHUNK_NUMEL]
        flat[start : start + len(part)] = part.float() + adapter.delta(start, len(part))
    return out
