"""Training runs on one GPU: their run files, their speed and their memory."""

import json
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from bench.gpu.machine import device
from bench.gpu.models import (
    Config,
    packed_lengths,
    tiny,
    write_model,
    write_texts,
    write_weights,
)
from bench.gpu.results import Recorder, SkippedError
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB
from ds_finetune.observers.performance import peak_flops
from ds_finetune.plan.estimate.activation_memory import activation_bytes
from ds_finetune.plan.model_shape import Shape

_TINY_TOKENS = 48
_WARM_STEPS = 2
"""Steps whose times do not count: kernels are chosen, and memory is taken."""
Sections = Mapping[str, Any]
BY_DOCUMENT: Sections = {"attention": "by_document"}
OPTIMIZER_ON_HOST: Sections = {"deepspeed": "ds_configs/zero2_offload.json"}


_ON_HOST = {"device": "cpu", "pin_memory": True}
ZENFLOW: Sections = {
    "deepspeed": {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": _ON_HOST,
            "zenflow": {"select_strategy": "step", "select_interval": 16, "update_interval": 4},
        }
    },
    "inexact": ["zenflow"],
}
SUPEROFFLOAD: Sections = {
    "deepspeed": {"zero_optimization": {"stage": 3, "offload_optimizer": {**_ON_HOST, "super_offload": True}}},
    "inexact": ["superoffload"],
}
"""Both save no checkpoints (docs/how-to/inexact-options.md)."""


def deepspeed(*, stage: int, has_torch_adam: bool = False) -> Sections:
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
    needs: str = ""
    """A module without which it is skipped."""
    needs_gpu: bool = False

    def check_machine(self) -> None:
        """SkippedError where this machine lacks what the run needs."""
        if self.needs and find_spec(self.needs) is None:
            raise SkippedError(f"{self.needs} is not installed")
        if self.needs_gpu and device().type == "cpu":
            raise SkippedError("needs a GPU")

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
            **deepspeed(stage=1, has_torch_adam=True),
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
        return _train(self.config(folder))


def _train(config: RunConfig) -> list[dict[str, Any]]:
    from ds_finetune.api import train

    train(config)
    lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def measure(recorder: Recorder, name: str, run: TrainingRun, folder: Path) -> None:
    """Record speed and memory of a run."""
    with recorder.record(name) as values:
        run.check_machine()
        began = time.perf_counter()
        config = run.config(folder)
        records = _train(config)
        timed = records[_WARM_STEPS:] or records[-1:]
        seconds = time.perf_counter() - began
        values |= speeds(run, timed)
        values["planned GiB"] = planned_bytes(run, config) / GIB
        values["host GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        values["start s"] = seconds - sum(record["perf/step_seconds"] for record in timed)
        losses = [record["train/loss"] for record in records]
        assert all(loss is not None for loss in losses), losses
        values |= {"first loss": losses[0], "last loss": losses[-1]}


def planned_bytes(run: TrainingRun, config: RunConfig) -> int:
    """Bytes on the GPU by arithmetic: the state, and the activations of a micro-batch. Logits of a chunk, the head's
    gradient in fp32 and buffers of DeepSpeed come on top.
    """
    from ds_finetune.api import plan_run

    train = config.train
    activations = activation_bytes(run.model, precision=run.precision).peak(
        run.tokens * run.micro_rows,
        recomputation=train.activation_checkpointing,
        is_offloaded=train.activation_offload,
        is_tiled=train.tiled_mlp,
    )
    return plan_run(config, gpus=1).estimate.gpu_bytes + activations


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
