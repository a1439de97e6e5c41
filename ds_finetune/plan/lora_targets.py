"""Determines which modules LoRA adapts and which weights it holds in four bits, from names and shapes only."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ds_finetune.config.sections import ALL_LINEAR, LoraConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.family import Family
from ds_finetune.plan.model_tensors import SCORE_HEAD, FullTensor, ModelTensors, part_of
from ds_finetune.plan.name_patterns import last_part, matching, parameter_names

Shape = tuple[int, ...]
ROUTED, ROUTER = "routed experts", "router"
LINEAR = "linear modules"
"""Kind of all adaptable modules of a model type that the table of families lacks."""
FOUR_BIT = ("attention", "dense MLP", "shared experts", LINEAR)
"""Kinds of modules whose weights `lora.quantize` holds in four bits."""
_ADAPTABLE = ("attention", "dense MLP", "shared experts", ROUTED, ROUTER, "multi-token prediction")
_WEIGHTS = ("weight", "gate_up_proj", "down_proj")
_NOT_ADAPTABLE = re.compile(r"\.o_a_proj$|\.compressor\.|\.[eh]_proj$|\.router$")
"""Modules that get no adapters although their part of the model is adaptable. The output groups of DeepSeek-V4's
`o_a_proj`, for example, have separate inputs.
"""
_REWRITTEN = ("gate_proj", "up_proj", "down_proj", "gate")
"""Last parts of module names. In a model with fused experts, peft mistakes `target_modules` with these last parts for
experts or routers (utils/transformers_weight_conversion.py:411).
"""
_ROUTERS = ("gate", "router")
"""Last parts of the module names of routers."""
_REFUSED_WHOLE = {
    # peft would also save the router's bias, which is a buffer and no parameter.
    **dict.fromkeys(("routed experts", "router"), "no test trains in full beside adapters"),
    "indexer": "are always frozen with lora",
}
"""Parts of a model that `lora.modules_to_save` must not name, each with what the error says after "whose weights"."""
_ALIGNED = 8
"""LoRA ranks of experts' adapters must be multiples of this number, because grouped products need rows whose size is a
multiple of 16 bytes (torch 2.13, native/GroupedMMUtils.h).
"""


@dataclass(frozen=True)
class LoraTarget:
    """An adaptable module: its full name, its kind, and the shapes of its weights by their names in the module."""

    name: str
    kind: str
    shapes: Mapping[str, Shape]

    def num_params(self, rank: int) -> int:
        """Number of parameters of the module's adapters."""
        return sum(prod(shape[:-2]) * rank * (shape[-1] + shape[-2]) for shape in self.shapes.values())


_BLOCK, _NESTED = 64, 256
_TABLES = 4 * (16 + 256 + 1)
"""Constant bytes per quantised weight: two lookup tables and the mean of its scales, in fp32."""


