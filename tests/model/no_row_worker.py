"""Two ranks with half of the experts each, none of them trained and recomputed layers: no row goes to those of rank one.

Prints each rank's largest difference to the whole model.
"""

import sys
from datetime import timedelta

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


def model_of(family: str) -> PreTrainedModel:
    """A model whose routers choose experts zero and one for every token."""
    config = AutoConfig.for_model(family, **CONFIGS[family])
    lm = build_skeleton(config, attention="sdpa", dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for name, param in lm.named_parameters():
        param.data = torch.randn(param.shape, generator=generator) * 0.03 + (param.ndim == 1)
        param.requires_grad_(".experts." not in name)
        if "embed_tokens" in name:
            param.data.abs_().add_(1.0)
        elif name.endswith("mlp.gate.weight"):
            param.data.abs_()
            param.data[2:] *= -1
    return lm.train()


def split(lm: PreTrainedModel, rank: int) -> None:
    """Leave `rank` its half of the experts."""
    for name, module in lm.named_modules():
        if name.endswith(".mlp.experts"):
            for leaf, param in list(module.named_parameters()):
                module.register_parameter(
                    leaf, nn.Parameter(param.detach().chunk(2)[rank].clone(), requires_grad=False)
                )
            module.num_experts //= 2  # type: ignore[operator]
    install_expert_parallel(lm, ExpertParallelGroup(dist.group.WORLD, 2, rank))


def main() -> None:
    """Compare loss and gradients of each rank's own row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    ids = torch.arange(1 + 7 * rank, 13 + 7 * rank)[None]
    for family in ("qwen3_moe", "deepseek_v2"):
        for is_selective in (False, True):
            whole, lm = model_of(family), model_of(family)
            split(lm, rank)
            recompute_layers(lm, is_selective=is_selective)
            compute_shared_experts_ahead(lm)
            losses = [each(input_ids=ids, labels=ids, use_cache=False).loss for each in (whole, lm)]
            for loss in losses:
                loss.backward()
            grads = {name: param.grad for name, param in whole.named_parameters() if param.requires_grad}
            differences = [
                (param.grad - grads[name]).abs().max() for name, param in lm.named_parameters() if name in grads
            ]
            difference = max(*differences, (losses[0] - losses[1]).abs())
            sys.stdout.write(f"rank {rank} {family} selective={is_selective} {float(difference):.1e}\n")
            sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
