"""The documents of one forward."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TopLogProbs:
    """A teacher's distributions of the next token, of rows [rows, tokens]; zeros where a token is not supervised."""

    ids: torch.Tensor
    """Its k most likely token ids, int32 [rows, tokens, k]."""
    log_probs: torch.Tensor
    """Their log-probabilities and, last, that of all other tokens together, fp16 [rows, tokens, k + 1]."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "TopLogProbs":
        """The same on `device`."""
        return TopLogProbs(*(part.to(device, non_blocking=non_blocking) for part in (self.ids, self.log_probs)))


@dataclass(frozen=True)
class Examples:
    """The documents of one forward in the order of its rows, without padding, for objectives whose loss is not a sum
    over tokens.
    """

    index: torch.Tensor
    """Number of each token's document within this forward, int64 [rows, tokens]; -1 for padding."""
    starts: torch.Tensor
    """Position of the first token of each document in the flattened rows, int64 [documents]."""
    ends: torch.Tensor
    """Position of the last token of each document in the flattened rows, int64 [documents]."""
    numbers: torch.Tensor
    """Number of each document in the data, int64 [documents]."""
    targets: torch.Tensor
    """Target of each document, fp64 [documents]."""
    reference: torch.Tensor
    """Log-probability of each document under the reference model, fp64 [documents]; zeros where there is none."""
    top: TopLogProbs | None = None
    """Stored distributions of a teacher; None where there are none."""
