"""Low-rank adapters (Hu et al., LoRA, arXiv 2106.09685): which modules have them, how they compute, what they add to
weights.

A weight W [out, in] becomes W + alpha / rank x B A with A [rank, in] and B [out, rank]; fused experts [experts,
out, in] have an A and a B each. W is frozen. Everything is what peft 0.21 computes, and `export/adapter.py` writes
it in peft's format.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.moe import _grouped_linear

from ds_finetune.config.schema import LoraConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.model.build import Where
from ds_finetune.model.four_bit import dtype_of, fits_four_bit, is_four_bit, nf4_bytes, shape_of
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.model.weights import seed_of

ROUTED, ROUTER = "routed experts", "router"
_FOUR_BIT = ("attention", "dense MLP", "shared experts")
"""Kinds of modules whose weights `lora.quantize` holds in four bits."""
_KINDS = (
    ("attention", re.compile(r"\.self_attn\.\w+$"), ("weight",)),
    ("dense MLP", re.compile(r"\.mlp\.\w+_proj$"), ("weight",)),
    ("shared experts", re.compile(r"\.mlp\.shared_experts\.\w+_proj$"), ("weight",)),
    (ROUTED, re.compile(r"\.mlp\.experts$"), ("gate_up_proj", "down_proj")),
    (ROUTER, re.compile(r"\.mlp\.gate$"), ("weight",)),
)
"""Kinds of modules that can be adapted, by name, and their weights; embeddings, norms and the head are none of them."""
_ADAPTER = re.compile(r"^(?P<module>.+)\.((?P<leaf>\w+)_)?lora_(?P<side>[AB])$")
_ALIGNED = 8
"""Grouped products of experts take rows of a multiple of 16 bytes (torch 2.13, native/GroupedMMUtils.h)."""
_CHUNK_NUMEL = 2**20

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """A module that can be adapted: its full name, its kind, and the shapes of its weights by their names in it."""

    name: str
    kind: str
    shapes: Mapping[str, Shape]

    def num_params(self, rank: int) -> int:
        """Parameters of its adapters."""
        return sum(prod(shape[:-2]) * rank * (shape[-1] + shape[-2]) for shape in self.shapes.values())


def adaptable(lm: nn.Module) -> list[Target]:
    """Every module of a causal LM (whole, on any device) that can be adapted, in its order."""
    found = []
    for name, module in lm.named_modules():
        for kind, pattern, leaves in _KINDS:
            weights = [module._parameters.get(leaf) for leaf in leaves] if pattern.search(name) else []
            shapes = {
                leaf: tuple(weight.shape)
                for leaf, weight in zip(leaves, weights, strict=False)
                if weight is not None and weight.dim() > 1
            }
            if shapes:
                found.append(Target(name, kind, shapes))
    return found


def chosen_targets(hf_config: PretrainedConfig, lora: LoraConfig) -> list[Target]:
    """The modules of the model that `lora` adapts: those that its patterns name, or all but routers.

    ConfigError where a pattern names none (with the legal names), the model type is not compared, or experts are
    given a rank that grouped products cannot take.
    """
    if not family_of(hf_config.model_type).has_lora:
        tested = ", ".join(name for name, family in FAMILIES.items() if family.has_lora)
        raise ConfigError(f"lora of model_type {hf_config.model_type} is not tested", hint=f"tested: {tested}")
    every = adaptable(build_meta_model(hf_config))
    patterns = lora.target_modules
    named = {target.name for pattern in patterns or () for target in _named(pattern, every)}
    chosen = [target for target in every if (target.name in named if patterns else target.kind != ROUTER)]
    if lora.rank % _ALIGNED and any(target.kind == ROUTED for target in chosen):
        raise ConfigError(
            f"lora.rank {lora.rank} of routed experts is not a multiple of {_ALIGNED}",
            hint="take a multiple, or leave `experts` out of target_modules",
        )
    return chosen


def _named(pattern: str, every: Sequence[Target]) -> list[Target]:
    """Modules whose last name, or whole name, `pattern` is, or whose full name it matches; a router only by a pattern
    that ends in its own name.
    """
    exact = [target for target in every if pattern in (target.name, _last(target.name))]
    try:
        matched = [target for target in every if re.fullmatch(pattern, target.name)]
    except re.error as broken:
        raise ConfigError(
            f"lora.target_modules `{pattern}` is no regular expression: {broken}", hint="see Python's `re`"
        ) from broken
    names_router = _last(pattern.replace("\\.", ".")) == "gate"
    found = exact or [target for target in matched if target.kind != ROUTER or names_router]
    if not found:
        names = sorted({_last(target.name) for target in every})
        raise ConfigError(
            f"lora.target_modules `{pattern}` matches no module that can be adapted",
            hint=f"name one of {', '.join(names)}, or give a regular expression on full names such as {every[0].name}",
        )
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def quantised_targets(hf_config: PretrainedConfig, lora: LoraConfig | None) -> list[Target]:
    """The modules whose frozen weights are held in four bits, adapted or not; none without `lora.quantize`.

    ConfigError where `lora` asks for it and there are none.
    """
    if lora is None or lora.quantize is None:
        return []
    every = [target for target in adaptable(build_meta_model(hf_config)) if target.kind in _FOUR_BIT]
    found = [target for target in every if all(map(fits_four_bit, target.shapes.values()))]
    if not found:
        raise ConfigError(
            f"lora.quantize {lora.quantize}: none of {len(every)} weights has rows of a multiple of 64 numbers, as "
            f"{every[0].name} "
            f"{every[0].shapes['weight']}",
            hint="leave lora.quantize out",
        )
    return found


def _quantised_line(hf_config: PretrainedConfig, lora: LoraConfig) -> tuple[str, str]:
    """What is held in four bits and in how many bytes, and what is not."""
    lm, targets = build_meta_model(hf_config), quantised_targets(hf_config, lora)
    shapes = [shape for target in targets for shape in target.shapes.values()]
    numel, size = sum(map(prod, shapes)), sum(map(nf4_bytes, shapes))
    every = adaptable(lm)
    routed = sum(prod(shape) for target in every if target.kind == ROUTED for shape in target.shapes.values())
    odd = sum(target.kind in _FOUR_BIT for target in every) - len(targets)
    text = (
        f"{len(shapes)} weights, {numel:,} parameters in {size:,} bytes: "
        f"{', '.join(dict.fromkeys(target.kind for target in targets))}"
    )
    rest = f"the other {lm.num_parameters() - numel:,} are in train.precision" + (
        f", {routed:,} of them routed experts'" if routed else ""
    )
    rest += f", and {odd} weights with rows of no multiple of 64" if odd else ""
    return f"  frozen in {lora.quantize}", f"{text}; {rest}"


def lora_lines(hf_config: PretrainedConfig, lora: LoraConfig | None) -> list[tuple[str, str]]:
    """What is adapted, kind by kind, as the plan announces it; nothing without `lora`."""
    if lora is None:
        return []
    chosen = chosen_targets(hf_config, lora)
    there, taken = (
        Counter(target.kind for target in targets) for targets in (adaptable(build_meta_model(hf_config)), chosen)
    )
    rows = [
        (
            "lora",
            f"rank {lora.rank}, alpha {lora.alpha:g}, {sum(t.num_params(lora.rank) for t in chosen):,} parameters "
            "are trained",
        )
    ]
    for kind in there:
        names = dict.fromkeys(_last(target.name) for target in chosen if target.kind == kind)
        numel = sum(target.num_params(lora.rank) for target in chosen if target.kind == kind)
        text = (
            f"{taken[kind]} of {there[kind]} modules, {numel:,} parameters: {', '.join(names)}"
            if names
            else f"none of {there[kind]} modules"
        )
        rows.append((f"  {kind}", text))
    return rows if lora.quantize is None else [*rows, _quantised_line(hf_config, lora)]


class _Adapted(nn.Module):
    """Mixed into a module that has adapters."""

    lora_scale: float


class _AdaptedLinear(_Adapted):
    lora_A: torch.Tensor  # noqa: N815 - peft's name
    lora_B: torch.Tensor  # noqa: N815

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        low = functional.linear(functional.linear(hidden, self.lora_A), self.lora_B)
        return super().forward(hidden) + low * self.lora_scale  # type: ignore[no-any-return]


class _AdaptedRouter(_Adapted):
    weight: torch.Tensor
    lora_A: torch.Tensor  # noqa: N815 - peft's name
    lora_B: torch.Tensor  # noqa: N815

    def forward(self, *args: Any) -> Any:  # noqa: ANN401 - the family's own
        """The family's own forward, which reads `self.weight`; it is small enough to be merged each time."""
        merged = self.weight + (self.lora_B @ self.lora_A) * self.lora_scale
        # Found before the parameter of that name, which nn.Module gives only where there is no such attribute.
        self.__dict__["weight"] = merged
        try:
            return super().forward(*args)
        finally:
            del self.__dict__["weight"]


