"""Started by the tests as `torchrun worker.py FOLDER CASE ...`: DeepSeek-V4 in bf16, with the parameters that it uses
in fp32, saved and resumed.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.cli.main import exit_process
from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.devices import choose_device
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.state.full_tensors import gather_zero3
from ds_finetune.families.table import family_of
from ds_finetune.reference.selftest import compare
from ds_finetune.reference.selftest.cells import TINY_MODELS, Cell, run_tree
from ds_finetune.system.world import World
from tests.engine.frozen_worker import engine_of, weights_of

FAMILY = "deepseek_v4_sparse"
CELLS = {
    f"{stage}-{offload}-{'lora' if has_lora else 'full'}": Cell(
        FAMILY, stage, 2, packing=True, precision="bf16", offload=offload, has_lora=has_lora
    )
    for stage, offload, has_lora in (
        (0, "none", False),
        (1, "none", False),
        (2, "optimizer", False),
        (3, "none", False),
        (3, "param", False),
        (3, "none", True),
    )
}


CELLS |= {
    f"1-none-{axis}": Cell(FAMILY, 1, 2, packing=True, precision="bf16", **{axis: 2}) for axis in ("tp", "sp", "pp")
}
SHARDED = "sinks"
"""What tensor parallel ranks divide of the parameters in fp32."""


def write_odd_model(folder: Path) -> None:
    """Write a model whose parameters in fp32 are no bf16 numbers."""
    compare.write_model(AutoConfig.for_model(**TINY_MODELS[FAMILY]), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if family_of("deepseek_v4").is_in_fp32(name):
            tensor += torch.randn(tensor.shape, generator=generator) * 0.3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _used(engine: Engine) -> dict[str, torch.Tensor]:
    """What modules compute with, by name."""
    names = engine.state._ds.module.in_fp32.params
    found = {}
    for name, param in engine.lm.named_parameters():
        if name in names:
            owner, _, leaf = name.rpartition(".")
            with gather_zero3(param):
                found[name] = getattr(engine.lm.get_submodule(owner), leaf).detach().clone()
    return found


def _masters(engine: Engine) -> dict[str, tuple[int, torch.Tensor]]:
    """Where this rank's part of what the optimizer updates begins, and its elements, by name."""
    return {part.name: (part.start, flat.clone()) for part, flat in engine.state._parts_in_fp32()}


def _agree(engine: Engine) -> bool:
    used = _used(engine)
    return all(
        torch.equal(used[name].view(-1)[start : start + len(flat)], flat)
        for name, (start, flat) in _masters(engine).items()
    )


def _is_whole(name: str, cell: Cell) -> bool:
    return cell.tp == 1 or not name.endswith(SHARDED)


def main() -> None:
    """Train each case and let rank zero write what became of the parameters."""
    folder, (world, device) = Path(sys.argv[1]), (World.from_environment(os.environ), choose_device())
    found: dict[str, Any] = {}
    with process_group(world, device):
        if world.rank == 0:
            write_odd_model(folder / "model")
        torch.distributed.barrier()
        stored = weights_of_folder(folder / "model")
        for name in sys.argv[2:]:
            cell = CELLS[name]
            config = RunConfig.model_validate(
                run_tree(cell, folder / "model", folder / name, dp=world.world_size // cell.sharing)
            )
            with engine_of(config, world, device) as engine:
                used = _used(engine)
                is_loaded = all(torch.equal(used[key], stored[key]) for key in used if _is_whole(key, cell))
                starts = _agree(engine)
                steps = compare._steps_with_checkpoint(engine, folder / name, 3)
                after, whole = _used(engine), weights_of(engine)
                agrees = starts and _agree(engine)
                changed = sorted(key for key in used if not torch.equal(used[key], after[key]))
                is_exported = all(
                    torch.equal(whole[key], after[key]) for key in after if whole and _is_whole(key, cell)
                )
            with engine_of(config, world, device, loads_weights=False) as engine:
                resumed = compare._steps_after_resume(engine, folder / name, 2)
                again = _used(engine)
            found[name] = {
                "number": len(used),
                "is_odd": any(not torch.equal(value, value.bfloat16().float()) for value in used.values()),
                "is_loaded": is_loaded,
                "agrees": agrees,
                "changed": changed,
                "is_exported": is_exported,
                "is_resumed": all(torch.equal(again[key], after[key]) for key in after),
                "losses": steps.losses,
                "resumed_losses": resumed.losses,
            }
    if world.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


def weights_of_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder that transformers saved, by the names of the model."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


if __name__ == "__main__":
    main()
    exit_process()
