"""Along which dimension tensor and expert parallelism cut a tensor, by its name in the model."""

import re
from functools import lru_cache

_COLUMN_PARALLEL = re.compile(
    r"^(?!.*\.compressor\.)(|.*\.)"
    r"((q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|o_a_proj|gate_proj|up_proj|embed_tokens|lm_head)\.(weight|bias)"
    r"|self_attn\.sinks)$"
)
"""Sharded along the output (heads, groups of heads, inner width, vocabulary): dim 0. Compressors are whole."""
_ROW_PARALLEL = re.compile(r"(^|\.)(o_proj|o_b_proj|down_proj)\.weight$")
"""Sharded along the input: dim 1. Every rank has the whole bias, which is added once, after the sum over ranks."""
_FUSED_EXPERTS = re.compile(r"\.mlp\.experts\.(?P<part>(gate_up_proj|down_proj)(_bias)?)$")
"""Fused experts, sharded along each expert's inner width."""
_INNER_DIM: dict[bool, dict[str, int | None]] = {
    False: {"gate_up_proj": 2, "down_proj": 2},
    True: {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": None},
}
"""Dimension of the inner width in the box of a tensor of experts, by whether they are transposed: then columns of gate
and up take turns, and equal shards have both of each. The bias of the outputs has no inner width.
"""


@lru_cache(maxsize=4096)
def fused_experts_part(name: str) -> str | None:
    """Last part of the name of a tensor of all routed experts, such as `gate_up_proj_bias`; None for others."""
    fused = _FUSED_EXPERTS.search(name)
    return fused["part"] if fused else None


def box_dim(name: str, *, has_transposed_experts: bool) -> int | None:
    """Dimension along which tensor parallelism cuts a tensor; None where every rank holds it whole.

    Of a fused `gate_up_proj` [experts, 2 x inner, hidden] that is not transposed, it is the dimension of the view
    [experts, 2, inner, hidden].
    """
    part = fused_experts_part(name)
    if part is not None:
        return _INNER_DIM[has_transposed_experts].get(part)
    if _COLUMN_PARALLEL.search(name):
        return 0
    return 1 if _ROW_PARALLEL.search(name) else None


@lru_cache(maxsize=4096)
def local_shape(
    name: str, whole: tuple[int, ...], *, tp: int = 1, ep: int = 1, has_transposed_experts: bool = False
) -> tuple[int, ...]:
    """Shape of what a rank holds of the tensor `name`, whose shape in the model is `whole`."""
    part, dim = fused_experts_part(name), box_dim(name, has_transposed_experts=has_transposed_experts)
    if part == "gate_up_proj" and not has_transposed_experts:
        dim = 1
    local = list(whole)
    if part is not None:
        local[0] //= ep
    if dim is not None:
        local[dim] //= tp
    return tuple(local)
