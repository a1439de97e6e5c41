"""How fast models of real shapes train on one GPU."""

from pathlib import Path

from bench.gpu.models import DEEPSEEK_V2_LITE, QWEN2_1B, QWEN2_7B
from bench.gpu.results import Recorder
from bench.gpu.training import Sections, TrainingRun, measure

_LORA: Sections = {"lora": {"rank": 16}}
THROUGHPUT = {
    "full 1.5B": TrainingRun(QWEN2_1B, 4096, rows=16, micro_rows=4, steps=7),
    "LoRA 7B": TrainingRun(QWEN2_7B, 4096, rows=8, micro_rows=2, steps=7, sections=_LORA),
    "LoRA 16B of experts": TrainingRun(DEEPSEEK_V2_LITE, 4096, rows=8, micro_rows=2, steps=6, sections=_LORA),
}
"""Runs of real shapes, by name."""


def throughput(recorder: Recorder, folder: Path, argument: str, *, is_tiny: bool) -> None:
    """Tokens a second, memory and MFU of the run of THROUGHPUT with this name."""
    run = THROUGHPUT[argument]
    measure(recorder, argument, run.tiny() if is_tiny else run, folder)
