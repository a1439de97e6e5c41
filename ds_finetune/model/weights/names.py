"""Names of tensors in the model, in published checkpoints and in adapters.

The adapter of `MODULE.weight` has the parameters `MODULE.lora_A` and `MODULE.lora_B`, that of another `MODULE.LEAF` has
`MODULE.LEAF_lora_A` and `MODULE.LEAF_lora_B`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from ds_finetune.families.family import Family, Renames
from ds_finetune.foreign.auto_configs import renamings

Index = tuple[int | slice, ...]
QKV = ("q_proj", "k_proj", "v_proj")
"""Names of the layers that compute queries, keys and values, in the order in which checkpoints join them."""
_SHOWN = 10
_MLP = re.compile(r"^(model\.layers\.\d+)\.mlp\.")
_FUSED = re.compile(r"^(?P<experts>.*\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)$")
_JOINED = ".gate_up_proj.weight"
_EXPERT_DIMS = 3


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor `key` of shape `shape`, which is the part `tensor[index]` of a tensor of the model."""

    key: str
    index: Index
    shape: tuple[int, ...]

    def first_element(self, shape: tuple[int, ...]) -> int:
        """Index of the piece's first element in the flattened tensor of `shape`. Its other elements follow."""
        begin, stride = 0, math.prod(shape)
        for size, part in zip(shape, self.index, strict=False):
            stride //= size
            begin += stride * (part if isinstance(part, int) else part.start)
        return begin


def hub_pieces(name: str, shape: tuple[int, ...], family: Family, *, first_expert: int = 0) -> tuple[Piece, ...]:
    """The checkpoint tensors that make up the model's tensor `name` of shape `shape`, without gaps or overlap.

    Fused experts are `gate_up_proj` [experts, 2 x inner, hidden] and `down_proj` [experts, hidden, inner]. Checkpoints
    have a matrix per expert and projection instead (transformers 5.23, conversion_mapping.py:51-53, 1270). Families
    with `joined_mlp` have `gate_up_proj` also in dense MLPs, where checkpoints have two matrices. Other tensors have
    equal shapes in both. `first_expert` is the number of the tensor's first expert in the decoder layer.
    """
    names = family.published_mlp
    if family.joined_mlp and name.endswith(_JOINED) and shape:
        layer, half = published_name(name, family).removesuffix(_JOINED), shape[0] // 2
        ranges = (("gate", slice(0, half)), ("up", slice(half, shape[0])))
        return tuple(Piece(f"{layer}.{part}_proj.weight", (where,), (half, *shape[1:])) for part, where in ranges)
    fused = _FUSED.match(name) if family.fused_experts and len(shape) == _EXPERT_DIMS else None
    if not fused:
        return (Piece(published_name(name, family), (), shape),)
    layer, (experts, rows, columns) = published_name(fused["experts"], family), shape
    if fused["part"] == "down_proj":
        return tuple(
            Piece(f"{layer}.{first_expert + e}.{names.down}.weight", (e,), (rows, columns)) for e in range(experts)
        )
    half = rows // 2
    return tuple(
        Piece(f"{layer}.{first_expert + e}.{part}.weight", (e, where), (half, columns))
        for e in range(experts)
        for part, where in ((names.gate, slice(0, half)), (names.up, slice(half, rows)))
    )


