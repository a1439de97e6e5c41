"""The memory of a rank by the estimate against what torch's allocator gave on a GPU at most."""

from dataclasses import replace
from pathlib import Path

import torch

from bench.gpu.machine import device
from bench.gpu.models import DEEPSEEK_V2_LITE, QWEN2_1B
from bench.gpu.results import Recorder, SkippedError
from bench.gpu.training import OPTIMIZER_ON_HOST, TrainingRun, deepspeed
from ds_finetune.cli.plan import planned_traces
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import say_nothing
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.meta_model import described
from ds_finetune.plan.estimate.memory import MemoryEstimate, RunMemory
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
    "ZeRO-3": replace(_BASE, sections=deepspeed(stage=3, has_torch_adam=True)),
    "ZeRO-1, no recomputation": replace(_BASE, micro_rows=1, sections=_KEPT),
    "ZeRO-2, optimizer on the host": replace(_BASE, sections=OPTIMIZER_ON_HOST),
    "ZeRO-1, inputs of layers on the host": replace(_BASE, sections={"train": {"activation_offload": True}}),
    "experts, ZeRO-1": _EXPERTS,
}
"""Runs of real widths with few layers, by name."""


def memory(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """Planned and measured memory of each run of RUNS; on a GPU they must agree."""
    for number, (name, full) in enumerate(RUNS.items()):
        run = full.tiny() if is_tiny else full
        with recorder.record(name) as values:
            if " on the host" in name and device().type == "cpu":
                raise SkippedError("needs a GPU")
            config = run.config(folder / str(number))
            planned = estimate_of(run, config).device_bytes
            if device().type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            records = run.train(folder / str(number))
            values |= {"estimated GiB": planned / GIB, "GiB": records[-1]["memory/peak_gib"]}
            if device().type == "cuda":
                values.check("estimate off by", abs(planned / GIB / values["GiB"] - 1), limit=_LIMIT)


def estimate_of(run: TrainingRun, config: RunConfig) -> MemoryEstimate:
    """The estimate of a run on one rank with the device that is here."""
    settings = RunSettings.of(config)
    plan = make_plan(settings, world=World(0, 1, 0, 1, "one rank"), device=device().type)
    model = described(AutoConfig.for_model(**run.model))
    return RunMemory(plan, model, planned_traces(settings, say_nothing)).estimate()
