"""Recognises the formulas of transformers' norms, rotary embeddings and gated MLPs by their source text."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations import moe
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from ds_finetune.foreign.guard import Foreign

_NORMS = Foreign("transformers", "the RMSNorm of each model file")
_ATTENTION = Foreign("transformers", "the attention of each model file")
_EXPERTS = Foreign("transformers", "integrations/moe.py:568")
_ROUNDS_FIRST = "return self.weight * hidden_states.to(input_dtype)"
_ROUNDS_LAST = "return (self.weight * hidden_states).to(input_dtype)"
_ADDS_ONE = "output * (1.0 + self.weight.float())"
GATED_MLP = ("self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))",)
JOINED_MLP = "up_states = self.gate_up_proj(hidden_states)", "gate, up_states = up_states.chunk(2, dim=-1)"
SOFT_CAP = (
    "logits = logits / self.config.final_logit_softcapping",
    "logits = torch.tanh(logits)",
    "logits = logits * self.config.final_logit_softcapping",
)
"""Lines of transformers' source by which the forward of a causal LM caps its logits with tanh."""
CLAMPED_GATE = "clamp(max=self.limit)", "clamp(min=-self.limit, max=self.limit)", "self.act_fn(gate) * up"
KEYS_AND_VALUES = "self.kv_b_proj(kv_nope).view(key_shape)", "key_states = kv_nope.new_empty("
_ROTARY = {
    "(rotate_half(q) * sin)": "halves",
    "(rotate_half(q_rot) * sin)": "halves",
    "(rotate_half(q.float()) * sin)": "wide halves",
    "_apply_rotary_emb(q, cos, sin)": "short halves",
    "q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)": "pairs",
    "torch.view_as_complex(xq.float()": "complex pairs",
    "(rotate_half(x) * sin)": "",
}
"""Source text of transformers' rotary functions, with the kind of rotation. `halves` rotates columns i and i + width/2
by cosines as wide as the head. The cosines of `short halves` are half as wide; `wide halves` rotates in fp32. `pairs`
rotates adjacent columns by cosines and sines, `complex pairs` by complex numbers. No kernel computes functions of one
tensor; their kind is "".
"""


class NormFormula(NamedTuple):
    """How a transformers module computes RMSNorm."""

    rounds_last: bool
    """Whether the product with the weight is rounded (gpt_oss), instead of the normalised row before it."""
    adds_one: bool
    """Whether the normalised row is multiplied by 1 + weight instead of weight (Gemma)."""
    eps: str
    """Name of the module's attribute with epsilon, the number added to the mean square."""


@cache
def norm_formula(kind: type[nn.Module]) -> NormFormula | None:
    """How the module class `kind` computes RMSNorm; None for other classes. DependencyError for an unknown formula."""
    if not kind.__name__.endswith("RMSNorm") or kind.__name__.endswith("UnweightedRMSNorm"):
        return None
    plain: Any = next((each for each in kind.mro() if each.__module__.startswith("transformers.")), kind)
    text = inspect.getsource(plain.forward)
    if _ADDS_ONE in text:
        _NORMS.source(plain._norm, "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)")
        return NormFormula(rounds_last=True, adds_one=True, eps="eps")
    if "normed_output * self.weight.float()" in text:
        _NORMS.source(plain._norm, "hidden_states * torch.pow(mean_squared, -0.5)")
        return NormFormula(rounds_last=True, adds_one=False, eps="eps")
    _NORMS.source(plain.forward, "hidden_states.pow(2).mean(-1, keepdim=True)")
    if _ROUNDS_LAST not in text:
        _NORMS.source(plain.forward, _ROUNDS_FIRST)
    return NormFormula(_ROUNDS_LAST in text, adds_one=False, eps="variance_epsilon")


def norm_classes() -> tuple[type[nn.Module], type[nn.Module]]:
    """transformers' two classes of DeepSeek-V4's RMSNorm: with a weight, and without."""
    weighted, plain = (
        _NORMS.attribute(modeling_deepseek_v4, f"DeepseekV4{name}") for name in ("RMSNorm", "UnweightedRMSNorm")
    )
    _NORMS.source(weighted.forward, _ROUNDS_LAST)
    _NORMS.source(plain.forward, "x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)")
    return weighted, plain


@cache
def computes(method: Callable[..., Any] | None, texts: tuple[str, ...]) -> bool:
    """Whether the source of `method` contains all `texts`."""
    return method is not None and all(text in inspect.getsource(method) for text in texts)


def is_silu(module: Any) -> bool:  # noqa: ANN401 - an MLP or experts of any family
    """Whether the activation function of `module` is silu."""
    function = module.act_fn if hasattr(module, "act_fn") else module.activation_fn
    return isinstance(function, nn.SiLU | type(ACT2FN["silu"]))


def has_plain_gate(experts: Any) -> bool:  # noqa: ANN401 - routed experts of any family
    """Whether routed experts compute act(gate) * up from one tensor, with the columns of gate before those of up."""
    plain = _EXPERTS.attribute(moe, "_default_apply_gate")
    return getattr(type(experts), "_apply_gate", None) is plain


@cache
def rotary_functions(kind: type[nn.Module]) -> dict[str, str]:
    """The rotary functions that the attention class `kind` calls for queries and keys, as a dictionary from name to
    kind of rotation. Empty for other classes. DependencyError if attention calls no known rotary function.
    """
    if not kind.__name__.endswith("Attention"):
        return {}
    forward: Any = inspect.unwrap(kind.forward)
    kinds: dict[str, str] = {}
    for name in forward.__code__.co_names if isinstance(forward, FunctionType) else ():
        source = inspect.getsource(forward.__globals__[name]) if name.startswith("apply_rotary") else ""
        kinds |= {name: rotation for text, rotation in _ROTARY.items() if text in source}  # noqa: B035 - one text is in it
    if not kinds:
        _ATTENTION.source(kind.forward, next(iter(_ROTARY)))
    return {name: rotation for name, rotation in kinds.items() if rotation}


@cache
def delta_functions(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """The functions that the forward of the gated delta net class `kind` calls, by name: causal convolution and gated
    delta rule. Empty for other classes.
    """
    if not kind.__name__.endswith("GatedDeltaNet"):
        return {}
    forward: Any = inspect.unwrap(kind.forward)
    _ATTENTION.source(forward, "causal_conv1d_fn(")
    _ATTENTION.source(forward, "= torch_chunk_gated_delta_rule(")
    return {name: forward.__globals__[name] for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")}


@cache
def returns_complex(kind: type[nn.Module]) -> bool:
    """Whether `kind` is a rotary embedding that returns complex numbers."""
    return kind.__name__.endswith("RotaryEmbedding") and "torch.polar(" in inspect.getsource(kind.forward)


def with_functions(forward: Any, functions: Mapping[str, Callable[..., Any]]) -> Any:  # noqa: ANN401
    """Copy the function `forward`, with `functions` in place of globals of the same names, and without decorators. The
    original module is unchanged, so that reference models in the same process are not affected.
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
