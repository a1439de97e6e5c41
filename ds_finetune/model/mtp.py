"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): an additional decoder layer predicts the token
after the next, from a hidden state of the model and the embedding of the next token.

The layer is `model.layers.N` with N = `num_hidden_layers`. So its tensors have their published names, and parallel
modules, ZeRO and checkpoints treat it like other layers. The model's own forward skips it (transformers 5.23 runs
`layers[: config.num_hidden_layers]`, deepseek_v3/modeling_deepseek_v3.py:621). DeepSeek-V4's forward runs all layers,
so there the layer is inside a module that returns its input.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from ds_finetune.families.family import layer_of
from ds_finetune.families.table import family_of
from ds_finetune.foreign.guard import replaced
from ds_finetune.foreign.transformers_attention import stream_classes
from ds_finetune.foreign.transformers_models import replaced_layers

_BUILT = "ds_finetune_mtp_layers"
"""Attribute of a model configuration with the number of multi-token prediction layers to build. It is never saved."""
PREDICTION_LAYERS = "num_nextn_predict_layers"
"""Key of config.json for the number of multi-token prediction layers (DeepSeek-V3)."""
_PER_LAYER: Mapping[str, str | None] = {"layer_types": None, "mlp_layer_types": None, "indexer_types": "full"}
"""config.json keys whose lists have an entry for each layer. The value is the entry for a multi-token prediction layer;
None means the last layer's entry. A published prediction layer has its own indexer, even if the last layer has none.
"""
_COMPRESSED: Mapping[str, str | int] = {
    "layer_types": "sliding_attention",
    "mlp_layer_types": "moe",
    "compress_ratios": 0,
}
"""Entries of DeepSeek-V4's multi-token prediction layer in lists of config.json: no compressor, no expert table."""


def set_mtp_layers(hf_config: PretrainedConfig, layers: int) -> None:
    """Set the number of multi-token prediction layers in models built from `hf_config`."""
    setattr(hf_config, _BUILT, layers)


def mtp_layers(hf_config: PretrainedConfig) -> range:
    """Numbers of the multi-token prediction layers in models built from `hf_config`.

    transformers' `num_mtp_layers` is not used: it is 1 if config.json does not set it.
    """
    # Some model types without these layers have no `num_hidden_layers` (transformers 5.23, BltConfig).
    first = getattr(hf_config, "num_hidden_layers", 0)
    return range(first, first + getattr(hf_config, _BUILT, 0))


def is_mtp_tensor(name: str, hf_config: PretrainedConfig) -> bool:
    """Whether the tensor `name` of the model belongs to a multi-token prediction layer."""
    return layer_of(name) in mtp_layers(hf_config)


def published_copies(hf_config: PretrainedConfig) -> dict[str, str]:
    """Copies of the model's embedding and head in published multi-token prediction layers: name of each copy, with the
    name of the original. This program's prediction layers use the originals.
    """
    prefixes = [f"model.layers.{layer}." for layer in mtp_layers(hf_config)]
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return {prefix + copy: original for prefix in prefixes for copy, original in copies.items()}


@contextmanager
def more_layers(hf_config: PretrainedConfig, number: int) -> Iterator[None]:
    """Context in which `hf_config` has `number` more layers like the last one, but with their own indexers."""
    layers, settings = hf_config.num_hidden_layers, vars(hf_config)
    if family_of(hf_config.model_type).compresses:
        longer = {k: [*settings[k][:layers], *[kind] * number] for k, kind in _COMPRESSED.items() if settings.get(k)}
    else:
        longer = {
            k: [*settings[k], *[kind or settings[k][-1]] * number] for k, kind in _PER_LAYER.items() if settings.get(k)
        }
    with ExitStack() as stack:
        for key, value in (longer | {"num_hidden_layers": layers + number}).items():
            stack.enter_context(replaced(hf_config, key, value))
        yield


