"""What quantising the weights of a language model costs: loss and divergence on text that the model samples itself."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.units import GIB

ROWS, LENGTH = 8, 64
"""Texts that the model samples, and their tokens."""
Logs = NDArray[np.float32]
"""Log-probabilities of every next token, [rows, length - 1, vocabulary]."""


@dataclass(frozen=True)
class QuantisationLoss:
    """What quantising weights has changed."""

    dtype: str
    loss_before: float
    """Mean negative log-likelihood of a token of texts that the model sampled itself, in nats."""
    loss_after: float
    divergence: float
    """Mean Kullback-Leibler divergence of a token's distribution from that before, in nats."""
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(
        cls, dtype: str, ids: NDArray[np.int64], before: Logs, after: Logs, sizes: tuple[int, int]
    ) -> "QuantisationLoss":
        """From log-probabilities of the texts `ids` [rows, length], and the bytes of weights before and after."""
        first, last = (
            float(-np.take_along_axis(each, ids[:, 1:, None], -1).mean(dtype=np.float64)) for each in (before, after)
        )
        return cls(
            dtype, first, last, float((np.exp(before) * (before - after)).sum(-1).mean(dtype=np.float64)), *sizes
        )

    def line(self) -> str:
        """The result, for the terminal."""
        return (
            f"{self.dtype}: loss {self.loss_before:.4f} before and {self.loss_after:.4f} after, KL divergence "
            f"{self.divergence:.1e} nats a token, on {ROWS * (LENGTH - 1)} tokens that the model sampled; "
            f"{self.bytes_before / GIB:.2f} GiB became {self.bytes_after / GIB:.2f} GiB"
        )


def log_probabilities(logits: NDArray[np.float32]) -> Logs:
    """Log-probabilities of the next token after each but the last, from logits [rows, length, vocabulary]."""
    shifted = logits[:, :-1] - logits[:, :-1].max(-1, keepdims=True)
    result: Logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
