"""Training runs on one GPU: whether choices change the numbers, and how fast real shapes train."""

import json
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.gpu.machine import device
from bench.gpu.models import (
    DEEPSEEK_V2_LITE,
    QWEN2_1B,
    QWEN2_7B,
    Config,
    packed_lengths,
    tiny,
    write_model,
    write_texts,
    write_weights,
)
from bench.gpu.results import Recorder, SkippedError, check_limit
from ds_finetune.config.schema import RunConfig
from ds_finetune.observers.utilisation import peak_flops
from ds_finetune.plan.model_shape import Shape
from ds_finetune.units import GIB

_TINY_TOKENS = 48
_WARM_STEPS = 2
"""Steps whose times do not count: kernels are chosen, and memory is taken."""
Sections = Mapping[str, Any]
_OPTIMIZER_ON_HOST: Sections = {"deepspeed": "ds_configs/zero2_offload.json"}
_ALL_ON_HOST: Sections = {"deepspeed": "ds_configs/zero3_offload.json"}


def _deepspeed(*, stage: int, has_torch_adam: bool = False) -> Sections:
    """The section `deepspeed`; torch's AdamW needs no compiler."""
    optimizer = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}} if has_torch_adam else {}
    return {"deepspeed": {"zero_optimization": {"stage": stage}, **optimizer}}


