"""What differs between model types, as rows of a table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """One model type: how its tensors are named in published checkpoints, and what may be absent or left over there."""

    model_type: str
    fused_experts: bool = False
    """Experts are one 3-D tensor per layer in transformers 5 and one matrix each in published checkpoints."""
    experts_class: str | None = None
    """Class of its routed experts in transformers, where they may be shared out over ranks."""
    drops_layers_beyond: bool = False
    """Layers numbered past `num_hidden_layers` (DeepSeek-V3's multi-token prediction) are published and not built."""
    may_be_unexpected: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    """Regular expressions of checkpoint keys that are declared not to be loaded."""
    fp32_buffers: tuple[str, ...] = ()
    """Last parts of the names of untrained tensors that stay fp32 whatever the precision."""
    fp8_linear: str | None = r"\.(self_attn|mlp)\.([\w.]+\.)?\w+_proj(_with_mqa)?\.weight$"
    """Regular expression of the weights that are published in FP8, by checkpoint key: as DeepSeek-V3's those of
    attention, MLPs, shared and routed experts. None where it is not known, and the base must tell."""
    export_config: Mapping[str, object] = field(default_factory=dict)
    """Keys a served `config.json` must have, added where the base has none."""
    window_in_mask: bool = False
    """transformers 5.23 gives its sliding window to masks alone, which FlashAttention does without
    (qwen2_moe/modeling_qwen2_moe.py:254)."""
    is_generic: bool = False

    def may_leave(self, key: str, *, layers: int) -> bool:
        """Whether a model of `layers` layers may leave the checkpoint tensor `key` out: declared above, or of a layer
        past the last one.
        """
        if any(re.search(pattern, key) for pattern in self.may_be_unexpected):
            return True
        return self.drops_layers_beyond and layer_of(key) >= layers


_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""What is added to the scores of experts to choose them: published values lie closer together than bf16's steps."""


def layer_of(key: str) -> int:
    """Number of the layer that the checkpoint tensor `key` is of; -1 where it is of none."""
    layer = re.match(r"^model\.layers\.(\d+)\.", key)
    return int(layer[1]) if layer else -1


_FAMILIES = (
    Family("deepseek_v2", fused_experts=True, experts_class="DeepseekV2Experts"),
    Family(
        "deepseek_v3",
        fused_experts=True,
        experts_class="DeepseekV3Experts",
        drops_layers_beyond=True,
        fp32_buffers=_ROUTER_BIASES,
        export_config={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    Family("qwen2"),
    Family("qwen3"),
    Family("qwen2_moe", fused_experts=True, window_in_mask=True),
    Family("qwen3_moe", fused_experts=True),
    Family("llama"),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _FAMILIES}
"""Families by `model_type` of their config.json; R1 is deepseek_v3, its distills are qwen2, qwen3 and llama."""


def family_of(model_type: str) -> Family:
    """The row of a model type, or the generic row: same tensor names in checkpoint and model, nothing declared
    absent.
    """
    return FAMILIES.get(model_type, Family(model_type, fp32_buffers=_ROUTER_BIASES, fp8_linear=None, is_generic=True))
