"""Sequence parallelism (Ulysses, arXiv 2309.14509): ranks share rows by tokens and, in attention, by heads."""

import math
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.sdpa_attention import repeat_kv

from ds_finetune.model.parallel.rank_group import RankGroup


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: torch.Tensor, sp_group: "SequenceParallelGroup") -> torch.Tensor:  # noqa: ANN401
        ctx.sp_group = sp_group
        return sp_group.all_to_all(slices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return ctx.sp_group.all_to_all(grad), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, sp_group: "SequenceParallelGroup") -> torch.Tensor:  # noqa: ANN401
        ctx.sp_group = sp_group
        shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(sp_group.size)]
        dist.all_gather(shards, shard.contiguous(), group=sp_group.group)
        return torch.cat(shards, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return ctx.sp_group.shard(ctx.sp_group.all_reduce(grad)), None


class SequenceParallelGroup(RankGroup):
    """Ranks that share rows. Rank i has the i-th of equal shards of each row's tokens."""

    def all_to_all(self, slices: torch.Tensor) -> torch.Tensor:
        """Send slice i of dim 0 to rank i, and receive a slice from each rank. The result has no gradient."""
        slices = slices.contiguous()
        received = torch.empty_like(slices)
        dist.all_to_all_single(received, slices, group=self.group)
        return received

    def shard(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the tokens of full `rows` [batch, tokens, ...]."""
        return rows.chunk(self.size, dim=1)[self.group_rank]

    def gather_tokens(self, shard: torch.Tensor) -> torch.Tensor:
        """All-gather tokens: [batch, tokens / ranks, ...] of each rank becomes [batch, tokens, ...]."""
        return _GatherTokens.apply(shard, self)  # type: ignore[no-any-return]

    def with_tokens_before(self, shard: torch.Tensor, number: int) -> torch.Tensor:
        """This rank's tokens [batch, tokens, ...], preceded by up to `number` tokens of earlier ranks."""
        size = min(number, shard.shape[1])
        tails, end = self.gather_tokens(shard[:, shard.shape[1] - size :]), self.group_rank * size
        return torch.cat([tails[:, max(0, end - number) : end], shard], dim=1)

    def gather_tokens_scatter_heads(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """All-to-all before attention. It maps this rank's tokens of all heads, [batch, heads, tokens, width], to all
        tokens of this rank's heads. All `tensors` are sent in one all-to-all.

        Key and value heads are repeated first if the number of ranks does not divide them.
        """
        repeated = (repeat_kv(tensor, self.size // math.gcd(tensor.shape[1], self.size)) for tensor in tensors)
        by_rank = [tensor.unflatten(1, (self.size, -1)).transpose(0, 1) for tensor in repeated]
        received = _AllToAll.apply(torch.cat([slices.reshape(self.size, -1) for slices in by_rank], dim=1), self)
        pieces = received.split([slices[0].numel() for slices in by_rank], dim=1)
        # Received pieces are [ranks, batch, heads, tokens, width], in the order of the row's shards.
        return [
            piece.view(slices.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for piece, slices in zip(pieces, by_rank, strict=True)
        ]

    def gather_heads_scatter_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """All-to-all after attention. It maps all tokens of this rank's heads, [batch, tokens, heads, width], to this
        rank's tokens of all heads.
        """
        batch, tokens, heads, width = out.shape
        by_rank = out.view(batch, self.size, tokens // self.size, heads, width).transpose(0, 1)
        received = _AllToAll.apply(by_rank, self)
        return received.permute(1, 2, 0, 3, 4).reshape(batch, tokens // self.size, self.size * heads, width)
