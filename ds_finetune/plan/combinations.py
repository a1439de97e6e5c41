"""The parallel layouts that a run may use: those that tests compare with a plain PyTorch loop.

The parallel sizes also have to divide the dimensions of the model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from textwrap import wrap
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.pipeline import check_chunks

AXES = ("pp", "sp", "tp", "ep")
"""Parallel axes besides data parallelism."""

_MOST_RANKS_OF_AXIS = 4096
"""Larger sizes of an axis are not named in hints."""
_COLUMNS = 120
"""Width of a page of the documentation."""
ROW_BYTES = 16
"""torch's grouped matrix product needs rows of an expert's matrix that are a multiple of this."""
WEIGHT_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a weight by precision."""


@dataclass(frozen=True)
class ParallelLayout:
    """The axes with more than one rank, besides data parallelism, and the ZeRO stages that they are tested with."""

    axes: frozenset[str]
    stages: tuple[int, ...]

    @property
    def families(self) -> tuple[str, ...]:
        """Model types it is tested with: those with all of its axes in the table of families."""
        return tuple(name for name, family in FAMILIES.items() if self.axes <= family.parallel_axes)


TESTED_LAYOUTS = (
    ParallelLayout(frozenset({"sp"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"tp"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"sp", "tp"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"ep"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"sp", "ep"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"tp", "ep"}), (0, 1, 2, 3)),
    ParallelLayout(frozenset({"pp"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "tp"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "sp"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "ep"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "tp", "ep"}), (0, 1)),
    ParallelLayout(frozenset({"pp", "sp", "ep"}), (0, 1)),
)
"""tests/parity/test_parallel.py compares each row with a plain PyTorch loop."""
_OPTIMIZERS = ("adam", "adamw")
"""Optimizers that the layouts are tested with; Muon and Lamb depend on whole matrices."""
_TESTED_OPTIONS: Mapping[str, tuple[object, ...]] = {
    "reduce_scatter": (True,),
    "contiguous_gradients": (True,),
    "zero_quantized_gradients": (False,),
    "zero_quantized_weights": (False,),
    "gradient_predivide_factor": (1, 1.0),
    "prescale_gradients": (False,),
}
"""DeepSpeed options and the values that the layouts are tested with.

With other values, some layouts fail after weights are read, and some compute with another rank's experts.
"""

