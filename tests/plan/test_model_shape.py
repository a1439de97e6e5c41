"""Parameters by arithmetic equal the published totals and transformers' own models."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, PretrainedConfig

from ds_finetune.families.configs import DENSE
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.plan.model_shape import RowCost, Shape, has_known_shape
from tests.conftest import ROOT
from tests.described import described_tree
from tests.model.mxfp4_folder import GPT_OSS
from tests.model.tiny import CONFIGS


def shape_of(source: Mapping[str, Any] | Path, *, scores: int = 0) -> Shape:
    """The shape of the model of a config.json, or of the folder that has it."""
    tree = json.loads((source / "config.json").read_text()) if isinstance(source, Path) else source
    return Shape.of(described_tree(tree, scores=scores))


PUBLISHED = {
    "deepseek-ai--DeepSeek-V3": (671.026, 37.552),
    "deepseek-ai--DeepSeek-R1": (671.026, 37.552),
    "deepseek-ai--DeepSeek-V2": (235.741, None),
    "deepseek-ai--DeepSeek-V2-Lite": (15.706, None),
    "moonshotai--Moonlight-16B-A3B": (15.960, None),
    "Qwen--Qwen3-30B-A3B": (30.532, None),
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B": (1.777, None),
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B": (7.616, None),
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-14B": (14.770, None),
    "deepseek-ai--DeepSeek-R1-Distill-Qwen-32B": (32.764, None),
    "deepseek-ai--DeepSeek-R1-Distill-Llama-8B": (8.030, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(shared_data: Path, name: str) -> None:
    shape = shape_of(shared_data / "configs" / name)
    total, active = PUBLISHED[name]
    assert round(shape.total_params / 1e9, 3) == total
    assert active is None or round(shape.active_params / 1e9, 3) == active


KIMI_K2 = {
    "model_type": "kimi_k2",
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "first_k_dense_replace": 1,
    "vocab_size": 163_840,
    "rope_theta": 50000.0,
}
"""How Kimi-K2-Instruct's config.json differs from DeepSeek-V3's in sizes (arXiv 2507.20534, table 2)."""

GLM_47_FLASH = {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 47,
    "hidden_size": 2048,
    "intermediate_size": 10_240,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "vocab_size": 154_880,
    "max_position_embeddings": 202_752,
    "tie_word_embeddings": False,
}
"""Sizes of GLM-4.7-Flash (defaults of transformers 5.23, configuration_glm4_moe_lite.py)."""

GLM_45 = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 151_552,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
GLM_45_AIR = GLM_45 | {
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "first_k_dense_replace": 1,
}
"""Sizes of GLM-4.5 and GLM-4.5-Air (slime 624b824, scripts/models/glm4.5-355B-A32B.sh and glm4.5-106B-A12B.sh)."""


@pytest.mark.parametrize(("config", "total", "active"), [(GLM_45, 355, 32), (GLM_45_AIR, 106, 12)])
def test_glm_45_has_the_published_parameters(config: dict[str, Any], total: int, active: int) -> None:
    """Published: 355B-A32B and 106B-A12B; transformers' own count is the judge."""
    shape = shape_of(config)
    assert shape.total_params / 1e9 == pytest.approx(total, rel=0.01)
    assert (shape.active_params - shape.parts["embedding"]) / 1e9 == pytest.approx(active, rel=0.07)
    assert shape.total_params == _built(AutoConfig.for_model(**config))


def test_glm_47_flash_has_thirty_billion_parameters() -> None:
    """Published as 30B-A3B; its bf16 files also have the multi-token prediction layer, which is not built."""
    shape = shape_of(GLM_47_FLASH)
    assert round(shape.total_params / 1e9, 3) == 29.943
    assert shape.total_params == _built(AutoConfig.for_model(**GLM_47_FLASH))
    parts = shape.parts
    layer = (parts["attention"] + parts["norms"]) / 47
    layer += sum(parts[part] for part in ("shared experts", "routed experts", "router")) / 46
    with_prediction = shape.total_params + layer + parts["embedding"] + parts["head"] + 2 * 2048**2
    assert round(2 * with_prediction / 1e9, 1) == 62.4