class _AdaptedExperts(_Adapted):
    num_experts: int
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[tokens, width], chosen experts [tokens, k] and their weights -> [tokens, width].

        As transformers 5.23 computes it (integrations/moe.py, grouped_mm_experts_forward). peft merges a copy of
        all experts in each forward instead, and needs a gradient of that size.
        """
        tokens, chosen = top_k_index.shape
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        ends = torch.bincount(experts, minlength=self.num_experts).cumsum(0, dtype=torch.int32)
        inner = self._apply_gate(self._projected(hidden[order // chosen], ends, "gate_up_proj"))
        out = self._projected(inner, ends, "down_proj") * top_k_weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return out[back].view(tokens, chosen, -1).sum(1).to(hidden.dtype)

    def _projected(self, rows: torch.Tensor, ends: torch.Tensor, leaf: str) -> torch.Tensor:
        """`rows` [rows, in], sorted by expert and ending at `ends`, through each expert's weight `leaf` and its
        adapter.
        """
        low = _grouped_linear(rows, getattr(self, f"{leaf}_lora_A"), ends)
        low = _grouped_linear(low, getattr(self, f"{leaf}_lora_B"), ends)
        return _grouped_linear(rows, getattr(self, leaf), ends) + low * self.lora_scale  # type: ignore[no-any-return]


_CLASSES: Mapping[str, type[_Adapted]] = {ROUTED: _AdaptedExperts, ROUTER: _AdaptedRouter}


def install_lora(  # noqa: PLR0913
    lm: PreTrainedModel,
    targets: Sequence[Target],
    lora: LoraConfig,
    *,
    seed: int,
    where: Where,
    share: Callable[[list[nn.Parameter]], None],
) -> None:
    """Freeze `lm` and give each of `targets` adapters in the dtype of its weight: A drawn from (seed, name) as peft
    does, B zero.

    A is uniform within 1 / sqrt(in), which is kaiming_uniform with a = sqrt(5) (peft 0.21, tuners/lora/layer.py,
    reset_lora_parameters). `share` is told of the parameters of one module at a time, to partition them.
    """
    lm.requires_grad_(False)
    for target in targets:
        module: Any = lm.get_submodule(target.name)
        module.__class__ = type(
            f"Adapted{type(module).__name__}", (_CLASSES.get(target.kind, _AdaptedLinear), type(module)), {}
        )
        module.lora_scale = lora.alpha / lora.rank
        made = []
        for leaf, shape in target.shapes.items():
            weight = module._parameters[leaf]
            here = shape_of(weight) if is_four_bit(weight) else where(weight).shape
            assert here == shape, (target.name, leaf, here, shape)
            for side, values in _drawn(f"{target.name}.{leaf}", shape, lora.rank, seed).items():
                param = nn.Parameter(values.to(weight.device, dtype_of(weight)))
                # DeepSpeed 0.19.8 counts other parameters once in norms (runtime/utils.py:134).
                param.model_parallel = False  # type: ignore[attr-defined]
                module.register_parameter(f"{'' if leaf == 'weight' else leaf + '_'}lora_{side}", param)
                made.append(param)
        share(made)


def _drawn(name: str, shape: Shape, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Fresh A and B of a weight, fp32."""
    *experts, out, width = shape
    bound = width**-0.5
    generator = torch.Generator().manual_seed(seed_of(seed, f"{name}.lora_A"))
    return {
        "A": torch.empty(*experts, rank, width).uniform_(-bound, bound, generator=generator),
        "B": torch.zeros(*experts, out, rank),
    }


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model is part of an adapter."""
    return _ADAPTER.match(name) is not None


def weight_of(name: str) -> tuple[str, str]:
    """The weight that an adapter's parameter `name` adapts, and the parameter's side, `A` or `B`."""
    found = _ADAPTER.match(name)
    assert found, name
    return f"{found['module']}.{found['leaf'] or 'weight'}", found["side"]


@dataclass(frozen=True)
class Factors:
    """An adapter of one weight: A [..., rank, in], B [..., out, rank] and the scale of their product."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def shape(self) -> Shape:
        """Shape of the weight."""
        return (*self.b.shape[:-1], self.a.shape[-1])

    def delta(self, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened scale x B A, fp32 [numel]; no more rows of it are
        computed.
        """
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
    """Adapters by the weight they adapt, of the model's parameters by name."""
    sides = {weight_of(name): tensor for name, tensor in adapters.items()}
    return {
        weight: Factors(tensor, sides[weight, "B"], scale) for (weight, side), tensor in sides.items() if side == "A"
    }


def merged(
    tensors: Iterator[tuple[str, torch.Tensor | None]], factors: Mapping[str, Factors]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """`tensors` (whole, on the CPU, by name) with their adapters added in fp32, cast back, a copy of one tensor at a
    time.
    """
    for name, tensor in tensors:
        yield name, tensor if tensor is None or name not in factors else _sum(tensor, factors[name])


def _sum(tensor: torch.Tensor, adapter: Factors) -> torch.Tensor:
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    flat, source = out.view(-1), tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_NUMEL):
        part = source[start : start + _CHUNK_NUMEL]
        flat[start : start + len(part)] = part.float() + adapter.delta(start, len(part))
    return out