def nf4_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of an NF4 weight of `shape`: 0.5 per element, 1 per block of 64, 4 per 256 blocks, and the tables."""
    numel = prod(shape)
    blocks = -(-numel // _BLOCK)
    return -(-numel // 2) + blocks + 4 * -(-blocks // _NESTED) + _TABLES


def adapted_targets(adaptable: Sequence[LoraTarget], lora: LoraConfig) -> tuple[LoraTarget, ...]:
    """Modules matched by `lora.target_modules`, by default all but routers; ConfigError where a pattern matches
    nothing, or where routed experts get a rank that grouped products cannot take.
    """
    patterns = lora.target_modules
    named = {target.name for pattern in patterns or () for target in _targets_named(pattern, adaptable)}
    chosen = tuple(target for target in adaptable if (target.name in named if patterns else target.kind != ROUTER))
    if lora.rank % _ALIGNED and any(target.kind == ROUTED for target in chosen):
        raise ConfigError(
            f"lora.rank {lora.rank} of routed experts is not a multiple of {_ALIGNED}",
            hint="set lora.rank to a multiple of 8, or leave `experts` out of lora.target_modules",
        )
    return chosen


def _targets_named(pattern: str, adaptable: Sequence[LoraTarget]) -> list[LoraTarget]:
    """Modules whose full name, or its last part, equals `pattern`; if there are none, those that match `pattern` as a
    regular expression. `all-linear` names all modules. Another pattern names routers only if its last part
    is `gate` or `router`.
    """
    if pattern in ALL_LINEAR:
        return [*adaptable]
    names_router = last_part(pattern.replace("\\.", ".")) in _ROUTERS
    chosen = {target.name: target for target in adaptable if target.kind != ROUTER or names_router}
    names = {name: (name, last_part(name)) for name in chosen}
    matches = matching(pattern, names, key="lora.target_modules", what="module that can be adapted")
    return [chosen[name] for name in matches]


def fully_trained_parameters(
    tensors: Mapping[str, FullTensor], lora: LoraConfig, targets: Sequence[LoraTarget]
) -> dict[str, FullTensor]:
    """Parameters that are trained in full beside the adapters of `targets`: a score head, and the matches of
    `lora.modules_to_save`. ConfigError if a pattern matches nothing, or weights that cannot be trained in full.
    """
    key, parameters = "lora.modules_to_save", parameter_names(tensors)
    chosen, adapted = {SCORE_HEAD}, {target.name for target in targets}
    for pattern in lora.modules_to_save:
        matches = matching(pattern, parameters, key=key, what="module")
        for name in matches:
            reason = _REFUSED_WHOLE.get(part_of(name))
            reason = "have adapters by lora.target_modules" if name.rpartition(".")[0] in adapted else reason
            if reason is not None:
                raise ConfigError(f"{key} `{pattern}` names {name}, whose weights {reason}", hint="name other modules")
        chosen.update(matches)
    return {name: tensor for name, tensor in tensors.items() if name in chosen}


def is_peft_parameter(weight: str, family: Family) -> bool:
    """Whether peft must adapt the parameter `weight` by `target_parameters` instead of adapting its module. It must if
    the parameter is not named `weight`, or if peft would mistake the module for routed experts or their router.
    """
    module, _, leaf = weight.rpartition(".")
    return leaf != "weight" or (family.fused_experts and not family.is_generic and last_part(module) in _REWRITTEN)


def is_transposed(weight: str, family: Family) -> bool:
    """Whether the family stores the weight of experts named `weight` as [experts, in, out], as gpt_oss does, instead of
    [experts, out, in].
    """
    return family.transposed_experts and part_of(weight) == ROUTED


def targets_of(model: ModelTensors) -> tuple[LoraTarget, ...]:
    """All adaptable modules of a model."""
    return linear_targets(model.shapes(), model.linears) if model.linears else targets_among(model.shapes())


def linear_targets(tensors: Iterable[tuple[str, Shape]], linears: Collection[str]) -> tuple[LoraTarget, ...]:
    """All adaptable modules of a model type that the table of families lacks: its linear modules. If experts are fused,
    modules that peft would mistake for experts or routers are left out.
    """
    shapes = dict(tensors)
    is_fused = any(part_of(name) == "routed experts" and not name.endswith(".weight") for name in shapes)
    names = {weight.removesuffix(".weight"): weight for weight in linears}
    return tuple(
        LoraTarget(name, ROUTER if last_part(name) in _ROUTERS else LINEAR, {"weight": shapes[weight]})
        for name, weight in names.items()
        if not (is_fused and last_part(name) in _REWRITTEN)
    )


def targets_among(tensors: Iterable[tuple[str, Shape]]) -> tuple[LoraTarget, ...]:
    """All adaptable modules of a model of a family in the table, from full names and shapes of its parameters."""
    modules: dict[str, dict[str, Shape]] = {}
    for name, shape in tensors:
        module, _, leaf = name.rpartition(".")
        is_matrix = leaf in _WEIGHTS and len(shape) > 1
        if is_matrix and part_of(name) in _ADAPTABLE and not _NOT_ADAPTABLE.search(module):
            modules.setdefault(module, {})[leaf] = shape
    return tuple(
        LoraTarget(module, part_of(f"{module}.{next(iter(shapes))}"), shapes) for module, shapes in modules.items()
    )


def quantised_targets(adaptable: Sequence[LoraTarget], lora: LoraConfig) -> tuple[LoraTarget, ...]:
    """Modules whose weights are held in four bits; ConfigError where no weight can be."""
    if lora.quantize is None:
        return ()
    candidates = [target for target in adaptable if target.kind in FOUR_BIT]
    # Each row must consist of whole quantisation blocks, because blocks continue from row to row, but the CPU kernel of
    # bitsandbytes 0.50.2 starts a new block with each row when it dequantises (backends/cpu/ops.py:137). Measured error
    # otherwise: 15 to 40% instead of 9%.
    fitting = tuple(
        target
        for target in candidates
        if all(len(shape) == 2 and shape[1] % _BLOCK == 0 for shape in target.shapes.values())
    )
    if not fitting:
        first = candidates[0]
        raise ConfigError(
            f"lora.quantize {lora.quantize} needs weights whose rows are multiples of 64 numbers, and none of the "
            f"{len(candidates)} weights has such rows; e.g. {first.name} has the shape {first.shapes['weight']}",
            hint="leave lora.quantize out",
        )
    return fitting
