"""Lets norms, rotary embeddings and gated MLPs of a built model run fused kernels."""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.families.table import family_of
from ds_finetune.foreign.transformers_elementwise import (
    has_plain_gate,
    is_gated_mlp,
    is_silu,
    returns_complex,
    rotary_functions,
    rounds_last,
    with_functions,
)
from ds_finetune.model.attention.indexed_attention import IndexedAttention
from ds_finetune.model.fused.formulas import Turning
from ds_finetune.model.fused.operations import Kernels, gate, kernels_of, norm, rotate
from ds_finetune.plan.kernels import has_fused_operations


def install_fused(lm: PreTrainedModel, name: str) -> None:
    """Let `lm` run the kernels `name` of `model.kernels`, in place; `torch` is transformers' own forward.

    Whatever has another formula keeps its own, as the clamped SwiGLU of gpt_oss does.
    """
    if name == "torch":
        return
    assert has_fused_operations(family_of(lm.config.model_type))
    kernels = kernels_of(name)
    for module in list(lm.modules()):
        kind = type(module)
        if methods := _fused_methods(module, kind, kernels):
            module.__class__ = type(f"Fused{kind.__name__}", (kind,), methods)


def _fused_methods(module: nn.Module, kind: Any, kernels: Kernels) -> dict[str, Any]:  # noqa: ANN401
    """Methods in place of those of `kind`, by name; none where nothing of `module` is fused."""
    is_last = rounds_last(kind)
    if is_last is not None:
        return {"forward": lambda self, x: norm(kernels, x, self.weight, self.variance_epsilon, is_last)}
    if is_gated_mlp(kind) and is_silu(module):
        return {"forward": lambda self, x: self.down_proj(gate(kernels, self.gate_proj(x), self.up_proj(x)))}
    if has_plain_gate(module) and is_silu(module):
        return {"_apply_gate": lambda _, gate_up: gate(kernels, gate_up)}
    if isinstance(module, IndexedAttention):
        return {"rotate": staticmethod(partial(_rotate, kernels, "pairs"))}
    if turns := rotary_functions(kind):
        functions = {each: partial(_rotate, kernels, turn) for each, turn in turns.items()}
        return {"forward": with_functions(kind.forward, functions)}
    return {"forward": lambda *given: _real(kind.forward(*given))} if returns_complex(kind) else {}


def _real(angles: torch.Tensor) -> torch.Tensor:
    """Complex numbers [...] -> cosines and sines [2, ...], once for all layers."""
    return torch.stack([angles.real, angles.imag])


def _rotate(kernels: Kernels, turn: str, query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor) -> Any:  # noqa: ANN401
    """In place of transformers' function that turns columns in this way, by cosines and sines, or both in one tensor.

    With that transformers leaves columns in pairs; in another order, the same for queries and keys, their products are
    the same.
    """
    cos, sin = angles if len(angles) > 1 else angles[0]
    width = cos.shape[-1] * (1 if turn in ("halves", "pairs") else 2)
    return rotate(kernels, Turning(width, turn.endswith("pairs")), query, key, cos, sin)
