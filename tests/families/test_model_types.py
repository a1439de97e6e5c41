"""Model types that transformers does not know are read, built and written under their own names."""

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig as PlainAutoConfig
from transformers import AutoModelForCausalLM as PlainAutoModel

from ds_finetune.families.table import BUILT_AS, family_of
from ds_finetune.foreign.auto_configs import CONFIG_MAPPING, OWN_TYPES, AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.model.build.skeleton import has_class
from ds_finetune.reference.selftest.cells import hf_config
from tests.conftest import ROOT

AUTO_CLASSES = {"AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer"}
_OF_ITS_OWN = {"auto_configs.py", "auto_models.py", "plain_transformers.py", "transformers_model_types.py"}
"""The files that make these classes know the types, and the one that runs without this package."""


@pytest.mark.parametrize("name", [name for name in BUILT_AS if not family_of(name).is_generic])
def test_a_folder_is_read_and_written_under_its_own_name(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(name))
    model.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == name
    published = {"exaone": "transformer.h.0.mlp.c_fc_0.", "sarvam_moe": ".0.attention.query_key_value."}
    assert any(published.get(name, ".experts.0.gate_proj.") in key for key in load_file(tmp_path / "model.safetensors"))
    read, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(tensor, read.state_dict()[key]) for key, tensor in model.state_dict().items())
    assert has_class(hf_config(name), "sequence_classification") == (name == "kimi_k2")


_PUBLISHED: dict[str, dict[str, Any]] = {
    "exaone": {
        "activation_function": "silu",
        "bos_token_id": 1,
        "embed_dropout": 0.0,
        "hidden_size": 2560,
        "intermediate_size": 7168,
        "layer_norm_epsilon": 1e-06,
        "num_attention_heads": 32,
        "num_layers": 30,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "sarvam_mla": {
        "head_dim": 576,
        "num_experts": 16,
        "num_shared_experts": 2,
        "q_head_dim": 192,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "deepseek_yarn",
        },
        "rope_theta": 10000.0,
    },
    "sarvam_moe": {
        "num_experts": 16,
        "num_shared_experts": 2,
        "num_hidden_layers": 3,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 4096, "rope_type": "yarn"},
        "rope_theta": 8000000,
        "use_qkv_bias": True,
    },
}
_READ: dict[str, dict[str, Any]] = {
    # transformers 5.24, exaone/configuration_exaone.py
    "exaone": {"num_hidden_layers": 30, "rms_norm_eps": 1e-06, "hidden_act": "silu", "num_key_value_heads": 8}
    | {"vocab_size": 102400, "max_position_embeddings": 4096, "eos_token_id": 361, "pad_token_id": 0, "head_dim": 80},
    # transformers 5.24, sarvam_mla/configuration_sarvam_mla.py
    "sarvam_mla": {"n_routed_experts": 16, "n_shared_experts": 2, "head_dim": 64, "q_lora_rank": None, "n_group": 1}
    | {"topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 32, "num_key_value_heads": 64},
    # transformers 5.24, sarvam_moe/configuration_sarvam_moe.py
    "sarvam_moe": {"n_routed_experts": 16, "n_shared_experts": 2, "head_dim": 64, "attention_bias": True}
    | {"num_key_value_heads": 4, "use_qk_norm": True, "routed_scaling_factor": 2.5, "num_experts_per_tok": 6},
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_every_release_reads_a_published_config_as_the_first_one_with_the_type(name: str) -> None:
    newer = family_of(name).newer
    assert newer is not None
    for tree in (_PUBLISHED[name], {}):
        config = AutoConfig.for_model(name, **tree)
        older = CONFIG_MAPPING[BUILT_AS[name]](**newer.older_config(tree)).to_dict()
        if name not in OWN_TYPES:
            # transformers has the type, so this compares with its own class.
            theirs = config.to_dict()
            assert {key: older[key] for key in theirs if key != "model_type"} == {
                key: theirs[key] for key in theirs if key != "model_type"
            }
    config = AutoConfig.for_model(name, **_PUBLISHED[name])
    assert {key: getattr(config, key) for key in _READ[name]} == _READ[name]
    scaling = {key: value for key, value in _PUBLISHED[name]["rope_scaling"].items() if key != "type"}
    kind = scaling.get("rope_type", "yarn")
    assert config.rope_parameters == scaling | {"rope_type": kind, "rope_theta": _PUBLISHED[name]["rope_theta"]}


def test_every_module_takes_these_classes_from_here() -> None:
    """A class of plain transformers would know such types only where another module had been imported before."""
    assert PlainAutoConfig is AutoConfig
    assert PlainAutoModel is AutoModelForCausalLM
    for path in (ROOT / "ds_finetune").rglob("*.py"):
        if path.name in _OF_ITS_OWN:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                assert not AUTO_CLASSES & {alias.name for alias in node.names}, path