def test_kimi_k2_has_a_trillion_parameters(shared_data: Path) -> None:
    """Published: 1T parameters, of which 32B are active without the embedding; transformers' own count is the judge."""
    v3 = json.loads((shared_data / "configs" / "deepseek-ai--DeepSeek-V3" / "config.json").read_text())
    config = {**v3, **KIMI_K2}
    config.pop("quantization_config")
    shape = shape_of(config)
    assert round(shape.total_params / 1e9, 1) == 1026.4
    assert round((shape.active_params - shape.parts["embedding"]) / 1e9, 1) == 31.7
    assert shape.total_params == _built(AutoConfig.for_model(**config))


@pytest.mark.parametrize(
    ("kind", "changes", "total", "active"),
    [("mixtral", {}, 46.7, 12.9), ("olmoe", {"intermediate_size": 1024}, 6.9, 1.3)],
)
def test_totals_of_their_authors(kind: str, changes: dict[str, int], total: float, active: float) -> None:
    """Mixtral 8x7B (mistral.ai/news/mixtral-of-experts) and OLMoE-1B-7B (arXiv 2409.02060); transformers' default
    configurations are theirs, but for the width of OLMoE's experts.
    """
    shape = shape_of(AutoConfig.for_model(kind, **changes).to_dict())
    assert round(shape.total_params / 1e9, 1) == total
    assert round(shape.active_params / 1e9, 1) == active


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama--Meta-Llama-3.1-70B",
        "Qwen--Qwen3-0.6B",
        "Qwen--Qwen3-235B-A22B",
        "nvidia--DeepSeek-V3.1-NVFP4",
        "deepseek-ai--DeepSeek-V3.2",
    ],
)
def test_totals_of_large_models_equal_those_built_without_memory(shared_data: Path, name: str) -> None:
    """No published total to three digits for these, so transformers' own count is the judge."""
    config = AutoConfig.from_pretrained(shared_data / "configs" / name)
    config.quantization_config = None
    assert shape_of(shared_data / "configs" / name).total_params == _built(config)


@pytest.mark.parametrize(
    ("layers", "experts", "total", "active"), [(24, 32, 20.91, 3.61), (36, 128, 116.83, 5.13)], ids=["20b", "120b"]
)
def test_published_totals_of_gpt_oss(layers: int, experts: int, total: float, active: float) -> None:
    """By its model card (arXiv 2508.10925, table 1), which does not count the embedding as active; widths as in
    transformers' GptOssConfig, whose defaults are those of the larger model.
    """
    config = GPT_OSS | {key: value for key, value in GptOssConfig().to_dict().items() if key in GPT_OSS}
    shape = shape_of(config | {"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": None})
    assert round(shape.total_params / 1e9, 2) == total
    assert round((shape.active_params - shape.parts["embedding"]) / 1e9, 2) == active


def test_glm_5_has_the_published_744_billion_parameters() -> None:
    """The defaults of transformers are the model's sizes; 744B is in Z.ai's announcement."""
    config = AutoConfig.for_model("glm_moe_dsa")
    total = shape_of(config.to_dict()).total_params
    assert round(total / 1e9) == 744
    assert total == _built(config)


UNKNOWN = ("gemma4_text", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_text")
"""Families with layers of unequal heads, or with a state, whose operations the formula does not count."""
VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"tie_word_embeddings": False},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"first_k_dense_replace": 2},
    {"mlp_only_layers": [1]},
    {"moe_layer_freq": 2},
    {"decoder_sparse_step": 2},
    {"num_key_value_heads": 4},
    {"attention_bias": False, "use_qk_norm": False},
    {"mlp_layer_types": ["sparse", "dense", "sparse"]},
]


