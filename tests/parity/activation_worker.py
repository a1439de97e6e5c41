"""Take the steps of each cell as it is, with layer inputs on the host, with tiled MLPs, with some outputs kept, and with
fused operations, in one launched world. These run as formulas, or by Liger's kernels with TRITON_INTERPRET=1.

Started by the tests as `torchrun --nproc-per-node N activation_worker.py MODELS_DIR OUT_DIR CELLS.json`.
"""

import os
from dataclasses import asdict, replace
from typing import Any

import torch
from deepspeed.utils import z3_leaf_module
from torch.autograd.graph import save_on_cpu
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.start_engine import start_engine
from ds_finetune.model import activation_memory
from ds_finetune.model.activation_memory import tiled_modules
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.fused import formulas, install
from ds_finetune.plan.forward import mlp_tiles
from ds_finetune.plan.kernels import ChosenKernels
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import Cell, run_tree
from ds_finetune.reference.selftest.compare import take_steps
from tests.lora_twin import lora_tree
from tests.model.fused.fused_kernels import interpret_floats
from tests.parity.serving import Launched, serve
from tests.planning import model_of

STEPS = 2
IS_LIGER = os.environ.get("TRITON_INTERPRET") == "1"
FUSED = ChosenKernels("liger", "a test")
if not IS_LIGER:
    install.kernels_of = lambda _: formulas  # type: ignore[assignment, return-value]


def run(tree: dict[str, Any], launched: Launched) -> tuple[str, dict[str, Any]]:
    """The steps of a cell in each way."""
    cell, world = Cell(**tree["cell"]), launched.world
    run_file = run_tree(cell, launched.models / cell.family, launched.out, dp=world.world_size // cell.sharing)
    config = RunConfig.model_validate(run_file | ({"lora": lora_tree(cell.family)} if tree["has_adapters"] else {}))
    plan, model = make_plan(RunSettings.of(config), world=world, device=launched.device), model_of(config)
    tiles = mlp_tiles(model.hf_config.to_dict())
    assert tiles > 1, model.hf_config
    return f"{cell.name}-{tree['has_adapters']}", {
        "plain": _run(plan, model),
        # On a CPU the run file's key is refused, and tensors are copied within its memory.
        "offloaded": _run(replace(plan, train=plan.train.model_copy(update={"activation_offload": True})), model),
        "tiled": _run(plan, replace(model, mlp_tiles=tiles)),
        "selective": _run(plan.with_recomputation("selective"), model),
        "fused": _run(replace(plan, kernels=FUSED), model),
        "fused and tiled": _run(replace(plan, kernels=FUSED), replace(model, mlp_tiles=tiles)),
    }


def _run(plan: Plan, model: ModelPlan) -> dict[str, Any]:
    with start_engine(plan, model) as engine:
        is_fused = any(type(module).__name__.startswith("Fused") for module in engine.lm.modules())
        assert is_fused == (plan.kernels.name != "torch")
        *_, steps = take_steps(engine, STEPS)
        weights = {name: tensor.clone() for name, tensor in engine.tensors() if tensor is not None}
        weights |= {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
        if plan.train.activation_offload:
            _check_offload(engine.lm)
        if model.mlp_tiles > 1 and plan.zero_stage == 3:
            _check_one_gather(engine.lm)
        return asdict(steps) | {"weights": weights}


class _Counting(save_on_cpu):
    """Counts what it copies in all runs."""

    stored = fetched = 0

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        pack, unpack = self.pack_hook, self.unpack_hook

        def pack_counted(tensor: torch.Tensor) -> Any:
            _Counting.stored += 1
            return pack(tensor)

        def unpack_counted(kept: Any) -> torch.Tensor:
            _Counting.fetched += 1
            return unpack(kept)

        self.pack_hook, self.unpack_hook = pack_counted, unpack_counted


activation_memory.save_on_cpu = _Counting  # type: ignore[misc]


def _check_offload(lm: torch.nn.Module) -> None:
    """Every input that left, but those of forwards without a backward, came back."""
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert _Counting.stored == _Counting.fetched, (_Counting.stored, _Counting.fetched)
    assert _Counting.stored or len(layers) == 1


def _check_one_gather(lm: torch.nn.Module) -> None:
    """DeepSpeed gathers the weights of a tiled MLP at once: modules within it have no hooks of their own, and it has,
    or is itself in a block that DeepSpeed gathers at once (those of Mixtral and Qwen, zero/leaf_module_config.py:12).

    It numbers the modules that it hooks (DeepSpeed 0.19.8, zero/parameter_offload.py:345).
    """
    tiled = tiled_modules(lm)
    blocks = [module for module in lm.modules() if z3_leaf_module(module) and module not in tiled]
    in_blocks = {module for block in blocks for module in block.modules() if module is not block}
    assert all(hasattr(mlp, "ds_id") != (mlp in in_blocks) for mlp in tiled)
    assert not any(hasattr(module, "ds_id") for mlp in tiled for module in mlp.modules() if module is not mlp)


if __name__ == "__main__":
    if IS_LIGER:
        interpret_floats()
    serve(run)
