"""Data types for sampling: prompts, limits of answers, and sampled answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingLimits:
    """Which token ids may be sampled, and where an answer ends: at one of `stop_ids`, when `stops` returns True, or
    after `max_new_tokens` tokens.
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    allowed: torch.Tensor | None = None
    """Mask of ids that may be sampled, bool [vocabulary]; None allows all."""
    stops: Callable[[list[int]], bool] | None = None
    """Function that gets an answer's ids after each token, and ends it by returning True, e.g. at a stop text."""

    def __post_init__(self) -> None:
        assert self.max_new_tokens > 0, self.max_new_tokens


@dataclass(frozen=True)
class PromptToSample:
    """A prompt whose answers are sampled. The seed, `number` and `key` determine the random numbers of its answers."""

    number: int
    ids: Sequence[int]
    key: int
    """Number of the rollout in which the prompt is sampled, so that each rollout has other random numbers."""


class SampledAnswer(NamedTuple):
    """A sampled answer, with the log-probabilities of its tokens under the sampling distribution."""

    ids: NDArray[np.int64]
    """Token ids without the prompt, including the stop token."""
    log_probs: NDArray[np.float32]
    finish: Finish
    """`length` if the answer was cut after `max_new_tokens`, else `stop`."""
    experts: NDArray[np.int16] | None = None
    """Hashes of the experts that computed each token's logits, int16 [tokens, layers]; None if a server samples."""


OnAnswer = Callable[[int, SampledAnswer], object]
"""Function that is called for each sampled answer, with its index among all answers."""


@dataclass(frozen=True)
class SamplingRequest:
    """Request for `group_size` answers to each of `prompts`, identical on every rank. The index of an answer is (index
    of its prompt) x group_size + its number in the group. Answers depend only on `seed` and on the numbers of rollout,
    prompt and answer. Ranks and batches change them only by rounding. Without a seed answers are greedy.
    """

    prompts: Sequence[PromptToSample]
    group_size: int
    limits: SamplingLimits
    seed: int | None
    batch_rows: int | None = None
    """Maximum number of answers per batch; None derives it from free memory."""
    is_over: Callable[[], bool] = lambda: False
    """Function that stops the sampling, without results, by returning True. It is called before each batch, or about
    once a second if a server samples. It is called equally often on every rank, and must return the same on every rank.
    """
    on_forward: Callable[[], object] = lambda: None
    """Function that is called before each forward of a rank, or about once a second if a server samples."""
    on_answer: OnAnswer = lambda *_: None
    """Function that is called when an answer has ended, on the rank that sampled it; with a server, on one rank."""
