"""Policies of routers in the plain loop, written out for one document at a time."""

from typing import Any

import torch
from torch import nn

from ds_finetune.plan.routers import RouterPlan


class PlainRouters:
    """Hooks on the routers of a transformers model, each forward of which has one unpadded document."""

    def __init__(self, model: nn.Module, plan: RouterPlan) -> None:
        self._plan = plan
        self._modules = [model.get_submodule(f"model.layers.{layer}.{plan.kind.module}") for layer in plan.layers]
        self.counts = torch.zeros(len(plan.layers), plan.experts, dtype=torch.int64)
        self._losses: list[torch.Tensor] = []
        for number, module in enumerate(self._modules):
            module.requires_grad_(plan.section.train)
            module.register_forward_hook(lambda _, __, output, number=number: self._see(number, output))
        if not plan.section.train:
            for name, parameter in model.named_parameters():
                # A multi-token prediction layer has a router too, which is not balanced.
                if f".{plan.kind.module}." in name:
                    parameter.requires_grad_(False)

    def take_loss(self) -> torch.Tensor:
        """The sum over layers and documents of `sum_i f_i P_i` since the last call, scalar."""
        total = torch.stack(self._losses).sum()
        self._losses.clear()
        return total

    def take_counts(self) -> torch.Tensor:
        """How often each expert was chosen since the last call, int64 [layers, experts]."""
        counts = self.counts.clone()
        self.counts.zero_()
        return counts

    def update_biases(self, counts: torch.Tensor) -> None:
        """Move each bias against the choices of a step."""
        for module, chosen in zip(self._modules, counts, strict=True):
            bias: Any = module.get_buffer(str(self._plan.kind.bias))
            load = chosen.double()
            bias -= self._plan.section.bias_update * torch.sign(load - load.mean()).float()

    def _see(self, number: int, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        logits, _, chosen = output
        tokens, experts = logits.shape
        self.counts[number] += torch.bincount(chosen.flatten(), minlength=experts)
        if self._plan.kind.scores == "sigmoid":
            scores = logits.float().sigmoid()
            shares = scores / scores.sum(-1, keepdim=True)
            chosen = scores.topk(chosen.shape[1]).indices
        else:
            shares = logits.float().softmax(-1)
        often = torch.bincount(chosen.flatten(), minlength=experts)
        f = often * experts / (chosen.shape[1] * tokens)
        self._losses.append((f * shares.mean(0)).sum())
