"""Whether choices of a run change its numbers, and how often a step waits for the GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.machine import count_waits, device
from bench.gpu.models import (
    DEEPSEEK_V2_LITE,
    QWEN2_1B,
)
from bench.gpu.results import Recorder, SkippedError, check_limit
from bench.gpu.training import BY_DOCUMENT, OPTIMIZER_ON_HOST, SUPEROFFLOAD, ZENFLOW, Sections, TrainingRun, deepspeed
from ds_finetune.config.units import GIB
from ds_finetune.data.batches import Batch
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.results import StepResult
from ds_finetune.foreign.guard import replaced
from ds_finetune.plan.model_shape import Shape

_MOST_WAITS = 3
"""Operations of a step that may wait for the GPU."""
_INEXACT = 2e-2
"""Difference of a loss, relative, that options may have which cannot equal the plain loop."""
_ALL_ON_HOST: Sections = {"deepspeed": "ds_configs/zero3_offload.json"}
_MIDDLE = {**QWEN2_1B, "num_hidden_layers": 2, "vocab_size": 4096}
_BASE = TrainingRun(_MIDDLE, 512, rows=4, micro_rows=2, steps=4)


@dataclass(frozen=True)
class Variant:
    """A run whose losses are compared with those of the same run without its choice."""

    name: str
    run: TrainingRun
    limit: float = 2e-3
    """Largest difference of a loss, relative."""
    needs_gpu: bool = True
    base: TrainingRun = _BASE


_MOE = replace(_BASE, model={**DEEPSEEK_V2_LITE, "num_hidden_layers": 3, "n_routed_experts": 16, "vocab_size": 4096})
VARIANTS = (
    Variant("attention by document", replace(_BASE, model_section=BY_DOCUMENT), needs_gpu=False),
    Variant("latent attention by document", replace(_MOE, model_section=BY_DOCUMENT), 5e-3, base=_MOE),
    Variant("fp16 at ZeRO-1", replace(_BASE, precision="fp16")),
    Variant("fp32", replace(_BASE, precision="fp32"), needs_gpu=False),
    Variant("fp16 at ZeRO-3", replace(_BASE, precision="fp16", sections=deepspeed(stage=3, has_torch_adam=True))),
    Variant("chunked loss instead of Liger's", replace(_BASE, model_section={"loss": "chunked"})),
    Variant(
        "no activation checkpointing",
        replace(_BASE, sections={"train": {"activation_checkpointing": "none"}}),
        needs_gpu=False,
    ),
    Variant("activations on the host", replace(_BASE, sections={"train": {"activation_offload": True}})),
    Variant("MLPs in tiles", replace(_BASE, sections={"train": {"tiled_mlp": True}}), needs_gpu=False),
    Variant("experts in tiles", replace(_MOE, sections={"train": {"tiled_mlp": True}}), 5e-3, base=_MOE),
    Variant("DeepSpeed's FusedAdam", replace(_BASE, sections=deepspeed(stage=1))),
    Variant("optimizer on the host", replace(_BASE, sections=OPTIMIZER_ON_HOST)),
    Variant("optimizer and weights on the host", replace(_BASE, sections=_ALL_ON_HOST)),
    Variant("ZenFlow, inexact", replace(_BASE, micro_rows=4, sections=ZENFLOW), _INEXACT),
    Variant("SuperOffload, inexact", replace(_BASE, sections=SUPEROFFLOAD), _INEXACT),
)
"""Choices that change how a step is computed, and not what."""


def variants(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """The losses of each variant against those of the same run without it."""
    bases: dict[int, list[dict[str, Any]]] = {}
    for number, variant in enumerate(VARIANTS):
        with recorder.record(variant.name) as values:
            if variant.needs_gpu and device().type == "cpu":
                raise SkippedError("needs a GPU")
            base, run = (one.tiny() if is_tiny else one for one in (variant.base, variant.run))
            key = id(variant.base)
            if key not in bases:
                bases[key] = base.train(folder / f"base-{number}")
            compare(values, run.train(folder / str(number)), bases[key], limit=variant.limit)


def compare(
    values: dict[str, Any], found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]], *, limit: float
) -> None:
    """Differences of losses and gradient norms, seconds of the last step and memory of both; LimitExceededError where a
    loss is off.
    """
    values |= {"s/step": found[-1]["perf/step_seconds"], "without": wanted[-1]["perf/step_seconds"]}
    values |= {"GiB": found[-1]["memory/peak_gib"], "GiB without": wanted[-1]["memory/peak_gib"]}
    pairs = list(zip(found, wanted, strict=True))
    # A step that fp16 skips has no norm.
    norms = [(one["train/grad_norm"], other["train/grad_norm"]) for one, other in pairs]
    values["norm off by"] = max((abs(one / other - 1) for one, other in norms if one and other), default=None)
    values["skipped steps"] = sum(int(one["train/skipped"]) for one in found)
    losses = [abs(one["train/loss"] / other["train/loss"] - 1) for one, other in pairs]
    check_limit(values, "loss off by", max(losses), limit=limit)


def checkpoint(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """How long a step is blocked by a save that is written while training continues."""
    model = {**QWEN2_1B, "num_hidden_layers": 8}
    run = TrainingRun(model, 512, rows=2, steps=3, sections={"checkpoint": {"every": "2 steps", "keep": 1}})
    run = run.tiny() if is_tiny else run
    with recorder.record("a save after the second step") as values:
        records = run.train(folder)
        values["blocked s"] = float(records[1]["checkpoint/blocked_seconds"])
        values["state GiB"] = 12 * Shape.of(dict(run.model)).total_params / GIB


def waits(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """Operations of an optimizer step that wait for the GPU, which must not grow with layers and micro-batches."""
    deeper = {**_MIDDLE, "num_hidden_layers": 6}
    for name, run in {
        "2 layers, 2 micro-batches": _BASE,
        "2 layers, 4 micro-batches": replace(_BASE, micro_rows=1),
        "6 layers, 2 micro-batches": replace(_BASE, model=deeper),
        "experts, 2 micro-batches": _MOE,
        "ZeRO-3, 2 micro-batches": replace(_BASE, sections=deepspeed(stage=3, has_torch_adam=True)),
    }.items():
        with recorder.record(name) as values:
            counts = _waits_of_steps(run.tiny() if is_tiny else run, folder / name)
            if not counts:
                raise SkippedError("counted on a GPU")
            check_limit(values, "waits for the GPU", counts[-1], limit=_MOST_WAITS)


def _waits_of_steps(run: TrainingRun, folder: Path) -> list[int]:
    """The number of each step; none on a CPU."""
    counts: list[int] = []
    step = Engine.step

    def counted(engine: Engine, batch: Batch, *, lr: float) -> StepResult:
        with count_waits() as found:
            result = step(engine, batch, lr=lr)
        counts.extend(found)
        return result

    folder.mkdir()
    with replaced(Engine, "step", counted):
        run.train(folder)
    return counts
