"""The text part of a composite model (of text and other media): its config.json section, and names of tensors.

Only the text part is trained, as a model of the type that its section names.
"""

import re
from collections.abc import Mapping
from typing import Any

TEXT_CONFIG = "text_config"
"""Section of a composite config.json that serves as config.json of the text part."""
_BASE = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?(?!lm_head\.)")
_HEAD = re.compile(r"^(model\.)?(language_model\.)?(?=lm_head\.)")


def is_composite(tree: Mapping[str, Any]) -> bool:
    """Whether a config.json has a separate section for the model's text part."""
    return isinstance(tree.get(TEXT_CONFIG), Mapping)


def text_tree(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json of the language model: the text part's section, or `tree` itself if the model is not composite."""
    section: Mapping[str, Any] = tree[TEXT_CONFIG] if is_composite(tree) else tree
    return section


def text_name(name: str) -> str | None:
    """Name within the text part of a tensor or module of a composite model; None if it belongs to another part."""
    if _HEAD.match(name):
        return _HEAD.sub("", name)
    return _BASE.sub("model.", name) if _BASE.match(name) else None
