"""How tensor parallelism cuts each tensor of a model: by name, for weights, state and gradients alike."""

import re
from dataclasses import dataclass
from typing import Self

import torch

from ds_finetune.plan.mesh import Mesh

Ints = tuple[int, ...]

_COLUMNS = re.compile(
    r"(^|\.)(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|embed_tokens|lm_head)\.(weight|bias)$"
)
"""Cut along the output (heads, inner width, vocabulary): dim 0."""
_ROWS = re.compile(r"(^|\.)(o_proj|down_proj)\.weight$")
"""Cut along the input: dim 1. A bias is added once, after the sum over ranks, and is whole everywhere."""
_FUSED = re.compile(r"\.mlp\.experts\.(?P<part>gate_up_proj|down_proj)$")
"""Fused experts, cut along each expert's inner width."""


@dataclass(frozen=True)
class Cut:
    """This rank's part of a model: number `place` of `parts` of each tensor, and number `expert_place` of
    `expert_parts` of the experts.
    """

    parts: int = 1
    place: int = 0
    expert_parts: int = 1
    expert_place: int = 0

    @classmethod
    def of(cls, mesh: Mesh) -> Self:
        """The part of this rank of a mesh."""
        return cls(mesh.tp, mesh.place("tp"), mesh.ep, mesh.expert_place)

    def window(self, name: str, local: Ints) -> "Window":
        """Where the tensor `name`, of shape `local` on this rank, lies in the whole one."""
        fused = _FUSED.search(name)
        box = (local[0], 2, local[1] // 2, local[2]) if fused and fused["part"] == "gate_up_proj" else local
        dim = 2 if fused else cut_dim(name)
        counts = [1] * len(box)
        origin = [0] * len(box)
        if fused:
            counts[0], origin[0] = self.expert_parts, self.expert_place * box[0]
        if dim is not None:
            counts[dim], origin[dim] = self.parts, self.place * box[dim]
        whole = tuple(size * count for size, count in zip(box, counts, strict=True))
        return Window(
            whole,
            box,
            tuple(origin),
            dim if self.parts > 1 else None,
            is_shared_out=bool(fused) and self.expert_parts > 1,
        )


WHOLE = Cut()


@dataclass(frozen=True)
class Window:
    """A box `local` from index `origin` of a tensor of shape `whole`, cut along `dim`; None where tensor parallel ranks
    all have it.

    Fused `gate_up_proj` [experts, 2 x inner, hidden] is seen as [experts, 2, inner, hidden], in which a cut is one box.
    `is_shared_out`: it holds some of the experts, dim 0.
    """

    whole: Ints
    local: Ints
    origin: Ints
    dim: int | None
    is_shared_out: bool = False

    @property
    def shape(self) -> Ints:
        """Shape of the whole tensor as the model has it."""
        return model_shape(self.whole)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a whole tensor that are here, one behind the other (1-D)."""
        part = tensor.view(self.whole)
        for dim, (start, size) in enumerate(zip(self.origin, self.local, strict=True)):
            part = part.narrow(dim, start, size)
        return part.reshape(-1)


def model_shape(whole: Ints) -> Ints:
    """The model's shape of a tensor by the `whole` shape of its window."""
    experts_gate_inner_hidden = 4
    return (whole[0], whole[1] * whole[2], whole[3]) if len(whole) == experts_gate_inner_hidden else whole


def cut_dim(name: str) -> int | None:
    """Dimension along which a matrix or vector is cut, by the name it has in a published checkpoint; None where every
    rank holds it whole.
    """
    if _COLUMNS.search(name):
        return 0
    return 1 if _ROWS.search(name) else None
