"""Attention of ours takes a cache by the keyword of transformers 5.24 and by that of the releases before it."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from ds_finetune.foreign.transformers_attention import take_cache
from ds_finetune.model.attention.by_document import BY_DOCUMENT
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.weights.load import initialise_weights
from ds_finetune.reference.selftest.cells import hf_config


@pytest.mark.parametrize("keyword", ["past_key_values", "cache"])
@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_attention_reads_and_fills_it(family: str, keyword: str) -> None:
    lm = build_skeleton(hf_config(family), attention=BY_DOCUMENT, dtype=torch.float32, device="cpu").eval()
    initialise_weights(lm, seed=1)
    attention, hidden = lm.base_model.layers[0].self_attn, torch.randn(1, 6, lm.config.hidden_size)
    cache, found = DynamicCache(config=lm.config), []
    for positions in torch.arange(6)[None].split([4, 1, 1], dim=1):
        part = hidden[:, positions[0]]
        found.append(attention(part, **_inputs(lm, part, positions), **{keyword: cache})[0])
    assert cache.get_seq_length() == 6
    whole = attention(hidden, **_inputs(lm, hidden, torch.arange(6)[None]))[0]
    assert torch.allclose(torch.cat(found, dim=1), whole, atol=1e-5 * float(whole.abs().max()))


def _inputs(lm: Any, hidden: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    rotary = lm.base_model.rotary_emb
    if lm.config.model_type != "deepseek_v4":
        return {"position_embeddings": rotary(hidden, positions), "attention_mask": None}
    angles = {kind: rotary(hidden, position_ids=positions, layer_type=kind) for kind in ("main", "compress")}
    return {"position_embeddings": angles, "attention_mask": None, "position_ids": positions}


def test_a_cache_is_found_under_a_keyword_of_a_later_release() -> None:
    cache = DynamicCache()
    given = {"past_key_values": None, "kv_cache": cache, "use_cache": True}
    assert take_cache(given) is cache
    assert given == {"use_cache": True}
    assert take_cache(given) is None
