"""The memory of a rank by arithmetic against what torch's allocator gave on a GPU at most."""

from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu.machine import device
from bench.gpu.models import DEEPSEEK_V2_LITE, QWEN2_1B
from bench.gpu.results import Recorder, check_limit
from bench.gpu.training import BY_DOCUMENT, OPTIMIZER_ON_HOST, TrainingRun, deepspeed
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB
from ds_finetune.plan.estimate.memory import MemoryEstimate, estimate_memory
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World

_LIMIT = 0.05
"""Largest difference of planned and measured bytes, relative."""
_BASE = TrainingRun({**QWEN2_1B, "num_hidden_layers": 12}, 4096, rows=4, micro_rows=2, steps=2)
_EXPERTS = replace(_BASE, model={**DEEPSEEK_V2_LITE, "num_hidden_layers": 3})
_KEPT = {"train": {"activation_checkpointing": "none"}}
RUNS = {
    "ZeRO-1": _BASE,
    "ZeRO-2, one forward a step": replace(_BASE, micro_rows=4, sections=deepspeed(stage=2, has_torch_adam=True)),
    "ZeRO-3": replace(_BASE, sections=deepspeed(stage=3, has_torch_adam=True)),
    "ZeRO-1, no recomputation": replace(_BASE, micro_rows=1, sections=_KEPT),
    "ZeRO-1, attention by document": replace(_BASE, model_section=BY_DOCUMENT),
    "ZeRO-2, optimizer on the host": replace(_BASE, sections=OPTIMIZER_ON_HOST, needs_gpu=True),
    "experts, ZeRO-1": _EXPERTS,
    "experts, ZeRO-3, no recomputation": replace(
        _EXPERTS, micro_rows=1, sections={**_KEPT, **deepspeed(stage=3, has_torch_adam=True)}
    ),
}
"""Runs of real widths with few layers, by name."""


def memory(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """Planned and measured memory of each run of RUNS; on a GPU they must agree."""
    for number, (name, full) in enumerate(RUNS.items()):
        run = full.tiny() if is_tiny else full
        with recorder.record(name) as values:
            run.check_machine()
            config = run.config(folder / str(number))
            planned = estimate_of(run, config).device_bytes
            if device().type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            records = run.train(folder / str(number))
            values |= {"estimated GiB": planned / GIB, "GiB": records[-1]["memory/peak_gib"]}
            if device().type == "cuda":
                difference = abs(planned / GIB / values["GiB"] - 1)
                check_limit(values, "estimate off by", difference, limit=_LIMIT)


def estimate_of(run: TrainingRun, config: RunConfig) -> MemoryEstimate:
    """The estimate of a run on one rank with the device that is here."""
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "one rank"), device=device().type)
    return estimate_memory(plan, run.model)
