"""What is sampled: prompts, where answers end, and the answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingLimits:
    """Which ids are drawn, and where an answer ends: at one of `stop_ids`, where `stops` is true, or after
    `max_new_tokens` tokens.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    num_ids: int
    """Ids from this one on are never drawn: the tokenizer has no tokens for them."""
    allowed: torch.Tensor | None = None
    """Ids that may be drawn, bool [vocabulary]; None for all below `num_ids`."""
    stops: Callable[[list[int]], bool] | None = None
    """Called with the ids of an answer after each token; where it is true the answer ends, for example at a text."""

    def __post_init__(self) -> None:
        assert self.max_new_tokens > 0, self.max_new_tokens


@dataclass(frozen=True)
class PromptToSample:
    """A prompt; its noise depends on `number` and `key`, and not on the other prompts."""

    number: int
    """Number of the prompt in the data."""
    ids: Sequence[int]
    key: int
    """Number of the rollout."""


class SampledAnswer(NamedTuple):
    """An answer with the log-probabilities of its tokens under the distribution from which they were drawn."""

    ids: NDArray[np.int64]
    """Token ids without the prompt, including that at which the answer ends."""
    log_probs: NDArray[np.float32]
    finish: Finish
    """`length` where the answer was cut after `max_new_tokens`."""
