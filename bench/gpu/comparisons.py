"""Whether choices of a run change its numbers, and how often a step waits for the GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.machine import device, waits_for_gpu
from bench.gpu.models import DEEPSEEK_V2_LITE, QWEN2_1B
from bench.gpu.results import Recorder, SkippedError, Values
from bench.gpu.training import OPTIMIZER_ON_HOST, TrainingRun, deepspeed
from ds_finetune.data.batches import Batch
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.results import StepResult
from ds_finetune.foreign.guard import replaced

_MOST_WAITS = 3
"""Operations of a step outside DeepSpeed that may wait for the GPU."""
_ROUNDING = 2.0**-8
"""Largest difference of a loss, relative: a unit in the last place of bf16."""
_MIDDLE = {**QWEN2_1B, "num_hidden_layers": 2, "vocab_size": 4096}
_BASE = TrainingRun(_MIDDLE, 512, rows=4, micro_rows=2, steps=4)
_MOE = replace(_BASE, model={**DEEPSEEK_V2_LITE, "num_hidden_layers": 3, "n_routed_experts": 16, "vocab_size": 4096})


@dataclass(frozen=True)
class Variant:
    """A run whose losses are compared with those of `base`, which differs in one choice."""

    name: str
    run: TrainingRun
    base: TrainingRun = _BASE
    needs_gpu: bool = True


def _with_kernels(run: TrainingRun, name: str) -> TrainingRun:
    return replace(run, model_section={"kernels": name})


LOSSES = tuple(
    Variant(f"{kind}: {name}", _with_kernels(run, key), _with_kernels(run, "torch"), needs_gpu=key == "auto")
    for kind, run in (("dense", _BASE), ("experts", _MOE))
    for name, key in (("kernels auto, which is Liger's", "auto"), ("kernels auto without Liger", "compile"))
)
"""`model.kernels` against torch's, which compute each operation by itself."""
ORDERS = (
    Variant("inputs of layers on the host", replace(_BASE, sections={"train": {"activation_offload": True}})),
    Variant("optimizer on the host", replace(_BASE, sections=OPTIMIZER_ON_HOST)),
    Variant(
        "reductions beside backward, ZeRO-2",
        replace(_BASE, sections=deepspeed(stage=2, has_torch_adam=True, overlap_comm=True)),
        replace(_BASE, sections=deepspeed(stage=2, has_torch_adam=True, overlap_comm=False)),
        needs_gpu=False,
    ),
    Variant("ZeRO-3", replace(_BASE, sections=deepspeed(stage=3, has_torch_adam=True)), needs_gpu=False),
)
"""Copies and streams in another order."""


def losses(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """The losses with fused kernels against those with torch's."""
    _compare_variants(LOSSES, recorder, folder, is_tiny=is_tiny)


def waits(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """Copies and streams in another order change no loss; how often an optimizer step waits for the GPU, which must not
    grow with layers and micro-batches outside DeepSpeed.
    """
    _compare_variants(ORDERS, recorder, folder, is_tiny=is_tiny)
    for name, run in {
        "waits of a step: 2 layers, 2 micro-batches": _BASE,
        "waits of a step: 6 layers, 4 micro-batches": replace(
            _BASE, micro_rows=1, model={**_MIDDLE, "num_hidden_layers": 6}
        ),
        "waits of a step: experts": _MOE,
        "waits of a step: ZeRO-3": ORDERS[-1].run,
    }.items():
        with recorder.record(name) as values:
            if device().type == "cpu":
                raise SkippedError("counted on a GPU")
            _count_waits(values, run.tiny() if is_tiny else run, folder / name)


def _compare_variants(variants: Sequence[Variant], recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    bases: dict[str, list[dict[str, Any]]] = {}
    for number, variant in enumerate(variants):
        with recorder.record(variant.name) as values:
            if variant.needs_gpu and device().type == "cpu":
                raise SkippedError("needs a GPU")
            base, run = (one.tiny() if is_tiny else one for one in (variant.base, variant.run))
            key = repr(variant.base)
            if key not in bases:
                bases[key] = base.train(folder / f"base-{number}")
            compare(values, run.train(folder / str(number)), bases[key])


def compare(values: Values, found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> None:
    """Differences of losses and gradient norms, seconds of the last step and memory of both; LimitExceededError where a
    loss is off.
    """
    values |= {"s/step": found[-1]["perf/step_seconds"], "without": wanted[-1]["perf/step_seconds"]}
    values |= {"GiB": found[-1]["memory/peak_gib"], "GiB without": wanted[-1]["memory/peak_gib"]}
    pairs = list(zip(found, wanted, strict=True))
    values["norm off by"] = max(abs(one["train/grad_norm"] / other["train/grad_norm"] - 1) for one, other in pairs)
    off = [abs(one["train/loss"] / other["train/loss"] - 1) for one, other in pairs]
    values["first loss off by"] = off[0]
    values.check("loss off by", max(off), limit=_ROUNDING)


def _count_waits(values: Values, run: TrainingRun, folder: Path) -> None:
    """Those of the last step."""
    counts = []
    step = Engine.step

    def counted(engine: Engine, batch: Batch, *, lr: float) -> StepResult:
        with waits_for_gpu() as found:
            result = step(engine, batch, lr=lr)
        counts.append(found)
        return result

    folder.mkdir()
    with replaced(Engine, "step", counted):
        run.train(folder)
    own = {place: number for place, number in counts[-1].items() if not place.startswith("deepspeed/")}
    values["of DeepSpeed"] = counts[-1].total() - sum(own.values())
    values["places"] = sorted(own)
    values.check("others", sum(own.values()), limit=_MOST_WAITS)
