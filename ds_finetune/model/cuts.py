"""How tensor parallelism cuts each tensor of a model: by name, for weights, state and gradients alike."""

import math
import re
from dataclasses import dataclass

import torch

Ints = tuple[int, ...]

_COLUMNS = re.compile(r"(^|\.)(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|embed_tokens|lm_head)\.(weight|bias)$")
"""Cut along the output (heads, inner width, vocabulary): dim 0."""
_ROWS = re.compile(r"(^|\.)(o_proj|down_proj)\.weight$")
"""Cut along the input: dim 1. A bias is added once, after the sum over ranks, and is whole everywhere."""
_FUSED = re.compile(r"\.mlp\.experts\.(?P<part>gate_up_proj|down_proj)$")
"""Fused experts, cut along each expert's inner width."""


@dataclass(frozen=True)
class Cut:
    """This rank's part, number `place` of `parts`."""

    parts: int = 1
    place: int = 0

    def window(self, name: str, local: Ints) -> "Window":
        """Where the tensor `name`, of shape `local` on this rank, lies in the whole one."""
        fused = _FUSED.search(name)
        box = (local[0], 2, local[1] // 2, local[2]) if fused and fused["part"] == "gate_up_proj" else local
        dim = 2 if fused else cut_dim(name)
        if dim is None or self.parts == 1:
            return Window(box, box, (0,) * len(box), None)
        whole = (*box[:dim], box[dim] * self.parts, *box[dim + 1 :])
        return Window(whole, box, tuple(self.place * box[dim] if at == dim else 0 for at in range(len(box))), dim)


WHOLE = Cut()


@dataclass(frozen=True)
class Window:
    """A box `local` from index `origin` of a tensor of shape `whole`, cut along `dim`; None where it is not cut.

    Fused `gate_up_proj` [experts, 2 x inner, hidden] is seen as [experts, 2, inner, hidden], in which a cut is one box.
    """

    whole: Ints
    local: Ints
    origin: Ints
    dim: int | None

    @property
    def shape(self) -> Ints:
        """Shape of the whole tensor as the model has it."""
        return model_shape(self.whole)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a whole tensor that are here, one behind the other (1-D)."""
        if self.dim is None:
            return tensor.reshape(-1)
        return tensor.view(self.whole).narrow(self.dim, self.origin[self.dim], self.local[self.dim]).reshape(-1)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from the flat parts of all ranks, in order."""
        if self.dim is None:
            return parts[0].view(self.shape)
        return torch.cat([part.view(self.local) for part in parts], dim=self.dim).view(self.shape)


def model_shape(whole: Ints) -> Ints:
    """The model's shape of a tensor by the `whole` shape of its window."""
    experts_gate_inner_hidden = 4
    return (whole[0], whole[1] * whole[2], whole[3]) if len(whole) == experts_gate_inner_hidden else whole


def cut_dim(name: str) -> int | None:
    """Dimension along which a matrix or vector is cut, by the name it has in a published checkpoint; None where every rank holds it whole."""
    if _COLUMNS.search(name):
        return 0
    return 1 if _ROWS.search(name) else None


def whole_shape(name: str, local: Ints, parts: int) -> Ints:
    """Shape of the published tensor of which `local` is one of `parts` equal parts."""
    dim = cut_dim(name)
    assert math.prod(local) > 0, name
    return local if dim is None else (*local[:dim], local[dim] * parts, *local[dim + 1 :])