@pytest.mark.parametrize("family", CONFIGS)
def test_families_without_a_formula(family: str) -> None:
    config = AutoConfig.for_model(family, **CONFIGS[family])
    assert has_known_shape(described_tree(config.to_dict())) == (family not in UNKNOWN)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in UNKNOWN])
def test_totals_equal_the_built_model(family: str, variant: dict[str, Any], tmp_path: Path) -> None:
    """Every key, also where it belongs to another family, from the object and from the file that transformers writes."""
    config = AutoConfig.for_model(family, **CONFIGS[family] | variant)
    config.save_pretrained(tmp_path)
    wanted = _built(config)
    assert shape_of(config.to_dict()).total_params == wanted
    assert shape_of(tmp_path).total_params == wanted


def _built(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def test_a_score_head_takes_the_place_of_the_language_head() -> None:
    for is_tied in (True, False):
        config = DENSE | {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": is_tied}
        plain, scored = shape_of(config), shape_of(config, scores=3)
        layers = plain.multiplied + plain.parts["norms"]
        assert not RowCost.of(described_tree(config, scores=3), "none").per_supervised_token
        assert scored.total_params == plain.parts["embedding"] + layers + 3 * config["hidden_size"]


RUN_FILES = {
    "deepseek_v3": "deepseek-ai--DeepSeek-V3",
    "deepseek_v2_lite": "deepseek-ai--DeepSeek-V2-Lite",
    "moonlight_16b": "moonshotai--Moonlight-16B-A3B",
    "glm_47_flash": "zai-org--GLM-4.7-Flash",
    "qwen3_8b": "Qwen--Qwen3-8B",
    "r1_distill_llama_8b": "deepseek-ai--DeepSeek-R1-Distill-Llama-8B",
    "r1_distill_qwen_1b5": "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B",
    "r1_distill_qwen_7b": "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B",
    "dpo_r1_distill_qwen_7b": "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B",
    "grpo_r1_distill_qwen_1b5_math": "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B",
}
_STATED = {"zai-org--GLM-4.7-Flash": GLM_47_FLASH}
OTHER_STATES = {
    "classify_qwen3_0b6": "Qwen--Qwen3-0.6B",
    "deepseek_v4_flash_lora": "deepseek-ai--DeepSeek-V4-Flash",
    "kto_r1_distill_qwen_7b_lora": "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B",
}
"""Run files whose ranks hold other states than an equal share of 16 bytes a parameter."""


def test_every_run_file_is_in_a_clone() -> None:
    """A folder named in .gitignore is not in a clone, and a glob over an absent folder tests nothing."""
    assert {path.stem for path in (ROOT / "ds_configs" / "runs").glob("*.yaml")} == {*RUN_FILES, *OTHER_STATES}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_parameters_named_in_a_run_file_follow_from_the_shape(shared_data: Path, name: str) -> None:
    text = (ROOT / "ds_configs" / "runs" / f"{name}.yaml").read_text()
    total = shape_of(shared_data / "configs" / OTHER_STATES[name]).total_params
    assert f"{total / 1e9:.3f} B " in text
    assert f"model: {OTHER_STATES[name].replace('--', '/')}\n" in text


@pytest.mark.parametrize("name", RUN_FILES)
def test_memory_named_in_a_run_file_follows_from_the_shape(shared_data: Path, name: str) -> None:
    text = (ROOT / "ds_configs" / "runs" / f"{name}.yaml").read_text()
    found = re.search(
        r"([\d.]+) B parameters x 16 bytes .*?/ (\d+) = ([\d.]+) GiB", text.replace("\n# ", " "), re.DOTALL
    )
    assert found
    total = shape_of(_STATED.get(RUN_FILES[name], shared_data / "configs" / RUN_FILES[name])).total_params
    assert found[1] == f"{total / 1e9:.3f}"
    assert found[3] == f"{total * 16 / int(found[2]) / 2**30:.1f}"
    assert re.search(rf"^(model|  path): {RUN_FILES[name].replace('--', '/')}$", text, re.MULTILINE)
