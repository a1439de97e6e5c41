"""Fused operations in whole models of every family: the same steps, by fewer operations."""

import pytest
import torch

from ds_finetune.errors import DependencyError
from ds_finetune.families.table import family_of
from ds_finetune.model.activation_memory import install_tiled_mlps, recompute_layers
from ds_finetune.model.attention.indexed_attention import IndexedAttention
from ds_finetune.model.fused import formulas, install
from ds_finetune.model.parallel.expert import compute_shared_experts_ahead
from tests.model.fused.fused_kernels import DEVICE, fused_kernels
from tests.model.memory.test_kept_outputs import model_of, train
from tests.model.tiny import CONFIGS


@pytest.fixture(params=["formulas", pytest.param("liger", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "liger" and DEVICE == "cuda":
        pytest.skip("the models here are on the CPU")
    found = fused_kernels(request.param)
    monkeypatch.setattr(install, "kernels_of", lambda _: found)
    return str(request.param)


def compared(family: str, dtype: torch.dtype, *, has_lora: bool, tiles: int = 0) -> float:
    """The largest difference of a loss or gradient, of the norm of what is wanted; both forwards are recomputed, one
    keeping some outputs.
    """
    found = []
    for is_fused in (False, True):
        lm = model_of(family, dtype, has_lora=has_lora)
        if is_fused:
            install.install_fused(lm, "a test")
        recompute_layers(lm, is_selective=is_fused)
        if tiles:
            install_tiled_mlps(lm, tiles=tiles)
        else:
            compute_shared_experts_ahead(lm)
        found.append(train(lm, 2)[0])
    pairs = list(zip(*found, strict=True))
    assert all(torch.isfinite(mine).all() for _, mine in pairs)
    return max(float((mine - theirs).norm() / theirs.norm().clamp(min=1e-30)) for theirs, mine in pairs)


@pytest.mark.parametrize("has_lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("family", CONFIGS)
def test_steps_are_the_same(family: str, has_lora: bool, kernels: str) -> None:
    has_lora = has_lora and family_of(family).has_lora
    assert compared(family, torch.float32, has_lora=has_lora) < 2e-5
    if kernels == "formulas":
        assert compared(family, torch.bfloat16, has_lora=has_lora) < 0.03


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_tiled_mlps_are_fused_too(family: str, kernels: str) -> None:
    assert compared(family, torch.float32, has_lora=False, tiles=2) < 2e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_every_operation_of_a_family_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "kernels_of", lambda _: formulas)
    lm = model_of(family)
    install.install_fused(lm, "a test")
    modules = list(lm.modules())
    for module in modules:
        name = type(module).__name__
        assert not name.endswith(("RMSNorm", "Attention", "MLP", "Experts")) or (
            name.startswith("Fused") or isinstance(module, IndexedAttention) or name in ("GptOssMLP", "GptOssExperts")
        ), name
    for module in modules:
        if isinstance(module, IndexedAttention):
            assert module.rotate is not None


def test_another_formula_is_an_error() -> None:
    class OtherRMSNorm(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    with pytest.raises(DependencyError, match=r"no longer contains `hidden_states\.pow"):
        install.rounds_last(OtherRMSNorm)
