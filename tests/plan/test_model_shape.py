"""Parameters by arithmetic equal the published totals and transformers' own models."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig, PretrainedConfig

from ds_finetune.errors import ConfigError
from ds_finetune.plan.model_shape import Shape
from tests.conftest import ROOT
from tests.model.mxfp4_folder import GPT_OSS
from tests.model.tiny import CONFIGS

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
    shape = Shape.of(shared_data / "configs" / name)
    total, active = PUBLISHED[name]
    assert round(shape.total_params / 1e9, 3) == total
    assert active is None or round(shape.active_params / 1e9, 3) == active


@pytest.mark.parametrize(
    "name",
    ["meta-llama--Meta-Llama-3.1-70B", "Qwen--Qwen3-0.6B", "Qwen--Qwen3-235B-A22B", "nvidia--DeepSeek-V3.1-NVFP4"],
)
def test_totals_of_large_models_equal_those_built_without_memory(shared_data: Path, name: str) -> None:
    """No published total to three digits for these, so transformers' own count is the judge."""
    config = AutoConfig.from_pretrained(shared_data / "configs" / name)
    config.quantization_config = None
    assert Shape.of(shared_data / "configs" / name).total_params == _built(config)


@pytest.mark.parametrize(
    ("layers", "experts", "total", "active"), [(24, 32, 20.91, 3.61), (36, 128, 116.83, 5.13)], ids=["20b", "120b"]
)
def test_published_totals_of_gpt_oss(layers: int, experts: int, total: float, active: float) -> None:
    """By its model card (arXiv 2508.10925, table 1), which does not count the embedding as active; widths as in
    transformers' GptOssConfig, whose defaults are those of the larger model.
    """
    config = GPT_OSS | {key: value for key, value in GptOssConfig().to_dict().items() if key in GPT_OSS}
    shape = Shape.of(config | {"num_hidden_layers": layers, "num_local_experts": experts})
    assert round(shape.total_params / 1e9, 2) == total
    assert round((shape.active_params - shape.embedding) / 1e9, 2) == active


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
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_totals_equal_the_built_model(family: str, variant: dict[str, Any], tmp_path: Path) -> None:
    """Every key, also where it belongs to another family, from the object and from the file that transformers writes."""
    config = AutoConfig.for_model(family, **CONFIGS[family] | variant)
    config.save_pretrained(tmp_path)
    wanted = _built(config)
    assert Shape.of(config.to_dict()).total_params == wanted
    assert Shape.of(tmp_path).total_params == wanted


def _built(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def test_flops_by_hand() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "vocab_size": 10,
        "intermediate_size": 16,
    }
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    attention = 2 * (2 * 4 + 2 * 4) * 100 / 2
    assert Shape.of(config).flops_per_token(100) == 6 * (2 * layer + 8 * 10 + attention)
    assert Shape.of(config).flops_per_token(100, mean_attended=0) == 6 * (2 * layer + 8 * 10)


def test_unknown_model_type_names_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        Shape.of({"model_type": "mamba"})
    assert "model_type `mamba`" in caught.value.message
    assert "deepseek_v3" in caught.value.hint


def test_an_absent_key_is_named() -> None:
    config = {"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"]}
    del config["first_k_dense_replace"]
    with pytest.raises(ConfigError, match="of a deepseek_v3 model has no 'first_k_dense_replace'"):
        Shape.of(config)


RUN_FILES = {
    "deepseek_v3": "deepseek-ai--DeepSeek-V3",
    "deepseek_v2_lite": "deepseek-ai--DeepSeek-V2-Lite",
    "moonlight_16b": "moonshotai--Moonlight-16B-A3B",
    "qwen3_8b": "Qwen--Qwen3-8B",
    "r1_distill_llama_8b": "deepseek-ai--DeepSeek-R1-Distill-Llama-8B",
    "r1_distill_qwen_1b5": "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B",
    "r1_distill_qwen_7b": "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B",
    "dpo_r1_distill_qwen_7b": "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B",
}
OTHER_STATES = {
    "classify_qwen3_0b6": "Qwen--Qwen3-0.6B",
    "kto_r1_distill_qwen_7b_lora": "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B",
}
"""Run files whose ranks hold other states than an equal share of 16 bytes a parameter."""


def test_every_run_file_is_in_a_clone() -> None:
    """A folder named in .gitignore is not in a clone, and a glob over an absent folder tests nothing."""
    assert {path.stem for path in (ROOT / "ds_configs" / "runs").glob("*.yaml")} == {*RUN_FILES, *OTHER_STATES}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_parameters_named_in_a_run_file_follow_from_the_shape(shared_data: Path, name: str) -> None:
    text = (ROOT / "ds_configs" / "runs" / f"{name}.yaml").read_text()
    total = Shape.of(shared_data / "configs" / OTHER_STATES[name]).total_params
    assert f"{total / 1e9:.3f} B " in text
    assert f"model: {OTHER_STATES[name].replace('--', '/')}\n" in text


@pytest.mark.parametrize("name", RUN_FILES)
def test_memory_named_in_a_run_file_follows_from_the_shape(shared_data: Path, name: str) -> None:
    text = (ROOT / "ds_configs" / "runs" / f"{name}.yaml").read_text()
    found = re.search(
        r"([\d.]+) B parameters x 16 bytes .*?/ (\d+) = ([\d.]+) GiB", text.replace("\n# ", " "), re.DOTALL
    )
    assert found
    total = Shape.of(shared_data / "configs" / RUN_FILES[name]).total_params
    assert found[1] == f"{total / 1e9:.3f}"
    assert found[3] == f"{total * 16 / int(found[2]) / 2**30:.1f}"
    assert f"model: {RUN_FILES[name].replace('--', '/')}\n" in text
