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


class FusedNorm(nn.Module):
    """Mixed into a family's RMSNorm."""

    kernels: Kernels
    weight: nn.Parameter
    variance_epsilon: float
    rounds_last: bool

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] before and after."""
        return norm(self.kernels, hidden, self.weight, self.variance_epsilon, self.rounds_last)  # type: ignore[no-any-return]


class FusedMlp(nn.Module):
    """Mixed into a family's MLP, or shared experts."""

    kernels: Kernels
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., width] before and after."""
        return self.down_proj(gate(self.kernels, self.gate_proj(hidden), self.up_proj(hidden)))  # type: ignore[no-any-return]


class FusedExperts(nn.Module):
    """Mixed into a family's routed experts, whose forward is `run_experts`."""

    kernels: Kernels

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate(self.kernels, gate_up)  # type: ignore[no-any-return]


class RealAngles(nn.Module):
    """Mixed into a rotary embedding that returns complex numbers."""

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Cosines and sines [2, rows, tokens, width / 2] for all layers."""
        angles: torch.Tensor = super().forward(hidden, position_ids)
        return torch.stack([angles.real, angles.imag])


def install_fused(lm: PreTrainedModel, name: str) -> None:
    """Let `lm` run the kernels `name` of `model.kernels`, in place; `torch` is transformers' own forward.

    Whatever has another formula keeps its own, as the clamped SwiGLU of gpt_oss does.
    """
    if name == "torch":
        return
    assert has_fused_operations(family_of(lm.config.model_type))
    kernels = kernels_of(name)
    for module in list(lm.modules()):
        kind: Any = type(module)
        if (is_last := rounds_last(kind)) is not None:
            _mix_in(module, FusedNorm, kernels=kernels, rounds_last=is_last)
        elif is_gated_mlp(kind) and is_silu(module):
            _mix_in(module, FusedMlp, kernels=kernels)
        elif has_plain_gate(module) and is_silu(module):
            _mix_in(module, FusedExperts, kernels=kernels)
        elif isinstance(module, IndexedAttention):
            module.rotate = partial(_rotate, kernels, "pairs")
        elif turns := rotary_functions(kind):
            functions = {each: partial(_rotate, kernels, turn) for each, turn in turns.items()}
            _mix_in(module, nn.Module, forward=with_functions(kind.forward, functions))
        elif returns_complex(kind):
            _mix_in(module, RealAngles)


def _mix_in(module: nn.Module, mixin: type[nn.Module], **attributes: Any) -> None:  # noqa: ANN401
    kind = type(module)
    bases = (kind,) if mixin is nn.Module else (mixin, kind)
    module.__class__ = type(f"Fused{kind.__name__}", bases, attributes)


def _rotate(kernels: Kernels, turn: str, query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor) -> Any:  # noqa: ANN401
    """In place of transformers' function that turns columns in this way, by cosines and sines, or by `RealAngles`.

    With these transformers leaves columns in pairs; in another order, the same for queries and keys, their products are
    the same.
    """
    cos, sin = angles if len(angles) > 1 else angles[0]
    width = cos.shape[-1] * (1 if turn in ("halves", "pairs") else 2)
    return rotate(kernels, Turning(width, turn.endswith("pairs")), query, key, cos, sin)