@dataclass(frozen=True)
class TrainingRun:
    """A run of `steps` steps of `rows` rows of `tokens` tokens each."""

    model: Config
    tokens: int
    rows: int = 4
    micro_rows: int = 1
    steps: int = 8
    precision: str = "bf16"
    is_one_document: bool = False
    """Whether each row is one document; else it has documents of 370 tokens in the mean."""
    sections: Sections | None = None
    """Further sections of the run file."""
    model_section: Sections | None = None
    """Further keys of its section `model`."""

    def tiny(self) -> "TrainingRun":
        """The same on a tiny model, for rehearsals."""
        sizes = {"tokens": _TINY_TOKENS, "rows": 2, "micro_rows": 1, "steps": min(self.steps, 3)}
        return replace(self, model=tiny(self.model), **sizes)  # type: ignore[arg-type]

    @property
    def lengths(self) -> list[int]:
        """Tokens of the documents of all rows."""
        number = self.rows * self.steps
        return [self.tokens] * number if self.is_one_document else packed_lengths(self.tokens * number)

    def config(self, folder: Path) -> RunConfig:
        """The run file; model and texts are written to `folder`."""
        config = {**self.model, "max_position_embeddings": max(self.tokens, 8192)}
        model = write_model(folder / "model", config)
        weights = "random"
        if "lora" in (self.sections or {}):
            # Adapters need a base that can be loaded again.
            write_weights(model)
            weights = "load"
        texts = write_texts(folder / "texts.jsonl", self.lengths)
        tree: dict[str, Any] = {
            "model": {
                "path": str(model),
                "tokenizer": str(model / "tokenizer"),
                "weights": weights,
                **(self.model_section or {}),
            },
            "objective": {"name": "pretrain", "eos": False},
            "data": {"train": str(texts), "cache_dir": str(folder / "cache")},
            "train": {
                "for": f"{self.steps} steps",
                "global_batch_size": self.rows,
                "micro_batch_size": self.micro_rows,
                "max_seq_len": self.tokens,
                "precision": self.precision,
            },
            **_deepspeed(stage=1, has_torch_adam=True),
            "optim": {"lr": 1e-5},
            "eval": {"keep_best": False},
            "checkpoint": {"every": "never"},
            "export": {"at_end": False},
            "log": {"trackers": []},
            "output_dir": str(folder / "run"),
        }
        for name, section in (self.sections or {}).items():
            is_nested = isinstance(section, Mapping) and isinstance(tree.get(name), dict) and name != "deepspeed"
            tree[name] = tree[name] | section if is_nested else section
        return RunConfig.model_validate(tree)

    def train(self, folder: Path) -> list[dict[str, Any]]:
        """Train; the records of metrics.jsonl, by step."""
        from ds_finetune.api import train

        train(self.config(folder))
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def measure(recorder: Recorder, name: str, run: TrainingRun, folder: Path) -> None:
    """Record speed and memory of a run."""
    with recorder.record(name) as values:
        began = time.perf_counter()
        records = run.train(folder)
        timed = records[_WARM_STEPS:] or records[-1:]
        seconds = time.perf_counter() - began
        values |= speeds(run, timed)
        values["host GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        values["start s"] = seconds - sum(record["perf/step_seconds"] for record in timed)
        losses = [record["train/loss"] for record in records]
        assert all(loss is not None for loss in losses), losses
        values |= {"first loss": losses[0], "last loss": losses[-1]}


def speeds(run: TrainingRun, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over `records`: tokens a second, seconds of a step, memory, and the share of the GPU's peak."""
    rate = statistics.median(record["perf/tokens_per_second"] for record in records)
    found: dict[str, Any] = {
        "tokens/s": rate,
        "s/step": statistics.median(record["perf/step_seconds"] for record in records),
        "GiB": max(record["memory/peak_gib"] for record in records),
    }
    peak = peak_flops(torch.cuda.get_device_name()) if device().type == "cuda" else None
    flops = flops_per_token(run)
    found["TFLOP/s"] = rate * flops / 1e12
    return found | ({"MFU": rate * flops / peak} if peak else {})


def flops_per_token(run: TrainingRun) -> float:
    """Training FLOPs of a token by arithmetic; with adapters without the gradients of frozen weights, which makes four
    instead of six for each of the model's weights.
    """
    shape = Shape.of(dict(run.model))
    attended = sum(length * length / 2 for length in run.lengths) / sum(run.lengths)
    total = shape.flops_per_token(run.tokens, mean_attended=attended)
    if "lora" not in (run.sections or {}):
        return total
    products = shape.flops_per_token(run.tokens, mean_attended=0)
    return products * 4 / 6 + total - products


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


_MOE = replace(_BASE, model={**DEEPSEEK_V2_LITE, "num_hidden_layers": 3, "vocab_size": 4096})
_BY_DOCUMENT: Sections = {"attention": "by_document"}
VARIANTS = (
    Variant("attention by document", replace(_BASE, model_section=_BY_DOCUMENT), needs_gpu=False),
    Variant("latent attention by document", replace(_MOE, model_section=_BY_DOCUMENT), 5e-3, base=_MOE),
    Variant("fp16 at ZeRO-1", replace(_BASE, precision="fp16")),
    Variant("fp32", replace(_BASE, precision="fp32"), needs_gpu=False),
    Variant("fp16 at ZeRO-3", replace(_BASE, precision="fp16", sections=_deepspeed(stage=3, has_torch_adam=True))),
    Variant("chunked loss instead of Liger's", replace(_BASE, model_section={"loss": "chunked"})),
    Variant(
        "no activation checkpointing",
        replace(_BASE, sections={"train": {"activation_checkpointing": False}}),
        needs_gpu=False,
    ),
    Variant("activations on the host", replace(_BASE, sections={"train": {"activation_offload": True}})),
    Variant("MLPs in tiles", replace(_BASE, sections={"train": {"tiled_mlp": True}}), needs_gpu=False),
    Variant("experts in tiles", replace(_MOE, sections={"train": {"tiled_mlp": True}}), 5e-3, base=_MOE),
    Variant("DeepSpeed's FusedAdam", replace(_BASE, sections=_deepspeed(stage=1))),
    Variant("optimizer on the host", replace(_BASE, sections=_OPTIMIZER_ON_HOST)),
    Variant("optimizer and weights on the host", replace(_BASE, sections=_ALL_ON_HOST)),
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
    values["norm off by"] = max(abs(one["train/grad_norm"] / other["train/grad_norm"] - 1) for one, other in pairs)
    losses = [abs(one["train/loss"] / other["train/loss"] - 1) for one, other in pairs]
    check_limit(values, "loss off by", max(losses), limit=limit)


_LORA: Sections = {"lora": {"rank": 16}}
THROUGHPUT = {
    "full 1.5B": TrainingRun(QWEN2_1B, 4096, rows=16, micro_rows=4, steps=7),
    "full 1.5B, no recomputation": TrainingRun(
        QWEN2_1B, 4096, rows=16, micro_rows=1, steps=7, sections={"train": {"activation_checkpointing": False}}
    ),
    "full 1.5B, attention by document": TrainingRun(
        QWEN2_1B, 4096, rows=16, micro_rows=4, steps=5, model_section=_BY_DOCUMENT
    ),
    "LoRA 7B": TrainingRun(QWEN2_7B, 4096, rows=8, micro_rows=2, steps=7, sections=_LORA),
    "LoRA 7B in four bits": TrainingRun(
        QWEN2_7B, 4096, rows=8, micro_rows=2, steps=5, sections={"lora": {"rank": 16, "quantize": "nf4"}}
    ),
    "LoRA 16B of experts": TrainingRun(DEEPSEEK_V2_LITE, 4096, rows=8, micro_rows=2, steps=6, sections=_LORA),
}
"""Runs of real shapes, by name."""


def throughput(recorder: Recorder, folder: Path, name: str, *, is_tiny: bool) -> None:
    """Tokens a second, memory and MFU of a run of THROUGHPUT."""
    run = THROUGHPUT[name]
    measure(recorder, name, run.tiny() if is_tiny else run, folder)


def longest(recorder: Recorder, folder: Path, tokens: int, *, is_tiny: bool) -> None:
    """One document of `tokens` tokens a step, full fine-tune of 1.5 B, with activations on the host and tiles."""
    is_gpu = device().type == "cuda"
    sections: Sections = {"train": {"tiled_mlp": True, **({"activation_offload": True} if is_gpu else {})}}
    # A step of more takes minutes.
    steps = 2 if tokens <= 131_072 else 1
    run = TrainingRun(QWEN2_1B, tokens, rows=1, steps=steps, is_one_document=True, sections=sections)
    measure(recorder, f"{tokens:,} tokens", run.tiny() if is_tiny else run, folder)


def offload(recorder: Recorder, folder: Path, share: float, *, is_tiny: bool) -> None:
    """Full fine-tune with the optimizer on the host of `share` of the layers of the 7B shape that memory has room for;
    of less than all where the run of more has failed.
    """
    has_succeeded = any(record["result"] == "ok" for record in recorder.file.read()["records"])
    if share < 1 and has_succeeded and not is_tiny:
        return
    layers = 1 if is_tiny else max(1, round(layers_that_fit(folder) * share))
    model = {**QWEN2_7B, "num_hidden_layers": layers}
    # A CPU has no memory to offload to.
    sections = _OPTIMIZER_ON_HOST if device().type == "cuda" else _deepspeed(stage=2, has_torch_adam=True)
    run = TrainingRun(model, 4096, rows=4, micro_rows=2, steps=3, sections=sections)
    name = f"full {Shape.of(model).total_params / 1e9:.1f}B: {layers} layers of the 7B shape"
    measure(recorder, name, run.tiny() if is_tiny else run, folder)


_HOST_SHARE, _GPU_SHARE = 0.85, 0.8
"""Shares of the memory that the planned state may take; buffers and activations take the rest."""


def layers_that_fit(folder: Path) -> int:
    """Layers of the 7B shape whose planned state fits into the host's and the GPU's memory."""
    rooms = {
        "cpu": psutil.virtual_memory().total * _HOST_SHARE,
        "cuda": torch.cuda.get_device_properties(0).total_memory * _GPU_SHARE,
    }
    few, more = (planned_bytes(layers, folder) for layers in (4, 8))
    growth = {place: (more[place] - few[place]) / 4 for place in rooms}
    return int(min(4 + (room - few[place]) / growth[place] for place, room in rooms.items()))


def planned_bytes(layers: int, folder: Path) -> dict[str, float]:
    """Bytes of the state of that many layers of the 7B shape with the optimizer on the host, by place: cpu and cuda."""
    from ds_finetune.trainer.dry_run import plan_run

    model = {**QWEN2_7B, "num_hidden_layers": layers}
    run = TrainingRun(model, 4096, rows=1, steps=1, sections=_OPTIMIZER_ON_HOST)
    estimate = plan_run(run.config(folder / "fit"), gpus=1).estimate
    found = {"cpu": 0.0, "cuda": 0.0}
    for name, size in estimate.state_bytes.items():
        found[estimate.places[name]] += size
    return found
