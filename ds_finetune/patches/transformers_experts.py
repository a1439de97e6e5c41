"""transformers' routed experts: the registry of implementations, and which modules have the common form."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from ds_finetune.patches.foreign import Foreign

_REGISTRY = Foreign("transformers", "integrations/moe.py:527-559")
_DECORATED = Foreign("transformers", "integrations/moe.py:617-636")
_FORM = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": False}

_SILU = (nn.SiLU, SiLUActivation)


def register_experts(name: str, run: Callable[..., Any]) -> None:
    """Register `run` as the experts implementation `name`, for the life of the process."""
    _REGISTRY.attribute(_REGISTRY.attribute(moe, "ALL_EXPERTS_FUNCTIONS"), "register")(name, run)


def is_silu_gated(module: nn.Module) -> bool:
    """Whether `module` computes `down(silu(gate(x)) * up(x))` for each expert with gate and up in one weight, without
    biases and a norm, from weights of [experts, out, in].
    """
    if not hasattr(module, "_is_expert_parallel"):
        return False
    form = {name: _DECORATED.attribute(module, name) for name in _FORM}
    has_plain_gate = getattr(type(module), "_apply_gate", None) is _DECORATED.attribute(moe, "_default_apply_gate")
    return form == _FORM and has_plain_gate and isinstance(getattr(module, "act_fn", None), _SILU)
