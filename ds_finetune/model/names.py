"""One map between a model's tensors and the tensors of a published checkpoint, used for loading and for export."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ds_finetune.families.family import Family

Index = tuple[int | slice, ...]
_SHOWN = 10
_FUSED = re.compile(r"^(?P<experts>.*\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor `key` of `shape`, which is `tensor[index]` of the model's tensor."""

    key: str
    index: Index
    shape: tuple[int, ...]

    def first_element(self, whole: tuple[int, ...]) -> int:
        """Where its elements begin in the row-major flattened tensor of shape `whole`, in which they lie without
        a gap.
        """
        begin, stride = 0, math.prod(whole)
        for size, part in zip(whole, self.index, strict=False):
            stride //= size
            begin += stride * (part if isinstance(part, int) else part.start)
        return begin


def hub_pieces(name: str, shape: tuple[int, ...], family: Family, *, first_expert: int = 0) -> tuple[Piece, ...]:
    """The checkpoint tensors that a model tensor `name` of `shape` is made of; together they cover it once.

    Fused experts `gate_up_proj` [experts, 2 x inner, hidden] and `down_proj` [experts, hidden, inner] are one
    matrix per expert and projection there (transformers 5.23, conversion_mapping.py:51-53); every other tensor is
    the same. A part of the experts begins with number `first_expert` of the layer.
    """
    fused = _FUSED.match(name) if family.fused_experts else None
    if not fused:
        return (Piece(name, (), shape),)
    experts, rows, columns = shape
    if fused["part"] == "down_proj":
        return tuple(
            Piece(f"{fused['experts']}.{first_expert + e}.down_proj.weight", (e,), (rows, columns))
            for e in range(experts)
        )
    half = rows // 2
    return tuple(
        Piece(f"{fused['experts']}.{first_expert + e}.{part}.weight", (e, where), (half, columns))
        for e in range(experts)
        for part, where in (("gate_proj", slice(0, half)), ("up_proj", slice(half, rows)))
    )


def differences(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> str:
    """How the tensors `found` in a checkpoint differ from those `wanted` by a model, by name and shape; empty where
    they do not.
    """
    common = sorted(wanted.keys() & found.keys())
    mismatched = [f"{key}: model {wanted[key]}, checkpoint {found[key]}" for key in common if wanted[key] != found[key]]
    problems = [
        ("missing", sorted(wanted.keys() - found.keys())),
        ("unexpected", sorted(found.keys() - wanted.keys())),
        ("of another shape", mismatched),
    ]
    return "; ".join(
        f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{' ...' if len(keys) > _SHOWN else ''}"
        for what, keys in problems
        if keys
    )
