"""The same adapters in a model of ours and in peft, which everything about LoRA is held against."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_finetune.config.sections import LoraConfig
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora import AdapterPlacement, factors_of, install_lora
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.skeleton import full_fragment
from ds_finetune.model.experts import spread_ids
from ds_finetune.model.weights.names import is_adapter
from ds_finetune.reference.selftest.cells import hf_config
from ds_finetune.reference.selftest.reference_loop import adamw

RANK, SEED = 8, 0
_NAMED = ("gate", "experts", r".*\.self_attn\..*_proj(_with_mqa)?")
_NAMED_MLP = r".*\.mlp\.(shared_experts\.)?\w+_proj"


def named_in(family: str) -> tuple[str, ...]:
    """Patterns that adapt every kind of module in a mixture of experts, the router too."""
    names = [name for name, _ in base_model(family).named_modules()]
    is_there = {
        pattern: any(re.fullmatch(rf"(.*\.)?{pattern}", name) for name in names) for pattern in (*_NAMED, _NAMED_MLP)
    }
    return tuple(pattern for pattern, matches in is_there.items() if matches)


def lora_tree(family: str) -> dict[str, Any]:
    """The `lora` section that the steps of a family are compared with: every kind of module there is."""
    has_experts = family_of(hf_config(family).model_type).expert_keys is not None
    return {"rank": RANK, "alpha": 32} | ({"target_modules": named_in(family)} if has_experts else {})


def base_model(family: str) -> PreTrainedModel:
    """A tiny model with a router bias that is not zero, the same each time, fp32."""
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(hf_config(family)).float()
    set_choices(model)
    return model


def set_choices(model: PreTrainedModel) -> None:
    """Let routers choose other experts than by zeros, in place, and none by a rounding."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    spread_ids(model, getattr(model.config, "n_routed_experts", 0))


def adapted(model: PreTrainedModel, lora: LoraConfig, *, trained: bool = True) -> PreTrainedModel:
    """`model` with adapters; where `trained`, their B are not zero."""
    planned = plan_lora(model.config, lora)
    install_lora(model, planned.targets, lora, seed=SEED, placement=AdapterPlacement(full_fragment))
    for name in planned.fully_trained:
        model.get_parameter(name).requires_grad_(True)
    if trained:
        generator = torch.Generator().manual_seed(5)
        for name, param in model.named_parameters():
            if is_adapter(name) and name.endswith("lora_B"):
                param.data.uniform_(-0.05, 0.05, generator=generator)
    return model


def write_adapter_of(model: PreTrainedModel, lora: LoraConfig, out: Path, *, base: Path) -> None:
    """The adapters of a model as an adapter folder."""
    tensors = {name: param.detach() for name, param in model.named_parameters() if is_adapter(name)}
    kept = {name: model.get_parameter(name).detach() for name in plan_lora(model.config, lora).fully_trained}
    adapter_base = AdapterBase(name=str(base), digest="", family=family_of(model.config.model_type), trained=kept)
    write_adapter(factors_of(tensors, lora.scale), lora, out, adapter_base)


def in_peft(base: PreTrainedModel, adapter: Path, *, trainable: bool = False) -> Any:
    """`base` with the adapter folder, as peft loads it; a missing or unexpected key fails the test."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=trainable)


def four_bit_tensors(param: Any) -> dict[str, torch.Tensor]:
    """All that bitsandbytes keeps of a weight."""
    state = param.quant_state
    parts = {
        "absmax": state.absmax,
        "code": state.code,
        "offset": state.offset,
        "nested": state.state2.absmax,
        "nested_code": state.state2.code,
    }
    return {"data": param.data.clone().as_subclass(torch.Tensor)} | {name: part.clone() for name, part in parts.items()}


def by_our_names(
    values: Mapping[str, torch.Tensor], names: Iterable[str], *, rank: int = RANK
) -> dict[str, torch.Tensor]:
    """Tensors of peft's parameters under the names and shapes that ours have."""
    found = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        if not is_adapter(name):
            found[name] = values[f"base_model.model.{module}.modules_to_save.default.{leaf}"]
            continue
        side = leaf[-1]
        inner = ".base_layer" if leaf.startswith("gate_up_proj") else ""
        value = values[f"base_model.model.{module}{inner}.lora_{side}.default.weight"]
        if leaf.startswith(("gate_up_proj", "down_proj")):
            value = (
                value.reshape(-1, rank, value.shape[1])
                if side == "A"
                else value.reshape(value.shape[0], rank, -1).permute(2, 0, 1)
            )
        found[name] = value
    return found


def has_rounding(name: str, first: Mapping[str, torch.Tensor]) -> bool:
    """Whether the gradients of an adapter's parameter may differ after the first step, whose gradients are `first`.

    Adam divides by |g| + 1e-8: where an element of B has a first gradient of a rounding's size, its first step is of
    any size, and A's next gradient too.
    """
    b = first[f"{name[:-1]}B"].abs()
    return bool(b[b > 0].min() <= 1e-7)


def after_a_step(name: str, first: Mapping[str, torch.Tensor]) -> float:
    """By how much the gradients of an adapter's parameter may differ after the first step, whose gradients are `first`,
    relative to their norm.

    Adam moves each element of B by g / (|g| + 1e-8) learning rates. A gradient is the sum of 48 tokens' in one order or
    another, of which 64 roundings of the largest element are taken. They move a small element by another length.
    """
    b = first[f"{name[:-1]}B"].abs().double()
    rounding = 64 * torch.finfo(torch.float32).eps * b.max()
    moved = (rounding * 1e-8 / (b[b > 0] + 1e-8) ** 2).clamp(max=2)
    return float(moved.norm() / len(moved) ** 0.5)


def recording_adamw(
    gradients: list[dict[str, torch.Tensor]], names: list[str]
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """From a model to its optimizer, which appends the gradients of each step by our `names` to `gradients`."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = adamw(model)
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        optimizer.register_step_pre_hook(
            lambda *_: gradients.append(
                by_our_names(
                    {name: param.grad.clone() for name, param in trained.items() if param.grad is not None}, names
                )
            )
        )
        return optimizer

    return make
