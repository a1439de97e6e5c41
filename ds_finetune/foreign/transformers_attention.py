"""transformers' attention: registration of implementations, and patches of latent and compressed attention."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.cache_utils import Cache
from transformers.masking_utils import flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from ds_finetune.foreign.guard import Foreign, replaced

_REGISTRY = Foreign("transformers", "modeling_utils.py (AttentionInterface), masking_utils.py")

_MASKS = Foreign("transformers", "masking_utils.py:750-781, 876-881")
_LATENT = Foreign("transformers", "models/deepseek_v3/modeling_deepseek_v3.py:310, 349")
_INDEXED = Foreign("transformers", "models/deepseek_v32/modeling_deepseek_v32.py:296-478")
_COMPRESSED = Foreign("transformers", "models/deepseek_v4/modeling_deepseek_v4.py:361-872")
_ORIGINAL = SimpleNamespace(**vars(modeling_deepseek_v4))
"""Original attributes of transformers' DeepSeek-V4 module. Building a model replaces the layer class there."""
_PROJECTIONS = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
_CACHE_NAMES = ("cache", "past_key_values")
CACHE: str = next(
    name for name in _CACHE_NAMES if name in inspect.signature(masking_utils.create_causal_mask).parameters
)
"""Keyword by which transformers passes a cache to models and layers: `cache` since 5.24, `past_key_values` before."""


def take_cache(arguments: dict[str, Any]) -> Cache | None:
    """Remove the KV cache from a forward's keyword arguments, and return it; None if there is none."""
    names = [name for name, value in arguments.items() if isinstance(value, Cache) or name in _CACHE_NAMES]
    caches = [cache for cache in map(arguments.pop, names) if cache is not None]
    assert len(caches) <= 1, names
    return caches[0] if caches else None


def register_attention(name: str, attend: Callable[..., Any]) -> None:
    """Register `attend` with transformers as the attention implementation `name`, for the life of the process.

    transformers passes it masks as for FlashAttention: a mask for rows with masked tokens, else None.
    """
    _REGISTRY.parameters(flash_attention_mask, "attention_mask")
    for registry, function in ((AttentionInterface, attend), (AttentionMaskInterface, flash_attention_mask)):
        _REGISTRY.attribute(registry, "register")(name, function)


def wrap_attention(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace transformers' attention implementation `name` by `wrap(implementation)`, for the life of the process."""
    _REGISTRY.attribute(AttentionInterface, "register")(name, wrap(ALL_ATTENTION_FUNCTIONS[name]))


@contextmanager
def attention_replaced(attend: Callable[..., Any]) -> Iterator[None]:
    """Context in which `attend` replaces all of transformers' attention implementations."""
    names = (*ALL_ATTENTION_FUNCTIONS.valid_keys(), "eager")
    _REGISTRY.attribute(ALL_ATTENTION_FUNCTIONS, "_local_mapping")
    with replaced(ALL_ATTENTION_FUNCTIONS, "_local_mapping", dict.fromkeys(names, attend)):
        yield


@contextmanager
def without_search_for_documents() -> Iterator[None]:
    """Context in which transformers does not search position ids for packed documents when it makes masks. The search
    makes the host wait for the GPU, and is needless if attention gets document boundaries as arguments.
    """
    _MASKS.attribute(masking_utils, "find_packed_sequence_indices")
    _check_masks()
    with replaced(masking_utils, "find_packed_sequence_indices", lambda _: None):
        yield


@cache
def _check_masks() -> None:
    """Check that transformers makes masks as expected; only once, because reading its source takes milliseconds."""
    _MASKS.source(masking_utils._preprocess_mask_arguments, "= find_packed_sequence_indices(position_ids)")


def attention_function(name: str) -> Callable[..., Any]:
    """transformers' function for the attention implementation `name`. Each model has its own `eager` function; the one
    of DeepSeek-V3's latent attention is returned.
    """
    eager = _LATENT.attribute(modeling_deepseek_v3, "eager_attention_forward")
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)  # type: ignore[no-any-return]


def rotate(kind: str, *arguments: Any) -> Any:  # noqa: ANN401 - untyped
    """Apply a rotary embedding to queries and keys [rows, heads, tokens, width]. The `kind` `pairs` rotates adjacent
    columns; `halves` rotates columns i and i + width / 2.
    """
    name = {"pairs": "apply_rotary_pos_emb_interleave", "halves": "apply_rotary_pos_emb"}[kind]
    return _LATENT.attribute(modeling_deepseek_v3, name)(*arguments)


def replace_forward(attention: nn.Module, mixin: type[nn.Module]) -> None:
    """Change the class of `attention`, latent attention with an indexer, so that it runs the forward of `mixin`."""
    kind = type(attention)
    _INDEXED.parameters(kind.forward, "hidden_states", "position_embeddings", "attention_mask", CACHE)
    for name in (*_PROJECTIONS, "expand_kv", "scaling", "layer_idx"):
        _INDEXED.attribute(attention, name)
    attention.__class__ = type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})


def compressed_classes() -> tuple[type[nn.Module], ...]:
    """transformers' four classes of DeepSeek-V4's attention: attention, sparse and heavy compressor, indexer."""
    names = ("Attention", "CSACompressor", "HCACompressor", "Indexer")
    return tuple(_COMPRESSED.attribute(modeling_deepseek_v4, f"DeepseekV4{name}") for name in names)


def stream_classes() -> tuple[type[nn.Module], ...]:
    """transformers' classes of DeepSeek-V4 that work on residual streams: hyper-connection, the head that merges the
    streams after the last layer, and decoder layer.
    """
    names = ("HyperConnection", "HyperHead", "DecoderLayer")
    mixing, last, layer = (_COMPRESSED.attribute(_ORIGINAL, f"DeepseekV4{name}") for name in names)
    _COMPRESSED.source(mixing.forward, "post = 2 * torch.sigmoid(post_w * post_scale + post_b)")
    _COMPRESSED.source(last.forward, "torch.sigmoid(mixes * self.hc_scale.float() + self.hc_base.float()) + self.eps")
    _COMPRESSED.source(layer.forward, "comb.to(dtype).transpose(-1, -2), hidden_states")
    return mixing, last, layer


def replace_compressed(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Change the class of a DeepSeek-V4 attention module to run `mixin`'s forward, which may call the original."""
    kind = type(module)
    _COMPRESSED.parameters(kind.forward, "hidden_states", "position_ids", CACHE)
    module.__class__ = type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {})
