"""Fused operations in whole models of every family: the same steps, by fewer operations."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ds_finetune.errors import DependencyError
from ds_finetune.families.configs import COMPRESSED, DENSE
from ds_finetune.families.table import family_of
from ds_finetune.model.activation_memory import install_tiled_mlps, recompute_layers
from ds_finetune.model.attention.compressed_attention import CompressedAttention, CompressorByDocument
from ds_finetune.model.attention.indexed_attention import (
    DivergenceCollector,
    IndexedAttention,
    _inputs_of_scores,
    expect_documents,
    index_scores,
    train_indexers,
)
from ds_finetune.model.fused import formulas, install
from ds_finetune.model.parallel.expert import compute_shared_experts_ahead
from tests.model.encoders import LENGTHS, encoder_config, packed_rows
from tests.model.fused.fused_kernels import DEVICE, fused_kernels
from tests.model.memory.test_kept_outputs import TOKENS, model_of, train
from tests.model.tiny import CONFIGS

OTHERS = {
    "qwen2_moe": DENSE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v4": COMPRESSED | {"compress_ratios": [4, 128], "swiglu_limit": 0.2},
}
"""Families without a row in `CONFIGS`; entries of 4 and of 12 tokens, and clamps that are reached."""
FAMILIES = (*CONFIGS, *OTHERS)
UNFUSED = ("Gemma3MLP", "Gemma4TextMLP", "Gemma4TextAttention", "GptOssMLP", "GptOssExperts", "DeepseekV32Indexer")
UNFUSED = (*UNFUSED, "GlmMoeDsaIndexer")


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    for family, config in OTHERS.items():
        monkeypatch.setitem(CONFIGS, family, config | {"shared_expert_intermediate_size": 16})


@pytest.fixture(params=["formulas", pytest.param("liger", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "liger" and DEVICE == "cuda":
        pytest.skip("the models here are on the CPU")
    found = fused_kernels(request.param)
    monkeypatch.setattr(install, "kernels_of", lambda _: found)
    return str(request.param)


def compared(family: str, dtype: torch.dtype, *, has_lora: bool, tiles: int = 0, longest: int = 0) -> float:
    """The largest difference of a loss or gradient, of the norm of what is wanted; both forwards are recomputed, one
    keeping some outputs.
    """
    found = []
    for is_fused in (False, True):
        lm = model_of(family, dtype, has_lora=has_lora)
        expect_documents(lm, longest=longest)
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
    # Gradients of DeepSeek-V4's hyper-connections are sums whose parts cancel.
    least = 1e-3 if family == "deepseek_v4" else 1e-30
    return max(float((mine - theirs).norm() / theirs.norm().clamp(min=least)) for theirs, mine in pairs)


@pytest.mark.parametrize("has_lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_the_same(family: str, has_lora: bool, kernels: str) -> None:
    has_lora = has_lora and family_of(family).has_lora
    assert compared(family, torch.float32, has_lora=has_lora) < 2e-5
    if kernels == "formulas":
        # The scales of DeepSeek-V4's hyper-connections are 0.045 from those of fp32 without kernels, 0.032 with them.
        assert compared(family, torch.bfloat16, has_lora=has_lora) < (0.045 if family == "deepseek_v4" else 0.03)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_tiled_mlps_are_fused_too(family: str, kernels: str) -> None:
    assert compared(family, torch.float32, has_lora=False, tiles=2) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operation_of_a_family_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "kernels_of", lambda _: formulas)
    lm = model_of(family)
    install.install_fused(lm, "a test")
    modules = list(lm.modules())
    mixed = (IndexedAttention, CompressedAttention, CompressorByDocument)
    for module in modules:
        name = type(module).__name__
        assert not name.endswith(("RMSNorm", "Attention", "MLP", "Experts", "Compressor", "Indexer")) or (
            name.startswith("Fused") or name in UNFUSED or (name.endswith("RMSNorm") and not [*module.parameters()])
        ), name
    for module in modules:
        if isinstance(module, mixed):
            assert type(module).rotate is not mixed[0].rotate
            assert type(module).rotate is not mixed[1].rotate


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_scores_of_indexers_are_the_same(family: str, kernels: str) -> None:
    """Their rotary embedding turns halves in one family, and pairs in the other."""
    lm = model_of(family)
    collector = DivergenceCollector((), attends_to_all=True)
    train_indexers(lm, collector)
    attention = lm.model.layers[0].self_attn
    hidden = torch.randn(2, TOKENS, lm.config.hidden_size, generator=torch.Generator().manual_seed(3))
    angles = lm.model.rotary_emb(hidden, torch.arange(TOKENS)[None].expand(2, -1))
    found = []
    for is_fused in (False, True):
        if is_fused:
            install.install_fused(lm, "a test")
        scored = _inputs_of_scores(attention, hidden, attention.q_a_proj(hidden), angles)
        scores = torch.stack([index_scores(type(scored)(*each), 1.0) for each in zip(*scored, strict=True)])
        weights = list(attention.indexer.parameters())
        found.append([scores.detach(), *torch.autograd.grad(scores.square().sum(), weights)])
    for theirs, mine in zip(*found, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < 2e-5


def test_entries_that_an_indexer_chooses_are_the_same(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "deepseek_v4", CONFIGS["deepseek_v4"] | {"index_topk": 2})
    assert compared("deepseek_v4", torch.float32, has_lora=False, longest=TOKENS) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoders_turn_the_same(dtype: torch.dtype, kernels: str) -> None:
    if kernels == "liger" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter computes bf16 with the bits of whole numbers")
    ids, positions, *_ = packed_rows()
    found = []
    for is_fused in (False, True):
        torch.manual_seed(5)
        lm = AutoModelForSequenceClassification.from_config(encoder_config("modernbert")).to(dtype).train()
        if is_fused:
            install.install_fused(lm, "a test")
        out = lm.model(input_ids=ids, position_ids=positions).last_hidden_state
        grads = torch.autograd.grad(out.float().square().sum(), [lm.model.layers[0].attn.Wqkv.weight])
        found.append([out.detach(), *grads])
    assert len(LENGTHS) == len(found[0][0])
    for theirs, mine in zip(*found, strict=True):
        assert float((mine - theirs).norm() / theirs.norm()) < (2e-5 if dtype == torch.float32 else 0.03)


def test_another_formula_is_an_error() -> None:
    class OtherRMSNorm(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    with pytest.raises(DependencyError, match=r"no longer contains `hidden_states\.pow"):
        install.norm_formula(OtherRMSNorm)
