"""Tiled MLPs: outputs and gradients of every family, and what they keep."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.families.table import FAMILIES
from ds_finetune.model.activation_memory import install_tiled_mlps, tiled_modules
from ds_finetune.plan.forward import mlp_tiles
from tests.model.tiny import CONFIGS

TOKENS = 37
"""Not a multiple of any number of tiles."""


def lm(family: str) -> Any:
    torch.manual_seed(0)
    kind = FAMILIES[family].built_as or family
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **CONFIGS[family])).float().train()


def results(model: Any) -> dict[str, torch.Tensor]:
    ids = (torch.arange(TOKENS) % 90)[None]
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", CONFIGS)
def test_losses_and_gradients_of_every_family(family: str) -> None:
    wanted, model = results(lm(family)), lm(family)
    tiled = install_tiled_mlps(model, tiles=mlp_tiles(model.config.to_dict()))
    # A dense MLP, or routed and shared experts, in each of three layers.
    assert 3 <= len(tiled) <= 6
    found = results(model)
    assert found.keys() == wanted.keys()
    # Small gradients are differences of large terms, as those of a gated delta net's dt_bias.
    rounding = torch.finfo(torch.float32).eps * torch.stack([value.norm() for value in wanted.values()]).norm()
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm() + rounding, name


def test_what_is_within_an_mlp_is_not_kept() -> None:
    model = lm("llama")
    (mlp, *_), kept = tiled_modules(model), dict[int, int]()
    hidden = torch.randn(1, TOKENS, 32, requires_grad=True)
    parameters = {p.data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    for wanted in (32 + 4 * 48, 32):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = mlp(hidden)
        assert out.shape == hidden.shape
        assert sum(kept.values()) == wanted * TOKENS
        install_tiled_mlps(model, tiles=4)


def test_the_tiles_follow_from_the_widths() -> None:
    dense = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
    assert mlp_tiles(dense) == 14
    experts = {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432}
    assert mlp_tiles(experts | {"num_experts_per_tok": 8, "moe_intermediate_size": 2048}) == 26


def test_weight_gradients_of_tiles_are_summed_in_fp32() -> None:
    """In bf16, sums of many tiles would lose what each of them adds."""
    torch.manual_seed(0)
    hidden = torch.randn(4096, 32, dtype=torch.bfloat16)
    errors = []
    for tiles in (1, 64):
        model = lm("llama").to(torch.bfloat16)
        (mlp, *_) = tiled_modules(model)
        exact = lm("llama").double()
        (wanted, *_) = tiled_modules(exact)
        wanted.load_state_dict(mlp.state_dict())
        install_tiled_mlps(model, tiles=tiles)
        mlp(hidden).sum().backward()
        wanted(hidden.double()).sum().backward()
        gradient, reference = mlp.down_proj.weight.grad, wanted.down_proj.weight.grad
        errors.append(float((gradient - reference).norm() / reference.norm()))
    assert errors[1] < 1.5 * errors[0]
