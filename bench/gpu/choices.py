"""Whether the recomputation of a layer chooses the experts of its forward, at the sizes of DeepSeek-V2-Lite."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.models import DEEPSEEK_V2_LITE
from bench.gpu.results import Recorder
from bench.gpu.training import TrainingRun
from ds_finetune.data.batches import Batch
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.results import StepResult
from ds_finetune.foreign.guard import replaced

_RUN = TrainingRun({**DEEPSEEK_V2_LITE, "num_hidden_layers": 3}, 4096, rows=4, micro_rows=2, steps=2)


def choices(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """Choices of tokens that differ between forward and recomputation in two steps: another order of rows would give
    experts the gradients of other tokens.
    """
    run = _RUN.tiny() if is_tiny else _RUN
    for mode in ("full", "selective"):
        with recorder.record(f"V2-Lite, three layers, recomputation {mode}") as values:
            calls = _calls_of_experts(
                replace(run, sections={"train": {"activation_checkpointing": mode}}), folder / mode
            )
            pairs = [pair for each in calls for pair in zip(each[::2], each[1::2], strict=True)]
            assert pairs
            values["choices"] = sum(index.numel() for (_, index), _ in pairs)
            changed = ((hidden[0] != again[0]).any(-1).sum() for hidden, again in pairs)
            values["tokens with other hidden states"] = int(sum(changed))
            other = sum(int((index != again).sum()) for (_, index), (_, again) in pairs)
            values.check("changed choices", other, limit=0)


def _calls_of_experts(run: TrainingRun, folder: Path) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Hidden states [tokens, width] and chosen experts [tokens, k] of each call of each layer's experts in training:
    a forward and its recomputation follow each other.
    """
    calls: dict[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    step = Engine.step

    def note(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        hidden, chosen = given[:2]
        calls.setdefault(module, []).append((hidden.detach().cpu(), chosen.detach().cpu()))

    def watched(engine: Engine, batch: Batch, *, lr: float) -> StepResult:
        experts = [module for name, module in engine.lm.named_modules() if name.endswith(".experts")]
        handles = [module.register_forward_pre_hook(note) for module in experts]
        try:
            return step(engine, batch, lr=lr)
        finally:
            for handle in handles:
                handle.remove()

    folder.mkdir()
    with replaced(Engine, "step", watched):
        run.train(folder)
    return list(calls.values())