_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def check_layout(
    mesh: Mesh, config: RunConfig, *, stage: int, offloads: Sequence[str] = (), tree: Mapping[str, Any] | None = None
) -> None:
    """ConfigError where no row of `TESTED_LAYOUTS` has a run's layout; the hint names the nearest row.

    `offloads` are its offload devices, and `tree` is its DeepSpeed configuration.
    """
    axes = _axes(mesh)
    if not axes:
        return
    rows = [row for row in TESTED_LAYOUTS if row.axes == axes]
    if not any(stage in row.stages for row in rows):
        raise ConfigError(
            f"parallel {mesh} with zero stage {stage} is not tested", hint=f"nearest: {_nearest(axes, stage)}"
        )
    if mesh.pp * mesh.tp * mesh.ep > 1 and stage == 0 and config.train.precision != "fp32":
        # DeepSpeed 0.19.8 computes the norm of each rank's own shard there (fp16/unfused_optimizer.py): 0.78 of the
        # true norm on the tiny DeepSeek-V3.
        raise ConfigError(
            f"parallel {mesh} with zero stage 0 in {config.train.precision} clips by a wrong norm",
            hint="use zero stage 1, or fp32",
        )
    for what, hint in chain(
        _untested_attention(config), untested_training(config, offloads), _untested_options(tree or {})
    ):
        raise ConfigError(f"parallel {mesh} with {what} is not tested", hint=hint)
    tokens = config.train.max_seq_len
    if config.data.packing and tokens % mesh.sp:
        legal = [str(n * mesh.sp) for n in (tokens // mesh.sp, tokens // mesh.sp + 1) if n]
        raise ConfigError(
            f"train.max_seq_len {tokens} is not a multiple of parallel.sp {mesh.sp}",
            hint=f"set it to {' or '.join(legal)}",
        )


def check_lora(mesh: Mesh, config: RunConfig, *, stage: int, offloads: Sequence[str], tree: Mapping[str, Any]) -> None:
    """ConfigError where LoRA adapters would be trained with options that no test compares with peft."""
    if config.lora is None:
        return
    for what, is_set, hint in (
        *((what, True, hint) for what, hint in untested_training(config, offloads)),
        (
            f"model.weights {config.model.weights}",
            config.model.weights == "random",
            "load weights, or leave `lora` out",
        ),
        # Embedding and head are frozen: a new row would keep its random values, and adapters do not contain it.
        (
            "model.resize_vocabulary true",
            config.model.resize_vocabulary,
            "train all weights, or use a tokenizer that fits the model",
        ),
        # An adapter folder names its base model, whose config.json has other positions and rotary scaling.
        (
            f"model.context {config.model.context}",
            config.model.context is not None,
            "write the extension into the config.json of a copy of the model's folder",
        ),
        *(
            (f"{name} true", bool((tree.get("zero_optimization") or {}).get(name)), "leave it out")
            for name in _QUANTIZED
        ),
    ):
        if is_set:
            raise ConfigError(f"lora with {what} is not tested", hint=hint)
    if config.lora.quantize is not None:
        _check_quantized(config.lora.quantize, mesh, offloads=offloads)


def _check_quantized(kind: str, mesh: Mesh, *, offloads: Sequence[str]) -> None:
    if mesh.tp > 1:
        # The scales of 256 blocks have a common scale, and those of all blocks of a weight a common mean: of a shard
        # they are others.
        raise ConfigError(
            f"lora.quantize {kind} with parallel {mesh} would round other numbers than without parallel.tp",
            hint="set parallel.tp to 1; pp, sp and ep may be larger",
        )
    devices = [device for device in offloads if device != "none"]
    if devices:
        raise ConfigError(f"lora.quantize {kind} with offload to {devices[0]} is not tested", hint="leave offload out")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"lora.quantize {kind} needs bitsandbytes, which is not installed",
            hint="pip install 'ds_finetune[quantize]', or leave lora.quantize out",
        )


def untested_training(config: RunConfig, offloads: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Settings that tests of layouts, adapters, indexers and multi-token prediction leave out, and what to do."""
    if config.train.precision == "fp16":
        yield "train.precision fp16", "set train.precision to bf16"
    if "nvme" in offloads:
        yield "offload to nvme", "offload to cpu"
    if config.optim.name.lower() not in _OPTIMIZERS:
        yield f"optim.name {config.optim.name}", "use AdamW"


def _untested_attention(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.model.attention not in OWN_ATTENTIONS:
        yield f"model.attention {config.model.attention}", "set model.attention to sdpa"


def _untested_options(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    given = {**tree, **(tree.get("zero_optimization") or {})}
    for name, tested in _TESTED_OPTIONS.items():
        if name in given and given[name] not in tested:
            yield f"{name} {given[name]}", "leave it out"


def table() -> str:
    """`TESTED_LAYOUTS` in Markdown, for `docs/reference/layouts.md`, and the model types that its rows name."""
    every = tuple(name for name, family in FAMILIES.items() if family.parallel_axes)
    with_experts = tuple(name for name in every if "ep" in FAMILIES[name].parallel_axes)

    def named(row: ParallelLayout) -> str:
        text, group = ("with experts", with_experts) if "ep" in row.axes else ("all", every)
        missing = [name for name in group if name not in row.families]
        return f"{text} but {_listed(missing)}" if missing else text

    rows = [
        f"| {' x '.join(axis for axis in AXES if axis in row.axes)} | {_listed(row.stages)} | {named(row)} |"
        for row in TESTED_LAYOUTS
    ]
    dense = [name for name in every if name not in with_experts]
    text = f"With experts: {_listed(with_experts)}. All: these and {_listed(dense)}."
    head = ["| beside dp | ZeRO stages | model types |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, "", *wrap(text, _COLUMNS)]) + "\n"


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


def _axes(mesh: Mesh) -> frozenset[str]:
    return frozenset(axis for axis in AXES if getattr(mesh, axis) > 1)


def _nearest(axes: frozenset[str], stage: int) -> str:
    row = min(TESTED_LAYOUTS, key=lambda row: (len(row.axes ^ axes), min(abs(stage - other) for other in row.stages)))
    return (
        f"{' and '.join(f'parallel.{axis}' for axis in sorted(row.axes))} with zero stage "
        f"{', '.join(map(str, row.stages))}"
    )


def check_divides(mesh: Mesh, model: Mapping[str, Any], *, pp_layers: Sequence[int] = (), vpp: int = 1) -> None:
    """ConfigError where a parallel size does not divide the dimensions that it splits; the hint names sizes that do.

    `model` is the model's config.json.
    """
    axes = _axes(mesh)
    if pp_layers and mesh.pp == 1:
        raise ConfigError(
            f"parallel.pp_layers {list(pp_layers)} with parallel.pp 1", hint="set parallel.pp, or leave it out"
        )
    if not axes:
        return
    kind = str(model.get("model_type"))
    tested = next(row.families for row in TESTED_LAYOUTS if row.axes == axes)
    if kind not in tested:
        raise ConfigError(f"parallel {mesh} of model_type {kind} is not tested", hint=f"tested: {', '.join(tested)}")
    check_chunks(mesh.pp, vpp, layers=int(model["num_hidden_layers"]), given=pp_layers)
    scaling = model.get("rope_parameters") or model.get("rope_scaling") or {}
    if mesh.sp > 1 and scaling.get("rope_type", scaling.get("type")) == "longrope":
        # transformers 5.23 chooses its factors by the positions in a call (modeling_rope_utils.py:47), and a call
        # on one rank has only a part of the positions.
        raise ConfigError(
            f"parallel {mesh} of a model with rope_type longrope is not tested", hint="set parallel.sp to 1"
        )
    for key in ("mlp_bias", "router_jitter_noise"):
        if mesh.tp > 1 and model.get(key):
            # Every rank would add the bias of shared experts, whose outputs are summed together with those of routed
            # ones, or draw a noise of its own.
            raise ConfigError(
                f"parallel {mesh} of a model with {key} {str(model[key]).lower()} is not tested",
                hint="set parallel.tp to 1",
            )
    for axis, what, number in _divided_dimensions(mesh, model):
        size = getattr(mesh, axis)
        if number % size:
            legal = ", ".join(map(str, _divisors(number)))
            raise ConfigError(
                f"parallel.{axis} {size} does not divide the {number} {what} of the model",
                hint=f"set it to one of {legal}",
            )


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number that an axis may have; found in pairs, since a search refuses thousands of layouts and
    vocabularies are large.
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    found = {*small, *(number // n for n in small)}
    return tuple(sorted(n for n in found if n <= _MOST_RANKS_OF_AXIS))


def check_expert_widths(mesh: Mesh, model: Mapping[str, Any], *, precision: str) -> None:
    """ConfigError where torch's grouped matrix product rejects the widths of the experts.

    `model` is the model's config.json.

    torch 2.13 needs each row of their matrices to be a multiple of 16 bytes ("strides should be multiple of 16 bytes").
    """
    keys = family_of(str(model.get("model_type"))).expert_keys
    if keys is None:
        return
    width, hidden, weight_bytes = keys.width(model), int(model["hidden_size"]), WEIGHT_BYTES[precision]
    if width // mesh.tp * weight_bytes % ROW_BYTES:
        legal = [n for n in range(1, mesh.tp) if width % n == 0 and width // n * weight_bytes % ROW_BYTES == 0]
        raise ConfigError(
            f"{keys.width_key} {width} / parallel.tp {mesh.tp} = {width // mesh.tp} columns of an expert x "
            f"{weight_bytes} bytes in {precision} is no multiple of {ROW_BYTES} bytes, "
            "which torch's grouped product needs",
            hint=f"set parallel.tp to {' or '.join(map(str, legal))}" if legal else wider(precision),
        )
    if hidden * weight_bytes % ROW_BYTES:
        raise ConfigError(
            f"hidden_size {hidden} x {weight_bytes} bytes in {precision} is no multiple of {ROW_BYTES} bytes, "
            "which torch's grouped product of experts needs",
            hint=wider(precision),
        )


def check_optimizer(name: str, model: Mapping[str, Any]) -> None:
    """ConfigError for Muon where it would orthogonalise the biases of experts, which are one matrix per layer.

    `model` is the model's config.json. DeepSpeed 0.19.8 takes every tensor of two or more dimensions (__init__.py:369).
    """
    kind = str(model.get("model_type"))
    if name.lower() == "muon" and family_of(kind).transposed_experts:
        raise ConfigError(
            f"optim.name {name} of model_type {kind} would orthogonalise the biases of its experts",
            hint="set optim.name: AdamW",
        )


def wider(precision: str) -> str:
    """The hint for experts whose rows are not a multiple of 16 bytes."""
    other = "train a model of other widths"
    return other if precision == "fp32" else f"set train.precision to fp32, or {other}"


def _divided_dimensions(mesh: Mesh, model: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Each axis with a dimension of the model that it divides, and the size of this dimension."""
    heads = int(model["num_attention_heads"])
    yield "tp", "attention heads", heads
    yield "sp", f"attention heads{' of a tensor parallel rank' if mesh.tp > 1 else ''}", heads // mesh.tp
    yield "tp", "key and value heads", int(model.get("num_key_value_heads") or heads)
    keys = family_of(str(model["model_type"])).expert_keys
    if keys is None or keys.width_key != "intermediate_size":
        yield "tp", "columns of the MLP", int(model["intermediate_size"])
    if keys is not None:
        yield "tp", "columns of an expert", keys.width(model)
    yield "tp", "tokens of the vocabulary", int(model["vocab_size"])
    if keys is not None:
        yield "ep", "routed experts", keys.number(model)
