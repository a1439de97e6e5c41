"""Attention by document equals transformers' own with its mask, for every family, and in generation."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers import modeling_flash_attention_utils as flash

from ds_finetune.errors import ModelError
from ds_finetune.families.configs import (
    DELTA,
    DENSE,
    EXAONE4,
    GEMMA3,
    GEMMA4_INPUTS,
    GROUPED_QUERY_EXPERTS,
    GROUPED_ROUTING,
    INDEXED,
    JOINED_QUERIES,
    LATENT,
    MINIMAX_M2,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    OLMOE,
    ONE_GROUP,
    PHI3,
    PLAIN_QUERIES,
    QWEN3_NEXT,
    SHARED_INDEX,
    WIDE_VALUES,
)
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.attention.by_document import attend_by_document
from ds_finetune.model.build.skeleton import build_skeleton, check_attention, model_class
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import TrainedModel, install_loss_head
from ds_finetune.model.weights.load import initialise_weights
from tests.rounding import differing_gradients

LENGTHS = ((5, 9, 2), (16,), (1, 1, 14))
ADDITIONS = 48 * 32
"""In a gradient of a weight: over 48 tokens, each of whose own gradient is a sum over 32 columns."""
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": GROUPED_ROUTING,
    "deepseek_v32": INDEXED,
    "glm_moe_dsa": SHARED_INDEX,
    "kimi_k2": ONE_GROUP,
    "sarvam_mla": PLAIN_QUERIES,
    "glm4_moe_lite": WIDE_VALUES,
    "glm4_moe": GROUPED_QUERY_EXPERTS | {"use_qk_norm": True},
    "sarvam_moe": JOINED_QUERIES,
    "qwen2": DENSE | {"tie_word_embeddings": True},
    "llama": DENSE,
    "exaone": DENSE,
    "exaone4": EXAONE4,
    "mistral": MISTRAL,
    "ministral3": MINISTRAL3,
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4_INPUTS,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_NEXT,
    "qwen3_5_text": DELTA,
    "phi3": PHI3,
    "deepseek_v2": LATENT,
    "qwen3": DENSE | {"head_dim": 8},
    "qwen3_moe": DENSE | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": MIXTRAL,
    "minimax_m2": MINIMAX_M2,
    "olmoe": OLMOE,
    "qwen2_moe": DENSE
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
}


def _loss_and_gradients(
    family: str, attention: str, extra: dict[str, Any], *, checkpointing: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    config = AutoConfig.for_model(family, **CONFIGS[family] | extra)
    is_flash = attention == "flash_attention_2"
    lm = build_skeleton(config, attention="eager" if is_flash else attention, dtype=torch.float32, device="cpu")
    if is_flash:
        # The package is asked for while a model is built, and is not here.
        lm.config._attn_implementation = attention
    initialise_weights(lm, seed=2)
    install_loss_head(lm)
    if checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 90, (len(LENGTHS), 16), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])
    rows = [ForwardRows(ids, positions, ids.roll(-1, 1), LENGTHS)]
    if attention == "eager" and FAMILIES[family].has_state:
        # transformers carries the state on to the next document of a row.
        parts = [
            [part for row, lengths in zip(each, LENGTHS, strict=True) for part in row.split(lengths)]
            for each in (ids, positions, ids.roll(-1, 1))
        ]
        rows = [ForwardRows(*(each[None] for each in part), ((len(part[0]),),)) for part in zip(*parts, strict=True)]
    loss = torch.stack([TrainedModel(lm)(each).loss for each in rows]).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_equals_the_mask_of_transformers(family: str, checkpointing: bool) -> None:
    loss, gradients = _loss_and_gradients(family, "sdpa", {}, checkpointing=checkpointing)
    wanted, wanted_gradients = _loss_and_gradients(family, "eager", {})
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert not differing_gradients(gradients, wanted_gradients, additions=ADDITIONS)


WINDOW = {"use_sliding_window": True, "sliding_window": 4}
WINDOWS = [
    ("qwen2", {"max_window_layers": 0}),
    ("qwen2", {"max_window_layers": 1}),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen3", {"max_window_layers": 0}),
    ("qwen3", {"max_window_layers": 1}),
    ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen2_moe", {"max_window_layers": 2}),
    ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("qwen3_moe", {}),
    ("mixtral", {}),
]


@pytest.mark.parametrize(("family", "extra"), WINDOWS, ids=str)
def test_a_sliding_window_is_kept(family: str, extra: dict[str, Any]) -> None:
    loss, _ = _loss_and_gradients(family, "sdpa", WINDOW | extra)
    assert loss == pytest.approx(_loss_and_gradients(family, "eager", WINDOW | extra)[0], rel=1e-6)
    assert abs(loss - _loss_and_gradients(family, "sdpa", {})[0]) > 1e-3
    assert loss == pytest.approx(_loss_and_gradients(family, "sdpa", WINDOW | extra, checkpointing=True)[0], rel=1e-6)


def test_every_causal_family_of_the_table_is_compared() -> None:
    """Those with attention sinks are compared in test_sinks.py: transformers does not separate their documents."""
    causal = {name for name, family in FAMILIES.items() if family.encoder is None}
    assert set(CONFIGS) == {name for name in causal if not FAMILIES[name].has_sinks}


@pytest.mark.parametrize(
    ("family", "extra"),
    [
        *((kind, {}) for kind in CONFIGS if not FAMILIES[kind].has_state),
        *((kind, WINDOW | extra) for kind, extra in WINDOWS),
    ],
    ids=str,
)
def test_flash_attention_knows_the_documents_of_every_row(
    family: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through transformers' own path to a kernel that stands in for FlashAttention's, with three rows to a forward."""
    if family == "qwen2_moe" and extra:
        with pytest.raises(ModelError, match="would ignore the sliding window"):
            check_attention(AutoConfig.for_model(family, **CONFIGS[family] | extra), "flash_attention_2")
        return
    config = AutoConfig.for_model(family, **CONFIGS[family])
    if not model_class(config)._supports_flash_attn:
        with pytest.raises(ModelError, match="for which transformers has sdpa and eager"):
            check_attention(config, "flash_attention_2")
        return
    calls = _stand_in_for_flash(monkeypatch)
    loss, gradients = _loss_and_gradients(family, "flash_attention_2", extra)
    wanted, wanted_gradients = _loss_and_gradients(family, "eager", extra)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert not differing_gradients(gradients, wanted_gradients, additions=ADDITIONS)
    assert {tuple(call["cu_seqlens_q"].tolist()) for call in calls} == {(0, 5, 14, 16, 32, 33, 34, 48)}
    for call in calls:
        assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32
        assert torch.equal(call["cu_seqlens_q"], call["cu_seqlens_k"])
        assert (call["max_seqlen_q"], call["max_seqlen_k"], type(call["max_seqlen_q"])) == (16, 16, int)


