"""Training runs on one GPU: their run files, their speed and their memory."""

import json
import resource
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.gpu.models import (
    Config,
    packed_lengths,
    tiny,
    write_model,
    write_texts,
    write_weights,
)
from bench.gpu.results import Recorder
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB

_TINY_TOKENS = 48
_WARM_STEPS = 2
"""Steps whose times do not count: kernels are chosen, and memory is taken."""
Sections = Mapping[str, Any]
OPTIMIZER_ON_HOST: Sections = {"deepspeed": "ds_configs/zero2_offload.json"}


def deepspeed(*, stage: int, has_torch_adam: bool = False, **zero: bool) -> Sections:
    """The section `deepspeed`, with further keys of ZeRO; torch's AdamW needs no compiler."""
    optimizer = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}} if has_torch_adam else {}
    return {"deepspeed": {"zero_optimization": {"stage": stage, **zero}, **optimizer}}


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
        began = time.perf_counter()
        config = run.config(folder)
        records = _train(config)
        timed = records[_WARM_STEPS:] or records[-1:]
        seconds = time.perf_counter() - began
        values |= speeds(timed)
        values["host GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        values["start s"] = seconds - sum(record["perf/step_seconds"] for record in timed)
        losses = [record["train/loss"] for record in records]
        assert all(loss is not None for loss in losses), losses
        values |= {"first loss": losses[0], "last loss": losses[-1]}


def speeds(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over `records`: tokens a second, seconds of a step, memory, and the share of the GPU's peak."""
    rate = statistics.median(record["perf/tokens_per_second"] for record in records)
    shares = [record["perf/mfu"] for record in records if "perf/mfu" in record]
    return {
        "tokens/s": rate,
        "s/step": statistics.median(record["perf/step_seconds"] for record in records),
        "GiB": max(record["memory/peak_gib"] for record in records),
        **({"MFU": statistics.median(shares)} if shares else {}),
    }
