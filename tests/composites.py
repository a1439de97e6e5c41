"""Tiny models of text and images, randomly initialised and saved by transformers, and their text parts alone."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForPreTraining,
    Glm4MoeConfig,
    PretrainedConfig,
    Qwen3_5Tokenizer,
    Qwen3Config,
)
from transformers.core_model_loading import revert_weight_conversion

from tests.json_files import change_json
from tests.running import TINY, tiny_task

_TEXT = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYES |= {"image_size": 28, "patch_size": 14}
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4}
_LINEAR |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS |= {"shared_expert_intermediate_size": 24}
_LATENT = {"model_type": "kimi_k2", "vocab_size": 512, "max_position_embeddings": 128, **TINY, "topk_group": 1}
_LATENT |= {"qk_rope_head_dim": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
_QWEN_EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
_QWEN_EYES |= {"patch_size": 14, "num_position_embeddings": 16}
_SECTIONS = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, **_WINDOWS, "model_type": "gemma3_text"},
        "vision_config": {**_EYES, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_EYES, "model_type": "pixtral"},
        "tie_word_embeddings": False,
    },
    "mistral3_of_mistral4": {
        "model_type": "mistral3",
        "text_config": {
            **{**_LATENT, "model_type": "mistral4"},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16},
                **{"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
        "vision_config": {**_EYES, "model_type": "pixtral"},
        "tie_word_embeddings": False,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_EYES, "model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
        "tie_word_embeddings": False,
    },
    "kimi_k25": {
        "text_config": _LATENT,
        "vision_config": {**_EYES, "merge_kernel_size": [1, 1], "pos_emb_height": 4, "pos_emb_width": 4},
        "tie_word_embeddings": False,
    },
    "gemma4": {
        "text_config": {
            **{**_TEXT, **_WINDOWS, "model_type": "gemma4_text", "num_kv_shared_layers": 0, "global_head_dim": 8},
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512},
        },
        "vision_config": {**_EYES, "num_key_value_heads": 2, "head_dim": 16},
        "audio_config": None,
    },
    "qwen3_vl": {
        "text_config": {**_TEXT, "model_type": "qwen3_vl_text", "rope_parameters": _SECTIONS},
        "vision_config": {**_QWEN_EYES, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": True,
    },
    "glm4v_moe": {
        "text_config": {
            **{**_TEXT, "model_type": "glm4v_moe_text", "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "attention_bias": True},
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        },
        "vision_config": {
            "depth": 1,
            "num_heads": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
        },
        "tie_word_embeddings": False,
    },
    "qwen3_5": {
        "text_config": {**_TEXT, **_LINEAR, "model_type": "qwen3_5_text"},
        "vision_config": {**_QWEN_EYES, "deepstack_visual_indexes": []},
    },
    "qwen3_5_moe": {
        "text_config": {**_TEXT, **_LINEAR, **_EXPERTS, "model_type": "qwen3_5_moe_text"},
        "vision_config": {**_QWEN_EYES, "deepstack_visual_indexes": []},
    },
    "llama4": {
        "text_config": {
            **{**_TEXT, "model_type": "llama4_text", "intermediate_size_mlp": 48, "num_local_experts": 4},
            **{"no_rope_layers": [1, 0], "moe_layers": [1], "attention_chunk_size": 16, "floor_scale": 16},
        },
        "vision_config": {
            **{**_EYES, "intermediate_size": 128, "vision_output_dim": 32},
            **{"projector_input_dim": 32, "projector_output_dim": 32},
        },
    },
    "minimax_m3_vl": {
        "text_config": {
            **{**_TEXT, "dense_intermediate_size": 48, "rotary_dim": 4, "partial_rotary_factor": 0.5},
            **{"shared_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
            # As published: a type of which the text part is not, and keys that transformers replaces by others.
            **{"model_type": "minimax_m2", "hidden_act": "swigluoai", "moe_layer_freq": [0, 1]},
            "sparse_attention_config": {
                **{"use_sparse_attention": True, "sparse_num_index_heads": 2, "sparse_index_dim": 8},
                **{"sparse_topk_blocks": 2, "sparse_block_size": 8, "sparse_local_block": 1},
                "sparse_attention_freq": [0, 1],
            },
        },
        "vision_config": _EYES,
        "projector_hidden_size": 32,
    },
}
SPELLINGS = dict.fromkeys(("gemma4", "qwen3_vl", "qwen3_5", "glm4v_moe", "qwen3_5_moe"), "model.language_model.")
"""Beginnings of the published names of a text part, where they are not `language_model.model.`."""


def _write_qwen_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes: whatever tokenizer.json says, transformers splits words of this type as Qwen does."""
    special = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>", "unk_token": "<|unk|>"}
    users = ["<|user|>", "<|assistant|>"]
    tokens = [*special.values(), *users, *sorted(ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Qwen3_5Tokenizer(vocab=vocabulary, merges=[], **special, additional_special_tokens=users)
    made.chat_template = (folder / "chat_template.jinja").read_text()
    made.save_pretrained(folder)


def _config(kind: str, tree: Mapping[str, Any]) -> PretrainedConfig:
    config = CONFIG_MAPPING[tree.get("model_type", kind)](**json.loads(json.dumps(tree)))
    # transformers 5.23 would save the text part by the names of the type that the section names.
    vars(config.text_config).pop("model_type", None)
    return config


def published_tensors(kind: str, text_tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a text model with the names and shapes that they have in a published composite model."""
    if kind == "minimax_m3_vl":
        with torch.device("meta"):
            whole = AutoModelForMultimodalLM.from_config(_config(kind, CONFIGS[kind]))
        names = {key: key.replace("model.", "model.language_model.", 1) for key in text_tensors}
        return revert_weight_conversion(whole, {names[key]: tensor for key, tensor in text_tensors.items()})
    start = SPELLINGS.get(kind, "language_model.model.")
    head = "lm_head." if kind in SPELLINGS else "language_model.lm_head."
    tensors = {
        name.replace("model.", start, 1) if name.startswith("model.") else name.replace("lm_head.", head, 1): tensor
        for name, tensor in text_tensors.items()
    }
    if kind in ("glm4v_moe", "kimi_k25"):  # published with a tensor for each expert
        return tensors
    for experts in {name.partition(".0.gate_proj")[0] for name in tensors if ".experts.0.gate_proj" in name}:
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{number}.{part}_proj.weight") for number in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}.down_proj": down}
    return tensors


def composite_task(kind: str, folder: Path, *, vocab_size: int | None = None, **sections: Any) -> Path:
    """A run file for a tiny composite model in `folder`/model, whose text part has `vocab_size` tokens; the text part
    alone is in `folder`/text.
    """
    run_file = tiny_task(folder, **{"model": {"weights": "load"}, **sections})
    tree = json.loads(json.dumps(CONFIGS[kind]))
    tree["text_config"]["vocab_size"] = vocab_size or tree["text_config"]["vocab_size"]
    config = _config(kind, tree)
    torch.manual_seed(3)
    whole = AutoModelForMultimodalLM.from_config(config).float()
    with torch.no_grad():
        biases = (each for name, each in whole.named_buffers() if name.endswith("e_score_correction_bias"))
        for tensor in (*whole.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor) * 0.05)
    if kind.startswith("qwen"):
        _write_qwen_tokenizer(folder / "model")
    shutil.copytree(folder / "model", folder / "text")
    # Qwen publishes all experts of a layer in one tensor.
    whole.save_pretrained(folder / "model", save_original_format=kind != "qwen3_5_moe")
    change_json(folder / "model" / "config.json", {"text_config": tree["text_config"]})
    as_text = {"qwen3_vl": Qwen3Config, "glm4v_moe": Glm4MoeConfig}.get(kind)
    text_config = as_text(**tree["text_config"]) if as_text else config.text_config
    text_config.tie_word_embeddings = config.tie_word_embeddings
    # transformers 5.23 leaves Mistral 4 out of AutoModelForCausalLM.
    factory = AutoModelForPreTraining if text_config.model_type == "mistral4" else AutoModelForCausalLM
    text = factory.from_config(text_config).float()
    decoder = whole.get_decoder()
    # transformers 5.23 takes Llama 4's causal LM for its decoder.
    text.model.load_state_dict(getattr(decoder, "model", decoder).state_dict())
    text.lm_head.load_state_dict(whole.get_output_embeddings().state_dict())
    text.save_pretrained(folder / "text")
    if text_config.model_type == "mistral4":
        change_json(folder / "text" / "config.json", {"model_type": "mistral4_text"})
    if kind == "kimi_k25":
        # transformers 5.23 saves the text part's layers as `blocks`, a name of the vision tower that is published.
        file = folder / "model" / "model.safetensors"
        renamed = {key.replace("model.blocks", "model.layers"): value for key, value in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    return run_file
