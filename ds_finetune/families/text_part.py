"""The text part of a composite model (text with images or sound): its config.json section, and names of its tensors.

Only the text part is trained, as a model of its own type.
"""

import re
from collections.abc import Mapping
from typing import Any

TEXT_CONFIG = "text_config"
"""Section of a multimodal model's config.json that describes the text part, like the config.json of a text model."""
_OTHER_TYPES = {"minimax_m3_vl": "minimax_m3_text"}
"""From a multimodal model type to the type of its text part, where its published `text_config` has a wrong one: MiniMax
M3 has `minimax_m2` there.
"""
_BASE = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head\.)")
_HEAD = re.compile(r"^(model\.)?(language_model\.)?(?=lm_head\.)")


def is_composite(tree: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a multimodal model, with a section of its own for the text part."""
    return isinstance(tree.get(TEXT_CONFIG), Mapping)


def text_tree(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config.json `tree` says about text: a section if the model is multimodal, else all of `tree`. Its
    `model_type` is the one that is trained.
    """
    if not is_composite(tree):
        return tree
    kind = _OTHER_TYPES.get(str(tree.get("model_type")))
    return {**tree[TEXT_CONFIG], "model_type": kind} if kind else tree[TEXT_CONFIG]  # type: ignore[no-any-return]


def text_name(name: str) -> str | None:
    """Name of a multimodal model's tensor or module within the text part; None if `name` is in another part."""
    if _HEAD.match(name):
        return _HEAD.sub("", name)
    return _BASE.sub("model.", name) if _BASE.match(name) else None
