"""Expert parallelism: each rank holds some of the routed experts and computes them for the tokens of all ranks.

Tokens are sent to the ranks of their experts and back by all-to-all (Lepikhin et al., GShard, arXiv 2006.16668). No
token is dropped, and none is padded. Every rank has the whole router, which is the family's own.
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


class ExpertParallelGroup(RankGroup):
    """Ranks that hold the routed experts of a layer; rank i holds the i-th of equal shards."""

    def all_to_all(self, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Send the first `send_counts[0]` rows to rank 0, the next to rank 1, and so on; receive `receive_counts[i]`
        rows from rank i. No gradient.
        """
        out = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive_counts, send_counts, group=self.group)
        return out


class _AllToAllRows(torch.autograd.Function):
    """`ExpertParallelGroup.all_to_all` in forward; backward sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        rows: torch.Tensor,
        ep_group: ExpertParallelGroup,
        send_counts: list[int],
        receive_counts: list[int],
    ) -> torch.Tensor:
        ctx.backward_counts = (ep_group, receive_counts, send_counts)
        return ep_group.all_to_all(rows, send_counts, receive_counts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        ep_group, send_counts, receive_counts = ctx.backward_counts
        return ep_group.all_to_all(grad, send_counts, receive_counts), None, None, None


def rows_up_to(experts: torch.Tensor, number: int) -> torch.Tensor:
    """How many of the sorted `experts`, int64 [rows], are at most each of `number` experts, int64 [number].

    Unlike `torch.bincount` it does not make a GPU wait for its largest number.
    """
    return torch.searchsorted(experts, torch.arange(number, device=experts.device), right=True)


class ExpertParallelExperts(nn.Module):
    """Mixed into a family's experts module that holds `num_experts` of the layer's experts."""

    ep_group: ExpertParallelGroup
    num_experts: int

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[tokens, width], chosen experts of the whole layer [tokens, k] and their weights -> [tokens, width]."""
        tokens, k = top_k_index.shape
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        per_expert = rows_up_to(experts, self.num_experts * self.ep_group.size).diff(prepend=experts.new_zeros(1))
        arriving = torch.empty_like(per_expert)
        dist.all_to_all_single(arriving, per_expert, group=self.ep_group.group)
        both = torch.stack([per_expert, arriving]).view(2, self.ep_group.size, -1)
        # The only wait of the host in a layer: NCCL needs the numbers of rows.
        send_counts, receive_counts = both.sum(2).tolist()
        rows = _AllToAllRows.apply(hidden[order // k], self.ep_group, send_counts, receive_counts)
        out = _AllToAllRows.apply(self._run_local_experts(rows, arriving), self.ep_group, receive_counts, send_counts)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        weighted = out[inverse] * top_k_weights.reshape(-1, 1)
        return weighted.view(tokens, k, hidden.shape[-1]).sum(1).to(hidden.dtype)

    def _run_local_experts(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """The outputs of this rank's experts for `rows`, sorted by source rank and expert; `arriving` counts them."""
        expert = torch.arange(self.num_experts, device=rows.device).repeat(self.ep_group.size)
        expert = expert.repeat_interleave(arriving, output_size=len(rows))
        if not len(rows):
            # Without a row the experts would have no gradient, for which other ranks wait.
            zero = self.run_experts(rows.new_zeros(1, rows.shape[1]), expert.new_zeros(1, 1), rows.new_zeros(1, 1))
            return rows + zero.sum() * 0
        return self.run_experts(rows, expert[:, None], rows.new_ones(len(rows), 1))

    def run_experts(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """The family's own forward of the experts that this rank holds, without communication."""
        return super().forward(hidden, top_k_index, top_k_weights)  # type: ignore[no-any-return]


MarkParameter = Callable[[nn.Parameter], None]


@contextmanager
def build_local_experts(
    model_class: type[PreTrainedModel], family: Family, *, ep_size: int, mark: MarkParameter
) -> Iterator[None]:
    """A model built inside gets one of `ep_size` equal shards of its routed experts; `mark` is called with each of
    their parameters.
    """
    if ep_size == 1 or family.experts_class is None:
        yield
        return
    assert family.expert_keys is not None, family.model_type
    number_key = family.expert_keys.number_keys[0]

    def local(config: Any) -> Any:  # noqa: ANN401 - a PretrainedConfig
        shard = copy.copy(config)
        setattr(shard, number_key, getattr(config, number_key) // ep_size)
        return shard

    def mark_parameters(module: nn.Module) -> None:
        for param in module.parameters():
            mark(param)

    with changed_experts(model_class, family.experts_class, local, after=mark_parameters):
        yield


def install_expert_parallel(lm: PreTrainedModel, ep_group: ExpertParallelGroup) -> None:
    """Add the communication of expert parallelism to a model built under `build_local_experts`, in place."""
    for name, module in list(lm.named_modules()):
        if name.endswith(".mlp.experts"):
            module.__class__ = type(f"ExpertParallel{type(module).__name__}", (ExpertParallelExperts, type(module)), {})
            module.ep_group = ep_group  # type: ignore[assignment]
