"""Settings of GGUF files, by which llama.cpp gives the tokens of transformers (test_llama_cpp.py)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_configs import AutoConfig
from tests.export.gguf.models import MODELS
from tests.model.weights.test_weights import CONFIGS

pytest.importorskip("gguf", reason="the gguf extra is not installed: pip install 'ds_finetune[gguf]'")

from ds_finetune.export.gguf.settings import add_settings, rope_factors

YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 4.0,
    "rope_scaling_orig_ctx_len": 32,
    "rope_scaling_yarn_beta_fast": 32.0,
    "rope_scaling_yarn_beta_slow": 1.0,
}
LATENT = {
    "head_count_kv": 1,
    "kv_lora_rank": 16,
    "key_length": 16 + 8,
    "value_length": 16,
    "key_length_mla": 16 + 8,
    "value_length_mla": 12,
    "rope_dimension_count": 8,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "rope_scaling_yarn_log_mul": pytest.approx(0.1 * 0.707),
}
EXPECTED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **YARN,
        **LATENT,
        "q_lora_rank": 24,
        "expert_count": 8,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    },
    "deepseek_v2": {**YARN, **LATENT, "expert_gating_func": 1, "expert_weights_norm": False},
    "deepseek_v2_lite": {"q_lora_rank": 0},
    # 1.3 by 0.1 ln 4 + 1, which llama.cpp multiplies it by.
    "qwen2-yarn": {**YARN, "rope_scaling_attn_factors": pytest.approx(1.3 / 1.1386294), "head_count_kv": 2},
    "glm4_moe": {"key_length": 12, "rope_dimension_count": 6, "expert_gating_func": 2, "expert_weights_norm": True},
    "gpt_oss": {"sliding_window": 8, "expert_used_count": 2},
}


class Settings(dict[str, Any]):
    """What is added to a GGUF, in place of its writer."""

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        return lambda value: self.update({name.removeprefix("add_"): getattr(value, "value", value)})


def config_of(name: str, **changes: object) -> PretrainedConfig:
    family, own = MODELS[name]
    return AutoConfig.for_model(family, **CONFIGS[family] | own | changes)


@pytest.mark.parametrize("name", EXPECTED)
def test_settings_of(name: str) -> None:
    # transformers ignores the key in DeepSeek-V2.
    config = config_of(name, **({"norm_topk_prob": True} if name.startswith("deepseek") else {}))
    found: Any = Settings()
    add_settings(found, config, family_of(config.model_type))
    assert {key: found.get(key) for key in EXPECTED[name]} == EXPECTED[name]


def test_frequencies_of_llama_3_are_divided() -> None:
    factors = rope_factors(config_of("llama3"))
    assert factors is not None
    # Wavelengths above 32 / 1 tokens grow 8 times, those below 32 / 4 not at all.
    assert factors.tolist() == pytest.approx([1.0, 3.2995, *[8.0] * 6], rel=1e-4)
    assert factors.dtype == torch.float32
    assert rope_factors(config_of("llama")) is None
