"""The documents of a forward without padding, found where its rows are made: on the host, before they are copied."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch


class RealTokens(NamedTuple):
    """The documents of a forward without padding; on a sequence parallel rank its tokens of them."""

    document: torch.Tensor
    """Number of the document of each token of the flattened rows, int64 [tokens]; padding has the number after the last
    one.
    """
    lengths: torch.Tensor
    """Tokens of each document, on all ranks together, int64 [documents]."""

    @property
    def is_real(self) -> torch.Tensor:
        """Whether each token is no padding, [tokens]."""
        return self.document < len(self.lengths)


def find_real_tokens(
    real: Sequence[int], documents: Sequence[Sequence[int]] | None, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the documents of all tokens, int64 [rows, tokens], and the lengths of the documents, int64
    [documents]. The first `real` tokens of each row are no padding; with `documents` None each row is one.
    """
    numbers, lengths = np.full((len(real), tokens), -1, dtype=np.int64), list[int]()
    for row, (parts, end) in enumerate(zip(documents or [(tokens,)] * len(real), real, strict=True)):
        start = 0
        for part in parts:
            inside = min(part, end - start)
            if inside <= 0:
                break
            numbers[row, start : start + inside] = len(lengths)
            lengths.append(inside)
            start += part
    numbers[numbers < 0] = len(lengths)
    return torch.from_numpy(numbers), torch.tensor(lengths, dtype=torch.int64)
