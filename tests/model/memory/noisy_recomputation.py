"""Models whose recomputation is not bit-equal to their forward, as where ranks add up in another order each time.

As a program two ranks, each with half of the experts; prints each rank's errors of the gradients of experts.
"""

import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from ds_finetune.model.activation_memory import recompute_layers
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.parallel.expert import (
    ExpertParallelGroup,
    compute_shared_experts_ahead,
    install_expert_parallel,
)
from tests.model.tiny import CONFIGS

TOKENS, LAYERS = 256, 4
LARGE, SMALL = 2.0**-7, 2.0**-13
"""Relative noise of hidden states: the rounding of bf16, with which some tokens would choose other experts, and one with
which nearly none would.
"""


def model_of(model_type: str, config: Mapping[str, Any], noise: float = 0.0) -> PreTrainedModel:
    """A randomly initialised model in fp32. What attention and MLPs read has `noise` in every recomputation.

    But for experts, outputs are a smooth function of the noise: no value is clamped, and indexers choose all tokens.
    """
    smooth = {name: value for name, value in {"swiglu_limit": 1e6, "index_topk": TOKENS}.items() if name in config}
    hf_config = AutoConfig.for_model(model_type, **config | smooth | {"num_hidden_layers": LAYERS})
    # Attention of DeepSeek-V4 and of gpt-oss needs its masks and sinks, which torch's kernel does not take.
    lm = build_skeleton(hf_config, attention="eager", dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*lm.parameters(), *(each for each in lm.buffers() if each.is_floating_point())):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1 + (tensor.ndim == 1))
    disturbance = torch.Generator().manual_seed(1)

    def disturb(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_recomputing = torch._C._current_graph_task_id() >= 0  # Backward is under way.
        given = args[0] if args else kwargs["hidden_states"]
        if is_recomputing:
            given = given + given.detach() * noise * torch.randn(given.shape, generator=disturbance)
        return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": given})

    for name, module in lm.named_modules():
        if name.endswith(".self_attn") or hasattr(module, "experts"):
            module.register_forward_pre_hook(disturb, with_kwargs=True)
    return lm.train()


def expert_gradients(lm: PreTrainedModel, recomputation: str, first_id: int = 0) -> list[torch.Tensor]:
    """The gradient of each weight of experts; `recomputation` is `none`, `full` or `selective`."""
    if recomputation != "none":
        recompute_layers(lm, is_selective=recomputation == "selective")
    compute_shared_experts_ahead(lm)
    ids = torch.arange(first_id, first_id + TOKENS).mul(7).remainder(lm.config.vocab_size - 1).add(1)[None]
    lm(input_ids=ids, labels=ids).loss.backward()
    return [param.grad for name, param in lm.named_parameters() if ".experts." in name and param.grad is not None]


def errors_of(build: Callable[[float], PreTrainedModel], first_id: int = 0) -> dict[str, list[float]]:
    """By recomputation, the largest relative error of a gradient as a multiple of the noise: the large and the small."""
    expected = expert_gradients(build(0.0), "none", first_id)
    return {
        recomputation: [
            _error_of(expert_gradients(build(noise), recomputation, first_id), expected) / noise
            for noise in (LARGE, SMALL)
        ]
        for recomputation in ("full", "selective")
    }


def _error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def _half(family: str, rank: int, noise: float) -> PreTrainedModel:
    """A model of which `rank` has one half of the experts."""
    lm = model_of(family, CONFIGS[family], noise)
    for name, module in lm.named_modules():
        if name.endswith(".mlp.experts"):
            for leaf, param in list(module.named_parameters()):
                module.register_parameter(leaf, nn.Parameter(param.detach().chunk(2)[rank].clone()))
            module.num_experts //= 2  # type: ignore[operator]
    install_expert_parallel(lm, ExpertParallelGroup(dist.group.WORLD, 2, rank))
    return lm


def _main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    for family in ("deepseek_v3", "gpt_oss"):
        errors = errors_of(partial(_half, family, rank), first_id=rank * TOKENS)
        for recomputation, (large, small) in errors.items():
            sys.stdout.write(f"rank {rank} {family} {recomputation} {large} {small}\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    _main()
