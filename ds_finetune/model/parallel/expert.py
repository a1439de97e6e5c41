"""Expert parallelism: each rank holds some of the routed experts, and computes them for the tokens of all ranks.

An all-to-all sends tokens to the ranks of their experts (Lepikhin et al., GShard, arXiv 2006.16668), without dropping
or padding tokens. Every rank has the full router, which is that of transformers.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.families.family import Family
from ds_finetune.foreign.transformers_models import changed_experts
from ds_finetune.model.experts import SortedRows, rows_up_to
from ds_finetune.model.kept_outputs import current_outputs
from ds_finetune.model.parallel.rank_group import RankGroup


class ExpertParallelGroup(RankGroup):
    """Ranks that share a layer's routed experts. Rank i has the i-th of equal shards."""


class _Exchange:
    """An asynchronous all-to-all of rows, and of their gradients in backward, which overlaps with computation."""

    def __init__(
        self, ep_group: ExpertParallelGroup, send_counts: list[int], receive_counts: list[int], *, is_kept: bool = True
    ) -> None:
        self._group, self._send, self._receive = ep_group, send_counts, receive_counts
        self._pending: tuple[torch.Tensor, torch.Tensor, dist.Work | None] | None = None
        self._kept = current_outputs() if is_kept else None

    def start(self, rows: torch.Tensor, *, is_backward: bool = False) -> torch.Tensor:
        send, receive = (self._receive, self._send) if is_backward else (self._send, self._receive)
        sent = rows.contiguous()
        work: dist.Work | None = None

        def begin() -> torch.Tensor:
            nonlocal work
            out = sent.new_empty(sum(receive), *sent.shape[1:])
            work = dist.all_to_all_single(out, sent, receive, send, group=self._group.group, async_op=True)
            return out

        out = begin() if self._kept is None or is_backward else self._kept.keep(begin)
        # The sent rows stay in memory too, because the all-to-all reads them until it is complete.
        self._pending = out, sent, work
        return out

    def wait(self) -> torch.Tensor:
        assert self._pending is not None
        (out, _, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        return out


class _StartExchange(torch.autograd.Function):
    """Starts an all-to-all of rows in the forward. Its backward waits for the all-to-all of their gradients.

    Computation between `_StartExchange` and `_AwaitExchange` overlaps with the all-to-all. Autograd runs backward in
    reverse order, so the gradients of this computation overlap with the gradients' all-to-all.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: _Exchange) -> torch.Tensor:  # noqa: ANN401
        ctx.exchange = exchange
        return exchange.start(rows)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return ctx.exchange.wait(), None


class _AwaitExchange(torch.autograd.Function):
    """Waits for an all-to-all of rows in the forward. Its backward starts the all-to-all of their gradients."""

    @staticmethod
    def forward(ctx: Any, arriving: torch.Tensor, exchange: _Exchange) -> torch.Tensor:  # noqa: ANN401
        ctx.exchange = exchange
        exchange.wait()
        return arriving.view_as(arriving)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        ctx.exchange.start(grad, is_backward=True)
        # Only the shape of this gradient matters. `_StartExchange.backward` returns the received values.
        return grad, None


class ExpertParallelExperts(nn.Module):
    """Mixin for a family's experts module. The module has `num_experts` of the layer's routed experts, and exchanges
    tokens with the ranks that have the others.
    """

    ep_group: ExpertParallelGroup
    num_experts: int
    compute_meanwhile: Callable[[], None] | None = None
    """Function that runs during the all-to-all that sends rows to the experts' ranks."""

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Map hidden states [tokens, width], chosen experts [tokens, k] and routing weights to [tokens, width]."""
        chosen = SortedRows.of(top_k_index)
        saved_outputs, counted = current_outputs(), partial(self._count_rows, chosen.experts)
        arriving, send_counts, receive_counts = counted() if saved_outputs is None else saved_outputs.keep(counted)
        of_weights, of_rows = (_Exchange(self.ep_group, send_counts, receive_counts) for _ in range(2))
        arriving_weights = _StartExchange.apply(chosen.weights_of(top_k_weights), of_weights)
        arriving_rows = _StartExchange.apply(chosen.rows_of(hidden), of_rows)
        if self.compute_meanwhile is not None:
            self.compute_meanwhile()
        rows = _AwaitExchange.apply(arriving_rows, of_rows)
        weights = _AwaitExchange.apply(arriving_weights, of_weights)
        # Recomputation does not need the rows that return from experts, so they are not saved.
        back = _Exchange(self.ep_group, receive_counts, send_counts, is_kept=False)
        # Rows arrive sorted by source rank and expert.
        expert = torch.arange(self.num_experts, device=rows.device).repeat(self.ep_group.size)
        expert = expert.repeat_interleave(arriving, output_size=len(rows))[:, None]
        if len(rows):
            out = self.run_experts(rows, expert, weights)
        else:
            # A rank without rows computes a row of zeros. Otherwise its experts and all-to-alls would have no gradient,
            # and other ranks would hang. The zeros are computed from `rows`, so that they have a gradient. Without it
            # frozen experts would save nothing for backward. Recomputation, which stops at the last saved tensor, would
            # then stop before the all-to-alls.
            zero = self.run_experts(rows.sum(0, keepdim=True), expert.new_zeros(1, 1), weights.sum(0, keepdim=True))
            out = rows + zero.sum() * 0
        return chosen.sums_of(_AwaitExchange.apply(_StartExchange.apply(out, back), back))

    def _count_rows(self, experts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Count the rows that ranks exchange. `experts` are the sorted experts of the rows to send. Returns numbers
        of rows: received for each source rank and expert, sent to each rank, and received from each rank.
        """
        per_expert = rows_up_to(experts, self.num_experts * self.ep_group.size).diff(prepend=experts.new_zeros(1))
        arriving = torch.empty_like(per_expert)
        dist.all_to_all_single(arriving, per_expert, group=self.ep_group.group)
        both = torch.stack([per_expert, arriving]).view(2, self.ep_group.size, -1)
        # NCCL needs the numbers of rows on the host, so the host waits for the GPU here.
        send_counts, receive_counts = both.sum(2).tolist()
        return arriving, send_counts, receive_counts

    def run_experts(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts by the family's own forward, without communication."""
        return super().forward(hidden, top_k_index, top_k_weights)  # type: ignore[no-any-return]


MarkParameter = Callable[[nn.Parameter], None]


@contextmanager
def build_local_experts(
    model_class: type[PreTrainedModel], family: Family, *, ep_size: int, mark: MarkParameter
) -> Iterator[None]:
    """Context in which a model is built with 1 / `ep_size` of its routed experts. `mark` gets their parameters."""
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
    """Make the experts of a model built under `build_local_experts` exchange tokens, in place."""
    for name, module in list(lm.named_modules()):
        if name.endswith(".mlp.experts"):
            module.__class__ = type(f"ExpertParallel{type(module).__name__}", (ExpertParallelExperts, type(module)), {})
            module.ep_group = ep_group  # type: ignore[assignment]


class SharedExpertsAhead(nn.Module):
    """Mixin for a layer's shared experts, which are computed as soon as the all-to-all to the routed experts has
    started. The layer's own call returns the stored output.
    """

    _hidden: torch.Tensor | None = None
    _has_grad = False
    _ahead: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output that `compute` stored, once. Without a stored output, compute the shared experts."""
        ready, self._ahead = self._ahead, None
        return super().__call__(hidden) if ready is None else ready  # type: ignore[no-any-return]

    def begin(self, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Hook before the layer's MLP: keep its input for `compute`."""
        self._hidden, self._has_grad = args[0], torch.is_grad_enabled()

    def compute(self) -> None:
        """Run the shared experts on the MLP's input, with all hooks, and store the output."""
        if self._hidden is not None and self._has_grad == torch.is_grad_enabled():
            self._ahead = super().__call__(self._hidden)

    def end(self, *_: object) -> None:
        """Hook after the layer's MLP: drop its input, and the stored output if it was not used."""
        self._hidden = self._ahead = None


def compute_shared_experts_ahead(lm: PreTrainedModel) -> None:
    """Make shared experts run during the all-to-all to the routed experts or, without expert parallelism, before these,
    in place. Results do not change, and recomputation can stop before the routed experts' down projection.

    Only families whose layers compute `shared_experts(x)` after `experts(x, ...)` are changed.
    """
    for name, module in list(lm.named_modules()):
        shared: Any = getattr(module, "shared_experts", None)
        if name.endswith(".mlp") and shared is not None:
            shared.__class__ = type(f"Ahead{type(shared).__name__}", (SharedExpertsAhead, type(shared)), {})
            module.register_forward_pre_hook(shared.begin)
            # This hook must also run after an exception, because torch ends a layer's recomputation by raising one.
            module.register_forward_hook(shared.end, always_call=True)
            is_parallel = isinstance(module.experts, ExpertParallelExperts)
            setattr(module.experts, "compute_meanwhile" if is_parallel else "compute_before", shared.compute)
