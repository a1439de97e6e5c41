"""The names of adapters' parameters in a model: `MODULE.lora_A` of a module's `weight`, else `MODULE.LEAF_lora_A`."""

import re

_ADAPTER = re.compile(r"^(?P<module>.+)\.((?P<leaf>\w+)_)?lora_(?P<side>[AB])$")


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model is part of an adapter."""
    return _ADAPTER.match(name) is not None


def weight_of(name: str) -> tuple[str, str]:
    """The weight that an adapter's parameter `name` adapts, and the parameter's side, `A` or `B`."""
    match = _ADAPTER.match(name)
    assert match, name
    return f"{match['module']}.{match['leaf'] or 'weight'}", match["side"]
