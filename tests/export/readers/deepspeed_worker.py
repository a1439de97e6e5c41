"""Plain DeepSpeed trains a step and writes its own checkpoints: `torchrun --nproc-per-node 2 deepspeed_worker.py OUT`.

Each `OUT/CELL` holds the checkpoint, `config.json`, and `truth.pt`: the fp32 state dict that DeepSpeed itself makes of
it. `OUT/trainer` is the output folder of a Hugging Face Trainer.
"""

import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ds_finetune.cli.main import exit_process
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.system.world import World
from tests.export.readers.cells import CELLS, Cell, fresh, hf_config


def main() -> None:
    """Write the checkpoint of every cell."""
    out = Path(sys.argv[1])
    with process_group(World.from_environment(os.environ), choose_device()):
        for cell in CELLS:
            _write(cell, out / cell.name)
        _train_with_transformers(out / "trainer")


def _write(cell: Cell, folder: Path) -> None:
    model = fresh(cell.family)
    if cell.frozen:
        model.model.layers[0].requires_grad_(False)
    wrapped, *_ = deepspeed.initialize(model=model, model_parameters=_groups(model), config=_settings(cell))
    wrapped.backward(wrapped(input_ids=torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None]).loss)
    wrapped.step()
    wrapped.save_checkpoint(str(folder), client_state={"note": "mine"})
    if wrapped.global_rank == 0:
        hf_config(cell.family).save_pretrained(folder)
        truth = get_fp32_state_dict_from_zero_checkpoint(str(folder)) if cell.stage else model.state_dict()
        torch.save(truth, folder / "truth.pt")
    torch.distributed.barrier()
    wrapped.destroy()


def _groups(model: PreTrainedModel) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def _settings(cell: Cell) -> dict[str, Any]:
    zero = {
        "stage": cell.stage,
        "overlap_comm": False,
        "sub_group_size": 7001,
        "stage3_param_persistence_threshold": 40,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": cell.bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": zero | dict.fromkeys(cell.options, True),
    }


def _train_with_transformers(folder: Path) -> None:
    rows = [{"input_ids": torch.arange(3, 20), "labels": torch.arange(3, 20)} for _ in range(8)]
    zero = {"stage": 2, "overlap_comm": False}
    settings = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        bf16=True,
        max_steps=2,
        save_steps=2,
        warmup_steps=1,
        per_device_train_batch_size=2,
        optim="adamw_torch",
        lr_scheduler_type="cosine",
        report_to=[],
        deepspeed={"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero},
    )
    Trainer(model=fresh("deepseek_v3"), args=settings, train_dataset=rows).train()


if __name__ == "__main__":
    main()
    exit_process()