@contextmanager
def build_mtp_layers(model_class: type[PreTrainedModel], hf_config: PretrainedConfig) -> Iterator[None]:
    """Context in which a model of `hf_config` is built with multi-token prediction layers."""
    layers = mtp_layers(hf_config)
    if not layers:
        yield
        return

    def make(layer_class: Any, config: PretrainedConfig, layer_idx: int) -> nn.Module:  # noqa: ANN401 - a class or what stands for it
        layer: nn.Module = layer_class(config, layer_idx)
        if layer_idx in layers and hasattr(layer, "input_layernorm"):
            add_mtp_modules(layer, config)
            return SkippedLayer(layer) if family_of(config.model_type).compresses else layer
        return layer

    with more_layers(hf_config, len(layers)), replaced_layers(model_class, make):
        yield


class SkippedLayer(nn.Module):
    """Holds a multi-token prediction layer `mtp`, which the forward of the model's layers skips."""

    def __init__(self, mtp: nn.Module) -> None:
        super().__init__()
        self.mtp = mtp

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:  # noqa: ANN401
        """Returns the hidden states unchanged."""
        return hidden


def add_mtp_modules(layer: Any, config: PretrainedConfig) -> None:  # noqa: ANN401 - a decoder layer of any family
    """Add to a decoder layer, in place, what makes it a multi-token prediction layer: projections and norms."""
    width, norm_class = config.hidden_size, type(layer.input_layernorm)
    layer.enorm = norm_class(width, eps=config.rms_norm_eps)
    layer.hnorm = norm_class(width, eps=config.rms_norm_eps)
    if family_of(config.model_type).compresses:
        # DeepSeek-V4's checkpoint has these module names (vLLM 0.32, models/deepseek_v4/nvidia/mtp.py).
        layer.e_proj, layer.h_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        _, stream_head, _ = stream_classes()
        layer.hc_head, layer.norm = stream_head(config), norm_class(width, eps=config.rms_norm_eps)
        return
    layer.eh_proj = nn.Linear(2 * width, width, bias=False)
    layer.shared_head = nn.Module()
    layer.shared_head.norm = norm_class(width, eps=config.rms_norm_eps)


def mtp_layer_inputs(layer: Any, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Compute a multi-token prediction layer's input [rows, tokens, width], from the next tokens' embeddings and the
    model's hidden states after the final norm, both [rows, tokens, width]. With several residual streams, `hidden` are
    the streams after the last layer, [rows, tokens, streams, width], and the input has streams too.

    Published weights take the embedding first (transformers 5.23, modeling_layers.py:357; vLLM and SGLang too), though
    the paper writes the hidden state first (eq. 21).
    """
    if hidden.dim() > embedded.dim():
        streams: torch.Tensor = layer.h_proj(layer.hnorm(hidden))
        return streams + layer.e_proj(layer.enorm(embedded))[..., None, :]
    joined: torch.Tensor = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], dim=-1))
    return joined


def run_mtp_layer(
    lm: PreTrainedModel,
    layer: Any,  # noqa: ANN401 - a decoder layer of any family
    joined: torch.Tensor,
    position_ids: torch.Tensor,
    **arguments: Any,  # noqa: ANN401 - what attention takes
) -> torch.Tensor:
    """Run a multi-token prediction layer of `lm`. Returns hidden states [rows, tokens, width] before the head."""
    family, rotary = family_of(lm.config.model_type), lm.base_model.rotary_emb
    if family.compresses:
        kinds = ("main", "compress")
        angles = {kind: rotary(joined, position_ids=position_ids, layer_type=kind) for kind in kinds}
        states = layer(joined, position_embeddings=angles, position_ids=position_ids, attention_mask=None, **arguments)
        return layer.norm(layer.hc_head(states))  # type: ignore[no-any-return]
    mask = create_causal_mask(
        lm.config,
        joined,
        None,
        None,
        position_ids=position_ids,
        # transformers' indexer needs a mask even in causal attention (deepseek_v32/modeling_deepseek_v32.py:729).
        allow_is_causal_skip=family.indexer is None,
    )
    states = layer(
        joined,
        position_embeddings=rotary(joined, position_ids),
        attention_mask=mask,
        position_ids=position_ids,
        use_cache=False,
        **arguments,
    )
    # Layers return a tuple if they pass the tokens that an indexer chose to later layers.
    return layer.shared_head.norm(states[0] if isinstance(states, tuple) else states)  # type: ignore[no-any-return]
