"""transformers' norms, rotary embeddings and gated MLPs: which modules have which formula, by their source."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from ds_finetune.foreign.guard import Foreign

_NORMS = Foreign("transformers", "the RMSNorm of each model file")
_ATTENTION = Foreign("transformers", "the attention of each model file")
_EXPERTS = Foreign("transformers", "integrations/moe.py:568")
_NORM = "hidden_states.pow(2).mean(-1, keepdim=True)"
_ROUNDS_FIRST = "return self.weight * hidden_states.to(input_dtype)"
_ROUNDS_LAST = "return (self.weight * hidden_states).to(input_dtype)"
GATED_MLP = ("self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",)
JOINED_MLP = "up_states = self.gate_up_proj(hidden_states)", "gate, up_states = up_states.chunk(2, dim=-1)"
CLAMPED_GATE = "clamp(max=self.limit)", "clamp(min=-self.limit, max=self.limit)", "self.act_fn(gate) * up"
KEYS_AND_VALUES = "self.kv_b_proj(kv_nope).view(key_shape)", "key_states = kv_nope.new_empty("
_ROTARY = {
    "(rotate_half(q) * sin)": "halves",
    "(rotate_half(q_rot) * sin)": "halves",
    "(rotate_half(q.float()) * sin)": "wide halves",
    "_apply_rotary_emb(q, cos, sin)": "short halves",
    "q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)": "pairs",
    "torch.view_as_complex(xq.float()": "complex pairs",
}
"""What functions for rotary embeddings contain, and how they turn columns: those half the width apart, with cosines as
wide or half as wide, or in fp32; or neighbours, by cosines and sines or by complex numbers.
"""


@cache
def rounds_last(kind: type[nn.Module]) -> bool | None:
    """Whether an RMSNorm of class `kind` rounds after the product with its weight (gpt_oss), not before; None for other
    modules. DependencyError where it has another formula.
    """
    if not kind.__name__.endswith("RMSNorm") or kind.__name__.endswith("UnweightedRMSNorm"):
        return None
    kind = next((each for each in kind.mro() if each.__module__.startswith("transformers.")), kind)
    _NORMS.source(kind.forward, _NORM)
    if _ROUNDS_LAST in inspect.getsource(kind.forward):
        return True
    _NORMS.source(kind.forward, _ROUNDS_FIRST)
    return False


def norm_classes() -> tuple[type[nn.Module], type[nn.Module]]:
    """The norms of DeepSeek-V4 with a weight and without."""
    weighted, plain = (
        _NORMS.attribute(modeling_deepseek_v4, f"DeepseekV4{name}") for name in ("RMSNorm", "UnweightedRMSNorm")
    )
    _NORMS.source(weighted.forward, _ROUNDS_LAST)
    _NORMS.source(plain.forward, "x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)")
    return weighted, plain


@cache
def computes(method: Callable[..., Any] | None, texts: tuple[str, ...]) -> bool:
    """Whether `method`, the forward of an MLP or the gate of experts, contains `texts`."""
    return method is not None and all(text in inspect.getsource(method) for text in texts)


def is_silu(module: Any) -> bool:  # noqa: ANN401 - an MLP or experts of any family
    """Whether the activation function of `module` is silu."""
    function = module.act_fn if hasattr(module, "act_fn") else module.activation_fn
    return isinstance(function, nn.SiLU | type(ACT2FN["silu"]))


def has_plain_gate(experts: Any) -> bool:  # noqa: ANN401 - routed experts of any family
    """Whether routed experts compute act(gate) * up from both side by side."""
    plain = _EXPERTS.attribute(moe, "_default_apply_gate")
    return getattr(type(experts), "_apply_gate", None) is plain


@cache
def rotary_functions(kind: type[nn.Module]) -> dict[str, str]:
    """Functions for rotary embeddings that the forward of class `kind` calls, by name, and how they turn columns; none
    where it is not attention. DependencyError where it calls none that is known.
    """
    if not kind.__name__.endswith("Attention"):
        return {}
    forward: Any = inspect.unwrap(kind.forward)
    turns: dict[str, str] = {}
    for name in forward.__code__.co_names if isinstance(forward, FunctionType) else ():
        source = inspect.getsource(forward.__globals__[name]) if name.startswith("apply_rotary") else ""
        turns |= {name: turn for text, turn in _ROTARY.items() if text in source}  # noqa: B035 - one text is in it
    if not turns:
        _ATTENTION.source(kind.forward, next(iter(_ROTARY)))
    return turns


@cache
def returns_complex(kind: type[nn.Module]) -> bool:
    """Whether `kind` is a rotary embedding that gives attention complex numbers."""
    return kind.__name__.endswith("RotaryEmbedding") and "torch.polar(" in inspect.getsource(kind.forward)


def with_functions(forward: Any, functions: Mapping[str, Callable[..., Any]]) -> Any:  # noqa: ANN401
    """The function `forward`, without wrappers for renamed keywords, with other global functions, by their names. The
    module that it is from keeps its own, for reference models in the same process.
    """
    forward = inspect.unwrap(forward)
    changed = FunctionType(
        forward.__code__,
        {**forward.__globals__, **functions},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed
