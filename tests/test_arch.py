"""Parameters by arithmetic equal the published totals and transformers' own models."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.arch import Shape
from ds_finetune.errors import ConfigError
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


@pytest.mark.parametrize("family", CONFIGS)
def test_totals_equal_the_built_model(family: str) -> None:
    config = AutoConfig.for_model(family, **CONFIGS[family])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert Shape.of(config.to_dict()).total_params == sum(p.numel() for p in model.parameters())


def test_flops_by_hand() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 10, "intermediate_size": 16}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    attention = 2 * (2 * 4 + 2 * 4) * 100 / 2
    assert Shape.of(config).flops_per_token(100) == 6 * (2 * layer + 8 * 10 + attention)


def test_unknown_model_type_names_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        Shape.of({"model_type": "mamba"})
    assert "model_type `mamba`" in caught.value.message
    assert "deepseek_v3" in caught.value.hint
