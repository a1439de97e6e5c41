"""How fast models of real shapes train on one GPU, how large they may be and how long their documents."""

import math
from pathlib import Path

import psutil
import torch

from bench.gpu.machine import device
from bench.gpu.models import (
    DEEPSEEK_V2_LITE,
    QWEN2_1B,
    QWEN2_7B,
)
from bench.gpu.results import Recorder
from bench.gpu.training import (
    BY_DOCUMENT,
    OPTIMIZER_ON_HOST,
    SUPEROFFLOAD,
    ZENFLOW,
    Sections,
    TrainingRun,
    deepspeed,
    measure,
)
from ds_finetune.plan.model_shape import Shape

_LORA: Sections = {"lora": {"rank": 16}}


def _offloaded(sections: Sections) -> TrainingRun:
    """One forward a step, as ZenFlow needs it."""
    return TrainingRun(QWEN2_1B, 4096, rows=4, micro_rows=4, steps=7, sections=sections, needs_gpu=True)


THROUGHPUT = {
    "full 1.5B": TrainingRun(QWEN2_1B, 4096, rows=16, micro_rows=4, steps=7),
    "full 1.5B, no recomputation": TrainingRun(
        QWEN2_1B, 4096, rows=16, micro_rows=1, steps=7, sections={"train": {"activation_checkpointing": "none"}}
    ),
    "full 1.5B, attention by document": TrainingRun(
        QWEN2_1B, 4096, rows=16, micro_rows=4, steps=5, model_section=BY_DOCUMENT
    ),
    "LoRA 7B": TrainingRun(QWEN2_7B, 4096, rows=8, micro_rows=2, steps=7, sections=_LORA),
    "LoRA 7B in four bits": TrainingRun(
        QWEN2_7B,
        4096,
        rows=8,
        micro_rows=2,
        steps=5,
        sections={"lora": {"rank": 16, "quantize": "nf4"}},
        needs="bitsandbytes",
    ),
    "full 1.5B, optimizer on the host": _offloaded(OPTIMIZER_ON_HOST),
    "full 1.5B, ZenFlow, inexact": _offloaded(ZENFLOW),
    "full 1.5B, SuperOffload, inexact": _offloaded(SUPEROFFLOAD),
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
    layers = 1
    if not is_tiny:
        room = psutil.virtual_memory().total, torch.cuda.get_device_properties(0).total_memory
        layers = max(1, round(layers_that_fit(*room) * share))
    model = {**QWEN2_7B, "num_hidden_layers": layers}
    # A CPU has no memory to offload to.
    sections = OPTIMIZER_ON_HOST if device().type == "cuda" else deepspeed(stage=2, has_torch_adam=True)
    run = TrainingRun(model, 4096, rows=4, micro_rows=2, steps=3, sections=sections)
    name = f"full {Shape.of(model).total_params / 1e9:.1f}B: {layers} layers of the 7B shape"
    measure(recorder, name, run.tiny() if is_tiny else run, folder)


_HOST_SHARE, _GPU_SHARE = 0.85, 0.8
"""Shares of the memory that the state may take; activations, libraries and the rows take the rest."""
_PINNED = (4, 4, 2)
"""Bytes of each parameter in a pinned block of all of them: fp32 weights, fp32 gradients, and 16-bit weights on their
way to the GPU (DeepSpeed 0.19.8, zero/stage_1_and_2.py:565, 940, 572)."""
_OTHERS = 8 + 1.5 * 2
"""Bytes of each in other blocks: Adam's moments, and the 16-bit gradients of several forwards, which are pinned matrix
by matrix (line 1825)."""


def layers_that_fit(host_bytes: float, gpu_bytes: float) -> int:
    """Layers of the 7B shape whose state fits into so much memory with the optimizer on the host, at least one."""
    layers = 1
    while layers < QWEN2_7B["num_hidden_layers"]:
        params = Shape.of({**QWEN2_7B, "num_hidden_layers": layers + 1}).total_params
        if state_on_host(params) > _HOST_SHARE * host_bytes or 2 * params > _GPU_SHARE * gpu_bytes:
            break
        layers += 1
    return layers


def state_on_host(params: int) -> float:
    """Bytes of host memory for the state of so many parameters at ZeRO-2 with the optimizer there.

    torch rounds a pinned block up to a power of two (2.11, ATen/core/CachingHostAllocator.h:302).
    """
    return sum(2.0 ** math.ceil(math.log2(each * params)) for each in _PINNED) + _OTHERS * params
