"""Sequence parallelism: ranks share the tokens of a row, and in attention its heads (Ulysses, Jacobs et al., arXiv
2309.14509).
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.sdpa_attention import repeat_kv

from ds_finetune.model.parallel.rank_group import RankGroup


class _AllToAll(torch.autograd.Function):
    """Slice i of dim 0 goes to rank i, and slice i comes from rank i; its gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, sequence: "SequenceGroup") -> torch.Tensor:  # noqa: ANN401
        ctx.sequence = sequence
        return sequence.exchanged(given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return ctx.sequence.exchanged(grad), None


class SequenceGroup(RankGroup):
    """Ranks that share rows; rank i holds the i-th of equal parts of each row's tokens."""

    def exchanged(self, given: torch.Tensor) -> torch.Tensor:
        """Slice i of dim 0 from rank i, for slice i of `given` to rank i."""
        given = given.contiguous()
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self.group)
        return taken

    def shard(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of `rows` [batch, tokens]."""
        return rows.chunk(self.size, dim=1)[self.place]

    def whole_rows(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """From this rank's tokens of all heads [batch, heads, tokens, width] to all tokens of this rank's heads, in one
        exchange.

        Heads fewer than ranks, or no multiple of them (grouped keys and values), are repeated first.
        """
        sent = [self._by_heads(repeat_kv(part, self.size // math.gcd(part.shape[1], self.size))) for part in parts]
        taken = _AllToAll.apply(torch.cat([part.reshape(self.size, -1) for part in sent], dim=1), self)
        pieces = taken.split([part[0].numel() for part in sent], dim=1)
        # [ranks, batch, heads, tokens, width], ranks being parts of the row now.
        return [
            piece.view(part.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
            for piece, part in zip(pieces, sent, strict=True)
        ]

    def own_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """From all tokens of this rank's heads [batch, tokens, heads, width] back to this rank's tokens of all
        heads.
        """
        batch, tokens, heads, width = out.shape
        by_rows = out.view(batch, self.size, tokens // self.size, heads, width).transpose(0, 1)
        taken = _AllToAll.apply(by_rows, self)
        return taken.permute(1, 2, 0, 3, 4).reshape(batch, tokens // self.size, self.size * heads, width)

    def _by_heads(self, part: torch.Tensor) -> torch.Tensor:
        """[batch, heads, tokens, width] -> [ranks, batch, heads of a rank, tokens, width]."""
        return part.unflatten(1, (self.size, -1)).transpose(0, 1)
