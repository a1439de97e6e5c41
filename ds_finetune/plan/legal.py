"""Which layouts may be trained: those whose gradients a test compares with a plain loop's, and sizes that divide the model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.config import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.mesh import Mesh

AXES = ("pp", "sp", "tp", "ep")
"""Sizes beside data parallelism."""

FUSED = ("deepseek_v2", "deepseek_v3")
"""Model types whose routed experts may be shared out."""
FAMILIES = ("deepseek_v2", "deepseek_v3", "qwen2", "qwen3", "llama")
"""Model types whose parallel layouts are compared, each in every row of `PROVEN` (tests/parity/test_parallel.py)."""


@dataclass(frozen=True)
class Proven:
    """A combination of axes longer than one, beside data parallelism, and the ZeRO stages it is compared with."""

    axes: frozenset[str]
    stages: tuple[int, ...]
    families: tuple[str, ...] = FAMILIES


PROVEN = (
    Proven(frozenset({"sp"}), (0, 1, 2, 3)),
    Proven(frozenset({"tp"}), (0, 1, 2, 3)),
    Proven(frozenset({"sp", "tp"}), (0, 1, 2, 3)),
    Proven(frozenset({"ep"}), (1, 2, 3), FUSED),
    Proven(frozenset({"sp", "ep"}), (1, 2, 3), FUSED),
    Proven(frozenset({"tp", "ep"}), (1, 2, 3), FUSED),
)
"""Every row is a row of the parity tests."""


_OF_WHOLE_TENSORS = ("muon", "lamb")
"""Optimizers whose step depends on a tensor as a whole."""


def check_layout(mesh: Mesh, config: RunConfig, *, stage: int) -> None:
    """ConfigError where the layout of a run is in no row of `PROVEN`, naming the nearest."""
    axes = _axes(mesh)
    if not axes:
        return
    rows = [row for row in PROVEN if row.axes == axes]
    if not any(stage in row.stages for row in rows):
        raise ConfigError(f"parallel {mesh} with zero stage {stage} is not proven", hint=f"nearest: {_nearest(axes, stage)}")
    if config.model.attention != "sdpa":
        raise ConfigError(f"parallel {mesh} with model.attention {config.model.attention} is not proven", hint="set model.attention to sdpa")
    if mesh.tp > 1 and config.optim.name.lower() in _OF_WHOLE_TENSORS:
        raise ConfigError(f"optim.name {config.optim.name} with parallel.tp {mesh.tp} would see parts of each matrix", hint="use AdamW")
    if mesh.tp > 1 and config.checkpoint.node_local:
        raise ConfigError(f"checkpoint.node_local with parallel.tp {mesh.tp} is not proven", hint="save to a folder that all hosts share")
    tokens = config.train.max_seq_len
    if config.data.packing and tokens % mesh.sp:
        legal = [str(n * mesh.sp) for n in (tokens // mesh.sp, tokens // mesh.sp + 1) if n]
        raise ConfigError(f"train.max_seq_len {tokens} is not a multiple of parallel.sp {mesh.sp}", hint=f"set it to {' or '.join(legal)}")


def _axes(mesh: Mesh) -> frozenset[str]:
    return frozenset(axis for axis in AXES if getattr(mesh, axis) > 1)


def _nearest(axes: frozenset[str], stage: int) -> str:
    row = min(PROVEN, key=lambda row: (len(row.axes ^ axes), min(abs(stage - other) for other in row.stages)))
    return f"{' and '.join(f'parallel.{axis}' for axis in sorted(row.axes))} with zero stage {', '.join(map(str, row.stages))}"


def check_divides(mesh: Mesh, model: Mapping[str, Any]) -> None:
    """ConfigError where a size does not divide what it is to share out of the model whose config.json is given, naming the sizes that do."""
    axes = _axes(mesh)
    if not axes:
        return
    kind = str(model.get("model_type"))
    proven = next(row.families for row in PROVEN if row.axes == axes)
    if kind not in proven:
        raise ConfigError(f"parallel {mesh} of model_type {kind} is not proven", hint=f"proven: {', '.join(proven)}")
    for axis, what, number in _shared_out(mesh, model):
        size = getattr(mesh, axis)
        if number % size:
            legal = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ConfigError(f"parallel.{axis} {size} does not divide the {number} {what} of the model", hint=f"set it to one of {legal}")


def _shared_out(mesh: Mesh, model: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """What each axis cuts into equal parts, and how many there are."""
    heads = int(model["num_attention_heads"])
    yield "tp", "attention heads", heads
    yield "sp", f"attention heads{' of a tensor parallel rank' if mesh.tp > 1 else ''}", heads // mesh.tp
    yield "tp", "key and value heads", int(model.get("num_key_value_heads") or heads)
    yield "tp", "columns of the MLP", int(model["intermediate_size"])
    if model.get("moe_intermediate_size"):
        yield "tp", "columns of an expert", int(model["moe_intermediate_size"])
    yield "tp", "tokens of the vocabulary", int(model["vocab_size"])
    if model.get("n_routed_experts"):
        yield "ep", "routed experts", int(model["n_routed_experts"])
