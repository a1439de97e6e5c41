"""transformers' registry of attention implementations."""

from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from ds_finetune.patches.foreign import Foreign

_REGISTRY = Foreign("transformers", "modeling_utils.py (AttentionInterface), masking_utils.py")


def register_attention(name: str, attend: Callable[..., Any]) -> None:
    """Register `attend` as the attention `name`, for the life of the process.

    Its mask is FlashAttention's: none for rows without masked tokens, and the mask itself otherwise.
    """
    _REGISTRY.parameters(flash_attention_mask, "attention_mask")
    for registry, function in ((AttentionInterface, attend), (AttentionMaskInterface, flash_attention_mask)):
        _REGISTRY.attribute(registry, "register")(name, function)
