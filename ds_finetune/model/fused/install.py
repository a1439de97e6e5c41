"""Replaces norms, rotary embeddings and gated MLPs of a built model by fused kernels."""

from functools import partial, partialmethod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.families.table import family_of
from ds_finetune.foreign.transformers_elementwise import (
    CLAMPED_GATE,
    GATED_MLP,
    JOINED_MLP,
    KEYS_AND_VALUES,
    NormFormula,
    computes,
    has_plain_gate,
    is_silu,
    norm_formula,
    returns_complex,
    rotary_functions,
    with_functions,
)
from ds_finetune.model.attention.compressed_attention import CompressedAttention, CompressorByDocument
from ds_finetune.model.attention.indexed_attention import IndexedAttention
from ds_finetune.model.fused.formulas import Rotation
from ds_finetune.model.fused.operations import Kernels, gate, kernels_of, norm, rotate


def install_fused(lm: PreTrainedModel, name: str) -> None:
    """Replace forwards of modules in `lm` by the kernels that `model.kernels` selects (none for `torch`), in place.
    Modules with unknown formulas are not changed.
    """
    if name == "torch":
        return
    assert family_of(lm.config.model_type).fused
    kernels = kernels_of(name)
    for module in list(lm.modules()):
        kind: Any = type(module)
        methods: dict[str, Any] = _gates(module, kind, kernels) or _rotations(module, kind, kernels)
        if (formula := norm_formula(kind)) is not None and module._parameters:
            methods = {"forward": partialmethod(_norm, kernels, formula)}
        if methods:
            module.__class__ = type(f"Fused{kind.__name__}", (kind,), methods)


def _norm(module: Any, kernels: Kernels, formula: NormFormula, rows: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    weight = 1 + module.weight.float() if formula.adds_one else module.weight
    return norm(kernels, rows, weight, getattr(module, formula.eps), formula.rounds_last)  # type: ignore[no-any-return]


def _gates(module: nn.Module, kind: Any, kernels: Kernels) -> dict[str, Any]:  # noqa: ANN401
    of_mlp, of_experts = kind.forward if kind.__name__.endswith("MLP") else None, getattr(kind, "_apply_gate", None)
    if computes(of_mlp, GATED_MLP) and is_silu(module):
        return {"forward": lambda self, x: self.down_proj(gate(kernels, self.gate_proj(x), self.up_proj(x)))}
    if computes(of_mlp, JOINED_MLP) and is_silu(module):
        return {"forward": lambda self, hidden_states: self.down_proj(gate(kernels, self.gate_up_proj(hidden_states)))}
    if has_plain_gate(module) and is_silu(module):
        return {"_apply_gate": lambda _, gate_up: gate(kernels, gate_up)}

    def clamped(limit: float, of_gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate(kernels, of_gate.clamp(max=limit), up.clamp(-limit, limit))

    if computes(of_mlp, CLAMPED_GATE) and is_silu(module):
        return {"forward": lambda self, x: self.down_proj(clamped(self.limit, self.gate_proj(x), self.up_proj(x)))}
    if computes(of_experts, CLAMPED_GATE) and is_silu(module):
        return {"_apply_gate": lambda self, gate_up: clamped(self.limit, *gate_up.chunk(2, -1))}
    return {}


def _rotations(module: nn.Module, kind: Any, kernels: Kernels) -> dict[str, Any]:  # noqa: ANN401
    if isinstance(module, CompressedAttention | CompressorByDocument):
        return {"rotate": staticmethod(partial(_rotate_last, kernels))}
    expanded = {"expand_kv": _expand_kv} if computes(getattr(kind, "expand_kv", None), KEYS_AND_VALUES) else {}
    if isinstance(module, IndexedAttention):
        return {"rotate": staticmethod(partial(_rotate, kernels)), **expanded}
    if kinds := rotary_functions(kind):
        functions = {name: partial(_rotate, kernels, rotation) for name, rotation in kinds.items()}
        return {"forward": with_functions(kind.forward, functions), **expanded}
    if returns_complex(kind):
        # Cosines and sines [2, ...] are split once for all layers.
        return {"forward": lambda *inputs: torch.view_as_real(kind.forward(*inputs)).movedim(-1, 0).contiguous()}
    return {}


def _expand_kv(module: Any, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Expand latents to keys and values, from [rows, 1, tokens, width] to [rows, heads, tokens, width]. transformers'
    method writes keys into an empty tensor, so autograd copies their gradient twice.
    """
    widths = [module.qk_nope_head_dim, module.v_head_dim]
    plain, value = module.kv_b_proj(latent[:, 0]).unflatten(-1, (-1, sum(widths))).transpose(1, 2).split(widths, -1)
    return torch.cat([plain, rotary.expand(-1, plain.shape[1], -1, -1)], -1), value


def _rotate_last(
    kernels: Kernels, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_back: bool = False
) -> torch.Tensor:
    """Rotate pairs of the last columns of `x` [rows, tokens, heads, width]. This replaces transformers' fp32 rotation.
    In the result the columns of a pair are half the width apart; rotation with `is_back` makes them adjacent again.
    """
    rotation = Rotation(2 * cos.shape[-1], in_pairs=True, is_back=is_back)
    plain, last = x.split([x.shape[-1] - rotation.width, rotation.width], -1)
    last = last.transpose(1, 2)
    # The kernels rotate queries and keys together. A slice of the same tensor takes the place of the keys here.
    rotated, _ = rotate(kernels, rotation, last, last[:, :1].detach(), cos.float(), sin.float())
    return torch.cat([plain, rotated.transpose(1, 2)], -1)


def _rotate(
    kernels: Kernels, kind: str, query: torch.Tensor, key: torch.Tensor, *angles: torch.Tensor, **_: int
) -> Any:  # noqa: ANN401
    """Rotate queries and keys like transformers' function for `kind`. `angles`: cosines and sines, or both in a tensor.

    transformers leaves rotated pairs in adjacent columns. Here they move half the width apart in queries and keys
    alike, which does not change query-key products.
    """
    cos, sin = angles if len(angles) > 1 else angles[0]
    if kind == "wide halves":
        cos, sin = cos.float(), sin.float()
    width = cos.shape[-1] * (2 if kind in ("short halves", "complex pairs") else 1)
    return rotate(kernels, Rotation(width, kind.endswith("pairs")), query, key, cos, sin)
