"""What is sampled: prompts, where answers end, and the answers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Finish = Literal["stop", "length"]
_FINISHES: tuple[Finish, ...] = ("stop", "length")


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


class PackedAnswers(NamedTuple):
    """Many answers in a few arrays, which ranks send each other: each has a place among all answers."""

    places: NDArray[np.int64]
    lengths: NDArray[np.int64]
    finishes: NDArray[np.int8]
    ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]

    @classmethod
    def of(cls, answers: dict[int, SampledAnswer]) -> "PackedAnswers":
        """The answers by their places."""
        parts = list(answers.values())
        return cls(
            np.array(list(answers), dtype=np.int64),
            np.array([len(part.ids) for part in parts], dtype=np.int64),
            np.array([_FINISHES.index(part.finish) for part in parts], dtype=np.int8),
            np.concatenate([np.zeros(0, dtype=np.int32), *(part.ids.astype(np.int32) for part in parts)]),
            np.concatenate([np.zeros(0, dtype=np.float32), *(part.log_probs for part in parts)]),
        )

    def answers(self) -> dict[int, SampledAnswer]:
        """The answers by their places."""
        ends = np.cumsum(self.lengths)[:-1]
        parts = zip(np.split(self.ids, ends), np.split(self.log_probs, ends), self.finishes, strict=True)
        answers = (SampledAnswer(ids.astype(np.int64), logps, _FINISHES[finish]) for ids, logps, finish in parts)
        return dict(zip(self.places.tolist(), answers, strict=True)) if len(self.places) else {}


def in_order(every: Iterable[PackedAnswers], *, group_size: int) -> list[list[SampledAnswer]]:
    """The answers of all ranks in groups of `group_size`, by their places."""
    merged = {place: answer for packed in every for place, answer in packed.answers().items()}
    groups = range(0, len(merged), group_size)
    return [[merged[place] for place in range(first, first + group_size)] for first in groups]
