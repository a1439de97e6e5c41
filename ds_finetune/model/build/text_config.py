"""Configuration of the text part of a composite model, which combines text with images or sound."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.console.quiet import show_loading_as_phase
from ds_finetune.errors import ModelError
from ds_finetune.families.table import TEXT_PARTS
from ds_finetune.families.text_part import TEXT_CONFIG, is_composite, text_name
from ds_finetune.foreign.auto_configs import CONFIG_MAPPING, AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM, AutoModelForMultimodalLM
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.weights.names import differences

_OF_THE_WHOLE = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
_QUANTISATION = "quantization_config"


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Configuration of the language model in `config`. For a composite model it is the text part's configuration, with
    token ids and tied embeddings of the full model; for others it is `config` itself.
    """
    text = getattr(config, TEXT_CONFIG, None)
    if not isinstance(text, PretrainedConfig):
        return config
    # transformers 5.23 keeps the section's `model_type`, which in MiniMax M3 is not that of the class.
    vars(text).pop("model_type", None)
    if kind := TEXT_PARTS.get(text.model_type):
        text = CONFIG_MAPPING[kind].from_dict({**text.to_dict(), "model_type": kind})
    for key in _OF_THE_WHOLE:
        if (value := getattr(config, key, None)) is not None:
            setattr(text, key, [*value] if isinstance(value, tuple) else value)
    return text


def check_text_part(config: PretrainedConfig, tree: Mapping[str, Any], task: str, label: str) -> None:
    """ModelError if `config`, read from `tree`, is a composite model whose text part cannot be trained for `task`."""
    text = text_config(config)
    if text is config:
        return
    subject = f"{label}: model_type `{config.model_type}` combines text with images or sound, and"
    part = f"its text part `{text.model_type}`"
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"{subject} transformers {transformers.__version__} has no causal LM of {part}",
            hint="train a text model, or a model whose text part is a causal LM of transformers",
        )
    if type(config) not in AutoModelForMultimodalLM._model_mapping or not is_composite(tree):
        where = f"transformers {transformers.__version__} has no class that generates text with it"
        raise ModelError(
            f"{subject} {part} cannot be exported: "
            f"{where if is_composite(tree) else f'config.json has no {TEXT_CONFIG}'}",
            hint="train a text model" if is_composite(tree) else "load it with transformers and save it again",
        )
    if task != "causal_lm":
        raise ModelError(
            f"{subject} {part} is trained as a language model only",
            hint="train a text model as a classifier or reward model",
        )
    if getattr(config, _QUANTISATION, None) is not None or getattr(text, _QUANTISATION, None) is not None:
        raise ModelError(
            f"{subject} its {_QUANTISATION} is not supported",
            hint=f"use a bf16 copy of the model, whose config.json has no {_QUANTISATION}",
        )


def check_other_parts(folder: Path) -> tuple[str, ...]:
    """A note on tensors of the composite model in `folder` that transformers' class does not know, or on a package that
    this class needs and that is not installed. ModelError if the parts for other media lack tensors or have wrong
    shapes, because transformers would not load an export.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = AutoModelForMultimodalLM._model_mapping[type(config)]
    others = HubFolder(folder).others
    stored = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in others.items()}
    how = {"device_map": "meta", "ignore_mismatched_sizes": True, "output_loading_info": True}
    show_loading_as_phase()
    # transformers' own report would list the complete text part as missing.
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        _, found = kind.from_pretrained(None, config=config, state_dict=stored, **how)
    except ImportError as error:
        return (f"the parts for images or sound in {folder} are not checked: {' '.join(str(error).split())}",)
    finally:
        logging.disable(before)
    wrong = differences(
        {name: () for name in found["missing_keys"] if text_name(name) is None}
        | {name: tuple(own) for name, _, own in found["mismatched_keys"]},
        {name: tuple(shape) for name, shape, _ in found["mismatched_keys"]},
    )
    if wrong:
        raise ModelError(
            f"the parts for images or sound in {folder}, which exports copy, do not fit {kind.__name__}: {wrong}",
            hint="download the model again, or save it complete with save_pretrained of transformers",
        )
    unknown = sorted(found["unexpected_keys"])
    known = f"{len(unknown)} tensors that {kind.__name__} does not know, the first is `{min(unknown, default='')}`"
    return (f"{folder} has {known}; exports copy them",) if unknown else ()


def text_module(folder: Path) -> str:
    """Name of the text decoder in transformers' class of a composite model."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config, trust_remote_code=False)
    decoder = model.get_decoder()
    correct_decoder_name(decoder)
    decoder = decoder.base_model
    return next(name for name, module in model.named_modules() if module is decoder)


def correct_decoder_name(model: PreTrainedModel) -> None:
    """Let `base_model` of a Llama 4 causal LM return its decoder. The class names a submodule that only the multimodal
    model has (transformers 5.23, llama4/modeling_llama4.py:571), so it would return the causal LM itself.
    """
    if model.base_model is model and hasattr(model, "model"):
        model.base_model_prefix = "model"
