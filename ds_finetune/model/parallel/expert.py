"""Expert parallelism: each rank holds some of the routed experts and computes them for the tokens of all.

Tokens go to the ranks of their experts and come back by all-to-all (Lepikhin et al., GShard, arXiv 2006.16668), as
many as there are: none is dropped, and none is padded. The router is the family's own and every rank has it whole.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.families.family import Family
from ds_finetune.model.parallel.rank_group import RankGroup
from ds_finetune.patches.transformers_models import changed_experts


class ExpertGroup(RankGroup):
    """Ranks that hold the experts of a layer; rank i holds the i-th of equal parts."""

    def exchanged(self, rows: torch.Tensor, sent: list[int], taken: list[int]) -> torch.Tensor:
        """`sent[i]` rows to rank i, in order, for `taken[i]` rows from it."""
        out = rows.new_empty(sum(taken), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), taken, sent, group=self.group)
        return out


class _Exchange(torch.autograd.Function):
    """Rows to the ranks they are for; their gradients come the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, experts: ExpertGroup, sent: list[int], taken: list[int]) -> torch.Tensor:  # noqa: ANN401
        ctx.way_back = (experts, taken, sent)
        return experts.exchanged(rows, sent, taken)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        experts, taken, sent = ctx.way_back
        return experts.exchanged(grad, taken, sent), None, None, None


class Dispatched(nn.Module):
    """Mixed into a family's experts module that holds `num_experts` of the layer's experts."""

    experts: ExpertGroup
    num_experts: int

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[tokens, width], chosen experts of the whole layer [tokens, k] and their weights -> [tokens, width]."""
        tokens, chosen = top_k_index.shape
        order = top_k_index.reshape(-1).argsort(stable=True)
        per_expert = torch.bincount(top_k_index.reshape(-1), minlength=self.num_experts * self.experts.size)
        arriving = torch.empty_like(per_expert)
        dist.all_to_all_single(arriving, per_expert, group=self.experts.group)
        sent = per_expert.view(self.experts.size, -1).sum(1).tolist()
        taken = arriving.view(self.experts.size, -1).sum(1).tolist()
        rows = _Exchange.apply(hidden[order // chosen], self.experts, sent, taken)
        out = _Exchange.apply(self._computed(rows, arriving), self.experts, taken, sent)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        weighted = out[back] * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, chosen, -1).sum(1).to(hidden.dtype)

    def _computed(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """The outputs of this rank's experts for `rows`, which lie by rank and expert as `arriving` counts them."""
        local = torch.arange(self.num_experts, device=rows.device).repeat(self.experts.size).repeat_interleave(arriving)
        if not len(rows):
            # Without a row there would be no gradient of the experts, for which other ranks wait.
            nothing = super().forward(rows.new_zeros(1, rows.shape[1]), local.new_zeros(1, 1), rows.new_zeros(1, 1))
            return rows + nothing.sum() * 0
        return super().forward(rows, local[:, None], rows.new_ones(len(rows), 1))  # type: ignore[no-any-return]


Tag = Callable[[nn.Parameter], None]


@contextmanager
def fewer_experts(model_class: type[PreTrainedModel], family: Family, *, parts: int, tag: Tag) -> Iterator[None]:
    """While a model is built, its experts modules hold one of `parts` equal parts of their experts; `tag` is told of
    their parameters.
    """
    if parts == 1 or family.experts_class is None:
        yield
        return

    def local(config: Any) -> Any:  # noqa: ANN401 - a PretrainedConfig
        part = copy.copy(config)
        part.num_local_experts = part.n_routed_experts = config.n_routed_experts // parts
        return part

    def tag_parameters(module: nn.Module) -> None:
        for param in module.parameters():
            tag(param)

    with changed_experts(model_class, family.experts_class, local, after=tag_parameters):
        yield


def install_expert_parallel(lm: PreTrainedModel, experts: ExpertGroup) -> None:
    """Make experts modules built under `fewer_experts` work together with those of the other ranks."""
    for name, module in list(lm.named_modules()):
        if name.endswith(".mlp.experts"):
            module.__class__ = type(f"Dispatched{type(module).__name__}", (Dispatched, type(module)), {})
            module.experts = experts  # type: ignore[assignment]
