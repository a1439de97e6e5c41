"""The forward of routed experts that transformers calls for `experts_implementation: grouped_mm`."""

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from ds_finetune.model.kept_outputs import kept

_keep_products = kept(grouped_mm_experts_forward)


def run_experts(
    module: nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[tokens, width], chosen experts [tokens, k] and their weights -> [tokens, width]."""
    # Biases are added to products in place (transformers 5.23, integrations/moe.py:419), which so cannot be kept.
    run = grouped_mm_experts_forward if module.has_bias else _keep_products
    return run(module, hidden, top_k_index, top_k_weights)


def install_grouped_experts() -> None:
    """Let transformers call `run_experts`, for the life of the process."""
    ALL_EXPERTS_FUNCTIONS.register("grouped_mm", run_experts)
