"""Writes the settings that ONNX Runtime GenAI and transformers.js read beside an ONNX graph."""

import json
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ds_finetune.data.prompt_format import read_generation
from ds_finetune.data.tokenizer_files import has_vocabulary, load_tokenizer
from ds_finetune.export.consumer_tokens import genai_note
from ds_finetune.export.onnx import DATA, MODEL
from ds_finetune.families.table import family_of


def write_settings(folder: Path, config: PretrainedConfig, *, dtype: str, with_cache: bool) -> list[str]:
    """Write genai_config.json, and transformers.js's settings in config.json. Returns notes for the user."""
    for_transformers_js: dict[str, Any] = {"use_external_data_format": 1} if (folder / DATA).is_file() else {}
    for_transformers_js |= {"kv_cache_dtype": "float16"} if dtype == "fp16" else {}
    if for_transformers_js:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = json.dumps({**tree, "transformers.js_config": for_transformers_js}, indent=2, ensure_ascii=False)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    if not with_cache:
        return []
    graph = family_of(config.model_type).onnx
    assert graph is not None
    if graph.attention == "latent":
        # ONNX Runtime GenAI allocates keys and values of one width, `head_size` (src/models/kv_cache.cpp).
        return [
            "no genai_config.json is written: ONNX Runtime GenAI does not support latent attention, whose keys and "
            "values differ in width"
        ]
    settings = _genai_config(folder, config)
    if settings["model"]["eos_token_id"] is None:
        return ["no genai_config.json: neither config.json nor generation_config.json has an eos_token_id"]
    text = json.dumps(settings, indent=2)
    (folder / "genai_config.json").write_text(text + "\n", encoding="utf-8")
    note = genai_note(load_tokenizer(str(folder))) if has_vocabulary(folder) else ""
    return [note] if note else []


def _genai_config(folder: Path, config: PretrainedConfig) -> dict[str, Any]:
    saved = read_generation(folder)
    ids = {
        name: saved.get(f"{name}_token_id", getattr(config, f"{name}_token_id", None)) for name in ("bos", "eos", "pad")
    }
    end = ids["eos"][0] if isinstance(ids["eos"], list) else ids["eos"]
    past, present = "past_key_values.%d", "present.%d"
    decoder = {
        "session_options": {"provider_options": []},
        "filename": MODEL,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "inputs": {
            **{name: name for name in ("input_ids", "attention_mask", "position_ids")},
            **{"past_key_names": f"{past}.key", "past_value_names": f"{past}.value"},
        },
        "outputs": {
            "logits": "logits",
            **{"present_key_names": f"{present}.key", "present_value_names": f"{present}.value"},
        },
    }
    model = {
        # For ONNX Runtime GenAI, "llama" means any decoder with a standard key/value cache.
        "type": "llama",
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        **({} if ids["bos"] is None else {"bos_token_id": ids["bos"]}),
        "eos_token_id": ids["eos"],
        # ONNX Runtime GenAI needs a padding token to fill up finished answers of a batch.
        "pad_token_id": end if ids["pad"] is None else ids["pad"],
        "decoder": decoder,
    }
    sampling = ("do_sample", "temperature", "top_k", "top_p")
    search = {name: saved[name] for name in sampling if saved.get(name) is not None}
    return {
        "model": model,
        "search": {"max_length": config.max_position_embeddings, "past_present_share_buffer": False, **search},
    }