def qkv_pieces(key: str, shape: tuple[int, ...], family: Family, config: Mapping[str, Any]) -> tuple[Piece, ...]:
    """Split the published tensor `key`, which joins queries, keys and values (`Family.published_qkv`), by config.json's
    numbers of heads. Empty for other tensors, and if the number of heads does not divide the number of rows.
    """
    joined = f".{family.published_qkv}."
    if joined not in key or not shape:
        return ()
    tree = family.newer.older_config(config) if family.newer else config
    heads = [tree[f"num_{kind}_heads"] or 0 for kind in ("attention", "key_value", "key_value")]
    if not all(heads) or shape[0] % sum(heads):
        return ()
    rows = [shape[0] // sum(heads) * count for count in heads]
    ends = [*accumulate(rows, initial=0)]
    return tuple(
        Piece(key.replace(joined, f".{name}."), (slice(begin, end),), (end - begin, *shape[1:]))
        for name, (begin, end) in zip(QKV, pairwise(ends), strict=True)
    )


def joined_qkv(shapes: Mapping[str, tuple[int, ...]], family: Family) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Where the family's checkpoints join queries, keys and values. Returns for each part, by published name: name of
    the joined tensor, index of the part's first element, shape of the joined tensor. `shapes` are shapes by name.
    """
    joined: dict[str, tuple[str, int, tuple[int, ...]]] = {}
    for key in shapes if family.published_qkv else ():
        if f".{QKV[0]}." in key:
            parts = [key.replace(f".{QKV[0]}.", f".{name}.") for name in QKV]
            whole = key.replace(f".{QKV[0]}.", f".{family.published_qkv}.")
            shape = (sum(shapes[part][0] for part in parts), *shapes[key][1:])
            firsts = accumulate((math.prod(shapes[part]) for part in parts), initial=0)
            joined |= {part: (whole, first, shape) for part, first in zip(parts, firsts, strict=False)}
    return joined


def published_names(shapes: Mapping[str, tuple[int, ...]], family: Family) -> tuple[str, ...]:
    """The names that the model's tensors `shapes` (shapes by name) have in a published checkpoint."""
    return tuple(piece.key for name, shape in shapes.items() for piece in hub_pieces(name, shape, family))


def published_name(name: str, family: Family) -> str:
    """Published name of the tensor that the model calls `name`. It must not be a tensor of fused experts.

    For a model type that is not in the table of families, it is the name by which transformers saves the tensor.
    """
    for renaming in renamings(family.model_type)[1] if family.is_generic else ():
        name = renaming.rename_source_key(name)[0]
    name = renamed(name, family.published_renames)
    return _MLP.sub(rf"\1.{family.published_mlp.module}.", name)


def canonical_name(key: str, family: Family) -> str:
    """Published name of a tensor of a model type that is not in the table of families. `key` may be the name by
    which transformers saves the tensor, or its name in the model.
    """

    def in_model(name: str) -> str:
        for renaming in renamings(family.model_type)[0]:
            name = renaming.rename_source_key(name)[0]
        return name

    # Some of transformers' patterns also match names in the model. Renaming back does not restore such names.
    renamed, original = published_name(in_model(key), family), published_name(key, family)
    return original if renamed != key and in_model(original) == key else renamed


def renamed(name: str, renames: Renames) -> str:
    """Apply all `renames` to `name`, one after the other."""
    for pattern, new in renames:
        name = re.sub(pattern, new, name)
    return name


def is_table(name: str) -> bool:
    """Whether a tensor is an integer table from token ids to experts (DeepSeek-V4)."""
    return name.endswith(".tid2eid")


def is_kept_in_fp32(key: str, family: Family) -> bool:
    """Whether `family` keeps the published tensor `key` in fp32."""
    buffers = tuple(published_name(f".{leaf}", family) for leaf in family.fp32_buffers)
    return key.endswith(buffers) or family.is_in_fp32(key)


def differences(expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]) -> str:
    """Text that lists differences in names and shapes between a checkpoint's tensors `stored` and the tensors
    `expected` by the model. Empty without differences.
    """
    common = sorted(key for key in expected.keys() & stored.keys() if expected[key] != stored[key])
    mismatched = [f"{key}: model {expected[key]}, checkpoint {stored[key]}" for key in common]
    problems = [
        ("missing", sorted(expected.keys() - stored.keys())),
        ("unexpected", sorted(stored.keys() - expected.keys())),
        ("of another shape", mismatched),
    ]
    return "; ".join(
        f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{' ...' if len(keys) > _SHOWN else ''}"
        for what, keys in problems
        if keys
    )


_ADAPTER = re.compile(r"^(?P<module>.+)\.((?P<leaf>\w+)_)?lora_(?P<side>[AB])$")


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to a LoRA adapter."""
    return _ADAPTER.match(name) is not None


def weight_of(name: str) -> tuple[str, str]:
    """Name of the weight that an adapter's parameter `name` adapts, and which factor it is, `A` or `B`."""
    match = _ADAPTER.match(name)
    assert match, name
    return f"{match['module']}.{match['leaf'] or 'weight'}", match["side"]