def _stand_in_for_flash(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """transformers' FlashAttention with kernels in plain torch, of flash-attn 2.8's signature; what its varlen kernel
    is called with.
    """
    calls: list[dict[str, Any]] = []

    def varlen(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float = 1.0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> torch.Tensor:
        calls.append({name: value for name, value in locals().items() if name.startswith(("cu_", "max_"))})
        assert causal
        assert dropout_p == 0
        groups = q.shape[1] // k.shape[1]
        q, k, v = q.transpose(0, 1), *(part.transpose(0, 1).repeat_interleave(groups, 0) for part in (k, v))
        bounds = cu_seqlens_q.tolist()
        outs = []
        for begin, end in pairwise(bounds):
            behind = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
            seen = (behind >= 0) & (behind <= (window_size[0] if window_size[0] >= 0 else end))
            scores = q[:, begin:end] @ k[:, begin:end].mT * softmax_scale
            outs.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, begin:end])
        return torch.cat(outs, 1).transpose(0, 1)

    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: (None, varlen, None, None, None))
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    for name in (
        "_flash_fn",
        "_flash_varlen_fn",
        "_flash_with_kvcache_fn",
        "_pad_fn",
        "_unpad_fn",
        "_process_flash_kwargs_fn",
    ):
        monkeypatch.setattr(flash, name, None)
    monkeypatch.setattr(flash, "_process_with_kvcache_kwargs_fn", None)
    return calls


@pytest.mark.parametrize("tokens", [1023, 1030])
def test_padded_values_change_nothing(tokens: int) -> None:
    query, key = (torch.randn(1, 2, tokens, 6) for _ in range(2))
    value = torch.randn(1, 2, tokens, 4)
    out, _ = attend_by_document(nn.Identity(), query, key, value, None, scaling=0.3)
    scores = (query @ key.mT * 0.3).masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    assert torch.allclose(out.transpose(1, 2), scores.softmax(-1) @ value, atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS)
def test_generation_with_a_cache_equals_that_of_transformers(family: str, tmp_path: Path) -> None:
    answers = []
    for attention in ("sdpa", "eager"):
        lm = build_skeleton(
            AutoConfig.for_model(family, **CONFIGS[family]), attention=attention, dtype=torch.float32, device="cpu"
        )
        initialise_weights(lm, seed=2)
        prompt = torch.tensor([[5, 9, 33, 7]])
        answers.append(
            lm.eval().generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, use_cache=True
            )
        )
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    "unknown",
    [{"position_bias": torch.zeros(1)}, {"softcap": 30.0}, {"is_causal": False}],
    ids=str,
)
def test_what_would_change_the_result_is_not_dropped(unknown: dict[str, Any]) -> None:
    query = torch.randn(1, 2, 4, 6)
    with pytest.raises(ModelError, match=f"Identity passes `{next(iter(unknown))}` to its attention") as caught:
        attend_by_document(nn.Identity(), query, query, query, None, scaling=1.0, **unknown)
    assert caught.value.hint == "set model.attention: eager"
    plain = {"position_ids": torch.arange(4), "softcap": None, "is_causal": True, "output_attentions": False}
    out, _ = attend_by_document(nn.Identity(), query, query, query, None, scaling=1.0, **plain)
    assert torch.equal(out, attend_by_document(nn.Identity(), query, query, query, None, scaling=1.0)[0])


def test_masked_tokens_inside_a_row_are_not_accepted() -> None:
    query = torch.randn(1, 2, 4, 6)
    with pytest.raises(AssertionError):
        attend_by_document(nn.Identity(), query, query, query, torch.ones(1, 4), scaling=1.0)
