"""Encoders: position ids and token types of their inputs, and classification of documents by transformers' heads."""

from collections.abc import Collection

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.errors import ModelError
from ds_finetune.families.family import Encoder
from ds_finetune.families.table import family_of
from ds_finetune.objectives.objective import Examples


def encoder_of(hf_config: PretrainedConfig) -> Encoder | None:
    """Properties of the configuration's encoder, from the table of families; None for a causal model."""
    return family_of(hf_config.model_type).encoder


def check_encoder(hf_config: PretrainedConfig, *, attention: str, objective: str) -> None:
    """ModelError if an encoder is not trained as a classifier, has causal attention, or would use an `attention` that
    does not separate documents and padding.

    transformers 5.23 makes masks of encoders without position ids (masking_utils.py:1076), so with its own attention
    packed documents would attend to each other.
    """
    if encoder_of(hf_config) is None:
        return
    kind = hf_config.model_type
    for what, is_set, hint in (
        (f"objective {objective}", objective != "classification", "set objective: classification"),
        (f"model.attention {attention}", attention not in OWN_ATTENTIONS, "set model.attention: sdpa"),
        (
            "is_decoder true in config.json",
            getattr(hf_config, "is_decoder", False),
            "set is_decoder to false, or train a causal model type",
        ),
    ):
        if is_set:
            raise ModelError(f"{what} is not supported for encoders such as model_type `{kind}`", hint=hint)


def first_position(hf_config: PretrainedConfig) -> int:
    """Position id of the first token of a document (transformers 5.23, roberta/modeling_roberta.py:142-156)."""
    encoder = encoder_of(hf_config)
    return hf_config.pad_token_id + 1 if encoder is not None and encoder.positions_follow_padding else 0


def max_positions(hf_config: PretrainedConfig) -> int | None:
    """Maximum number of tokens of a document; None if the configuration has no limit."""
    positions = getattr(hf_config, "max_position_embeddings", None)
    return positions - first_position(hf_config) if positions else None


def published_name(key: str, expected: Collection[str], prefix: str) -> str:
    """Name of a checkpoint's tensor `key` in the model, whose names are `expected`, as in transformers 5.23.

    Checkpoints without a head leave out `prefix` (core_model_loading.py:1567), and old checkpoints call a norm's
    parameters gamma and beta (conversion_mapping.py:1777).
    """
    name = key.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
    full_name = f"{prefix}.{name}"
    return full_name if name not in expected and full_name in expected else name


def encoder_inputs(
    hf_config: PretrainedConfig, position_ids: torch.Tensor, token_types: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Keyword arguments for an encoder's forward, from position ids and token types, int64 [rows, tokens]. The given
    position ids are 0 at the start of each document.
    """
    encoder = encoder_of(hf_config)
    assert encoder is not None
    inputs = {"position_ids": position_ids + first_position(hf_config)}
    if encoder.has_token_types and token_types is not None:
        inputs["token_type_ids"] = token_types
    return inputs


def encoder_scores(lm: PreTrainedModel, hidden: torch.Tensor, examples: Examples) -> torch.Tensor:
    """Run the classification head for each document. Returns fp32 [documents, outputs].

    `hidden` [rows, tokens, width] are the last hidden states. transformers' head reads the first token of a sequence,
    so each document is passed as a sequence of one state.
    """
    encoder = encoder_of(lm.config)
    assert encoder is not None
    states = hidden.flatten(0, 1)
    if encoder.pooling_key is not None and getattr(lm.config, encoder.pooling_key) == "mean":
        index, number = examples.index.flatten(), len(examples.starts)
        # An additional row sums padding, because selecting the other tokens would synchronise host and GPU.
        sums = hidden.new_zeros(number + 1, hidden.shape[-1], dtype=torch.float32)
        sums = sums.index_add(0, index.where(index >= 0, number), states.float())[:-1]
        vectors = (sums / (examples.ends - examples.starts + 1)[:, None]).to(hidden.dtype)
    else:
        vectors = states.index_select(0, examples.starts)
    vectors = vectors.unsqueeze(1)
    for name in encoder.head:
        vectors = lm.get_submodule(name)(vectors)
    return vectors.flatten(1).float()
