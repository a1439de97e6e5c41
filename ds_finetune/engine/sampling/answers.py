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
    allowed: torch.Tensor | None = None
    """Ids that may be drawn, bool [vocabulary], which are those that the tokenizer has; None for all."""
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
    experts: NDArray[np.int16] | None = None
    """Marks of the experts that drew each token, [tokens, layers]; None where there are none, or a server sampled."""


OnAnswer = Callable[[int, SampledAnswer], object]
"""Gets the place of an answer among all answers, and the answer."""


def ignore(_place: int, _answer: SampledAnswer) -> None:
    """Do nothing with an answer."""


@dataclass(frozen=True)
class SamplingRequest:
    """`group_size` answers to each of `prompts`, which every rank asks for; their places count prompt x group_size +
    number in the group.

    They depend on `seed` and on the numbers of rollout, prompt and answer, and on no rank or batch but for rounding;
    with None they are the most probable tokens.
    """

    prompts: Sequence[PromptToSample]
    group_size: int
    limits: SamplingLimits
    seed: int | None
    batch_rows: int | None = None
    """Answers at a time, at most; with None memory decides."""
    is_over: Callable[[], bool] = lambda: False
    """Called before each batch, or about once a second where a server answers, equally often on every rank; where it is
    true, which is the same on every rank, the result is None.
    """
    on_forward: Callable[[], object] = lambda: None
    """Called before each forward of a rank, or as often as `is_over`."""
    on_answer: OnAnswer = ignore
    """Called as soon as an answer has ended: where it was sampled, or on one rank where a server answers."""
