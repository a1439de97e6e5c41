"""Data types of sampling: prompts, where answers end, and sampled answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingLimits:
    """Ids that may be sampled, and where an answer ends: at one of `stop_ids`, when `stops` returns true, or after
    `max_new_tokens` tokens.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    allowed: torch.Tensor | None = None
    """Mask of ids that may be sampled, bool [vocabulary]: the ids of the tokenizer; None for all."""
    stops: Callable[[list[int]], bool] | None = None
    """Called with the ids of an answer after each token; the answer ends when it returns true, e.g. at a stop text."""

    def __post_init__(self) -> None:
        assert self.max_new_tokens > 0, self.max_new_tokens


@dataclass(frozen=True)
class PromptToSample:
    """A prompt to sample from. Its random numbers depend on `number` and `key` only, not on other prompts."""

    number: int
    """Number of the prompt in the data."""
    ids: Sequence[int]
    key: int
    """Number of the rollout."""


class SampledAnswer(NamedTuple):
    """A sampled answer, with the log-probabilities of its tokens under the sampling distribution."""

    ids: NDArray[np.int64]
    """Token ids without the prompt, including the stop token."""
    log_probs: NDArray[np.float32]
    finish: Finish
    """`length` where the answer was cut after `max_new_tokens`."""
    experts: NDArray[np.int16] | None = None
    """Encoded experts behind the logits of each token, int16 [tokens, layers]; None without, or with a server."""


OnAnswer = Callable[[int, SampledAnswer], object]
"""Called with an answer's index among all answers, and the answer."""


def ignore(_place: int, _answer: SampledAnswer) -> None:
    """Do nothing with an answer."""


@dataclass(frozen=True)
class SamplingRequest:
    """Request for `group_size` answers to each of `prompts`, identical on every rank. An answer's index is that of its
    prompt x group_size + its number in the group.

    Answers depend only on `seed` and on the numbers of rollout, prompt and answer, not on ranks or batches, except by
    rounding. Without a seed they are greedy.
    """

    prompts: Sequence[PromptToSample]
    group_size: int
    limits: SamplingLimits
    seed: int | None
    batch_rows: int | None = None
    """Maximum number of answers per batch; None means to derive it from free memory."""
    is_over: Callable[[], bool] = lambda: False
    """Called before each batch, or about once a second where a server samples, equally often on every rank. It must
    return the same on every rank; once it is true, the result is None.
    """
    on_forward: Callable[[], object] = lambda: None
    """Called before each forward of a rank, or as often as `is_over` where a server samples."""
    on_answer: OnAnswer = ignore
    """Called when an answer has ended, on the rank that sampled it, or on one rank where a server samples."""
