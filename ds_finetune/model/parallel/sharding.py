"""Which shard of each tensor a rank holds under tensor and expert parallelism, by parameter name. Optimizer states and
gradients are sharded like weights.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import torch

from ds_finetune.families.family import Family
from ds_finetune.model.weights.names import is_adapter, weight_of
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.model_tensors import FullTensor

Ints = tuple[int, ...]
_COLUMN_PARALLEL = re.compile(
    r"^(?!.*\.compressor\.)(|.*\.)"
    r"((q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|o_a_proj|gate_proj|up_proj|embed_tokens|lm_head)\.(weight|bias)"
    r"|self_attn\.sinks)$"
)
"""Parameters that are sharded along their output (heads, inner width, vocabulary), dim 0, except in compressors."""
_ROW_PARALLEL = re.compile(r"(^|\.)(o_proj|o_b_proj|down_proj)\.weight$")
"""Weights sharded along dim 1, their inputs. Their biases are replicated, and added once after the all-reduce."""
_FUSED_EXPERTS = re.compile(r"\.mlp\.experts\.(?P<part>(gate_up_proj|down_proj)(_bias)?)$")
"""Tensors with all routed experts of a layer, which are sharded along each expert's inner width."""
_INNER_DIM: dict[bool, dict[str, int | None]] = {
    False: {"gate_up_proj": 2, "down_proj": 2},
    True: {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": None},
}
"""Dimension of the inner width in tensors with all experts; the key True is for transposed tensors. Transposed
tensors have alternating gate and up columns, so equal shards have both. The output bias has no inner width.
"""


@lru_cache(maxsize=4096)
def _fused_experts_part(name: str) -> str | None:
    fused = _FUSED_EXPERTS.search(name)
    return fused["part"] if fused else None


def _box_dim(name: str, *, has_transposed_experts: bool) -> int | None:
    """Dimension along which tensor parallelism shards a tensor; None if the tensor is replicated.

    A fused `gate_up_proj` [experts, 2 x inner, hidden] that is not transposed is viewed as [experts, 2, inner, hidden].
    """
    part = _fused_experts_part(name)
    if part is not None:
        return _INNER_DIM[has_transposed_experts].get(part)
    if _COLUMN_PARALLEL.search(name):
        return 0
    return 1 if _ROW_PARALLEL.search(name) else None


def tensor_of(name: str, shape: Ints, *, has_transposed_experts: bool) -> FullTensor:
    """Describe the tensor `name`: its unsharded `shape`, and the dimensions along which it is sharded."""
    part, dim = _fused_experts_part(name), _box_dim(name, has_transposed_experts=has_transposed_experts)
    is_gate_up = part == "gate_up_proj" and not has_transposed_experts
    return FullTensor(shape, 1 if is_gate_up else dim, part is not None)


@dataclass(frozen=True)
class ModelShard:
    """The shard of a model on this rank: number `tp_rank` of `tp_size` tensor parallel shards, and number `ep_rank` of
    `ep_size` shards of the routed experts.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    has_transposed_experts: bool = False

    @classmethod
    def of(cls, mesh: Mesh, family: Family) -> Self:
        """The shard of a family's model on this rank of the mesh."""
        return cls(mesh.tp, mesh.coordinate("tp"), mesh.ep, mesh.expert_index, family.transposed_experts)

    def tensor_shard(self, name: str, local_shape: Ints) -> "TensorShard":
        """This rank's shard of the tensor `name`, which has the shape `local_shape` on this rank.

        LoRA factors A [rank, in] and B [out, rank] are sharded like their weight [out, in]: along `out` B is sharded
        and A replicated, along `in` A is sharded and B replicated.
        """
        weight, side = weight_of(name) if is_adapter(name) else (name, "")
        fused = _fused_experts_part(weight)
        is_gate_up = fused == "gate_up_proj" and not self.has_transposed_experts
        has_halves = is_gate_up and side != "A"
        box = (local_shape[0], 2, local_shape[1] // 2, local_shape[2]) if has_halves else local_shape
        dim = _box_dim(weight, has_transposed_experts=self.has_transposed_experts)
        if side and dim is not None:
            # LoRA factors have the order [experts, out, in], even if the weight is [experts, in, out].
            dim = 3 - dim if fused and self.has_transposed_experts else dim
            is_input = dim == len(local_shape) - 1 and not is_gate_up
            dim = dim if is_input == (side == "A") else None
        counts, offsets = [1] * len(box), [0] * len(box)
        if fused:
            counts[0], offsets[0] = self.ep_size, self.ep_rank * box[0]
        if dim is not None:
            counts[dim], offsets[dim] = self.tp_size, self.tp_rank * box[dim]
        return TensorShard(
            global_shape=tuple(size * count for size, count in zip(box, counts, strict=True)),
            local_shape=box,
            offsets=tuple(offsets),
            dim=dim if self.tp_size > 1 else None,
            is_expert_parallel=bool(fused) and self.ep_size > 1,
        )


UNSHARDED = ModelShard()


@dataclass(frozen=True)
class TensorShard:
    """A shard of a tensor: a box of shape `local_shape` whose first element has the index `offsets` in the full tensor.

    A fused `gate_up_proj` [experts, 2 x inner, hidden] is viewed as [experts, 2, inner, hidden], in which a shard is
    one box.
    """

    global_shape: Ints
    local_shape: Ints
    offsets: Ints
    dim: int | None
    """Dimension that is sharded over tensor parallel ranks; None if all of them have the same elements."""
    is_expert_parallel: bool = False
    """Whether the shard has only some of the experts. Experts are dim 0."""

    @property
    def is_full(self) -> bool:
        """Whether the shard is the full tensor."""
        return self.local_shape == self.global_shape

    @property
    def full_shape(self) -> Ints:
        """Shape of the full tensor in the model."""
        return shape_in_model(self.global_shape)

    def slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elements of this shard, 1-D, from the full tensor."""
        box = tensor.view(self.global_shape)
        for dim, (start, size) in enumerate(zip(self.offsets, self.local_shape, strict=True)):
            box = box.narrow(dim, start, size)
        return box.reshape(-1)


def shape_in_model(shape: Ints) -> Ints:
    """Shape of a tensor or shard in the model. A fused `gate_up_proj` viewed as a 4-D box becomes 3-D again."""
    experts_gate_inner_hidden = 4
    return (shape[0], shape[1] * shape[2], shape[3]) if len(shape) == experts_gate_inner_hidden else shape
