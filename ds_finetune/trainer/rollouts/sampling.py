"""Samples answers to prompts of the data, and scores each answer as soon as it has ended. All ranks get all answers."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.config.sections import RolloutConfig
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.sampling.answers import PromptToSample, SampledAnswer, SamplingLimits, SamplingRequest
from ds_finetune.errors import FinetuneError
from ds_finetune.objectives.rewards.answers import AnswerToScore
from ds_finetune.objectives.rewards.pool import Rewards
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.rollouts.rollout import AnswerGroup, Floats

PHASE = "rollout"
"""Name of the phase of sampling in the watchdog and in the run's status."""
_MEETING_SECONDS = 60.0
_TAIL = 16
"""To find a stop text, this number of tokens is decoded, and one more for each character of the longest stop text."""


Answers = list[list[SampledAnswer]]
StartSampling = Callable[[SamplingRequest], Callable[[], Answers | None]]
"""Function that starts to sample answers, and returns a function that waits for all answers; both are collective. The
run's own engine has sampled all answers when the first function returns; a server samples in the background.
"""


@dataclass(frozen=True)
class AnswerTexts:
    """Converts prompts and answers to text, and says when an answer ends."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    num_ids: int
    """Number of token ids in the model's vocabulary."""
    rollout: RolloutConfig

    def text(self, answer: SampledAnswer) -> str:
        """The text of an answer, without its stop token or stop text. Other special tokens are kept."""
        ids = answer.ids.tolist()
        if ids and ids[-1] in self.stop_ids:
            return str(self.tokenizer.decode(ids[:-1]))
        text = str(self.tokenizer.decode(ids))
        return text[: min((text.index(stop) for stop in self.rollout.stop if stop in text), default=len(text))]

    def prompt_text(self, rows: PreparedRows, number: int) -> str:
        """The text of a prompt as the model sees it."""
        return str(self.tokenizer.decode(rows.prompt_ids(number)))

    @cached_property
    def limits(self) -> SamplingLimits:
        """What ends an answer, and which ids may be sampled: those that the tokenizer has."""
        return SamplingLimits(
            max_new_tokens=self.rollout.max_new_tokens,
            stop_ids=self.stop_ids,
            allowed=allowed_ids(self.tokenizer.get_vocab(), self.num_ids),
            stops=self._has_stop if self.rollout.stop else None,
        )

    def _has_stop(self, ids: list[int]) -> bool:
        texts = self.rollout.stop
        tail = self.tokenizer.decode(ids[-(max(map(len, texts)) + _TAIL) :])
        return any(text in tail for text in texts)

    def to_score(self, rows: PreparedRows, number: int, answer: SampledAnswer, at: int) -> AnswerToScore:
        """The input of the rewards for answer `at` (from 0) to the prompt of row `number`."""
        return AnswerToScore(
            record=rows.record(number),
            prompt=self.prompt_text(rows, number),
            text=self.text(answer),
            ids=answer.ids.tolist(),
            finish=answer.finish,
            where=f"{rows.where(number)}, answer {at + 1}",
        )


class SampledGroups:
    """Answers to prompts, each scored as soon as it has ended, while others are sampled or the run continues."""

    wait: Callable[[], Answers | None]
    """Function that waits for the answers; its result is None if the request was stopped before."""

    def __init__(self, sampler: "Sampler", rows: PreparedRows, prompts: Sequence[tuple[int, int]], size: int) -> None:
        self._sampler, self._rows, self._prompts, self._size = sampler, rows, prompts, size
        self._indices: list[int] = []
        """Indices of the answers that this rank scores."""
        self._pending = sampler.rewards.start()
        self.noted: dict[str, float] = {}
        """Measurements by name. `sample` are the seconds for which the run waited for answers, `reward` the seconds for
        which it then waited for rewards, and `unparsed` is the number of answers to which no reward applies, or from
        which a reward could parse no result.
        """

    def score(self, index: int, answer: SampledAnswer) -> None:
        """Start to compute the rewards of an answer on this rank."""
        self._indices.append(index)
        prompt, at = divmod(index, self._size)
        self._pending.add(self._sampler.texts.to_score(self._rows, self._prompts[prompt][1], answer, at))

    def groups(self) -> list[AnswerGroup] | None:
        """Wait for the scores of all answers, and return the groups; None if the request was stopped before.
        Collective. RewardError on every rank if a reward has failed on any rank.
        """
        began = time.perf_counter()
        answers = self.wait()
        self.noted["sample"] += time.perf_counter() - began
        if answers is None:
            self._pending.cancel()
            return None
        began = time.perf_counter()
        while not all(all_gather_object(self._pending.is_scored(within=_MEETING_SECONDS))):
            # By these collectives the watchdog sees that the run only waits for slow rewards and does not hang.
            continue
        scores = np.full((len(self._prompts) * self._size, len(self._sampler.rewards.names)), np.nan)
        unparsed = 0
        for indices, of_rank, number, error in all_gather_object((self._indices, *self._share())):
            if error is not None:
                raise error
            scores[indices] = of_rank
            unparsed += number
        self.noted |= {"reward": time.perf_counter() - began, "unparsed": unparsed}
        parts = scores.reshape(len(self._prompts), self._size, -1)
        weights, section = self._sampler.rewards.weights, self._sampler.objective
        return [
            AnswerGroup.scored(prompt, of_prompt, of_group, weights, section)
            for prompt, of_prompt, of_group in zip(self._prompts, answers, parts, strict=True)
        ]

    def _share(self) -> tuple[Floats | None, int, FinetuneError | None]:
        """Scores of this rank's answers, how many could not be parsed, and the error of a reward function, if any."""
        try:
            scores = self._pending.result()
        except FinetuneError as error:
            return None, 0, error
        is_unparsed = (self._pending.has_result() == 0).any(axis=1) | np.isnan(scores).all(axis=1)
        return scores, int(is_unparsed.sum()), None


@dataclass(frozen=True)
class Sampler:
    """Samples answers, and scores them with the run's rewards."""

    run: PreparedRun
    start: StartSampling
    rewards: Rewards
    progress: RankProgress
    texts: AnswerTexts

    def sample(
        self,
        rows: PreparedRows,
        prompts: Sequence[tuple[int, int]],
        size: int,
        *,
        greedy: bool = False,
        is_over: Callable[[], bool] = lambda: False,
    ) -> SampledGroups:
        """Sample `size` answers to each prompt; collective. Prompts are pairs of `AnswerGroup.draw` and `.number`."""
        began, mesh = time.perf_counter(), self.run.plan.mesh
        sampled = SampledGroups(self, rows, prompts, size)
        # Ranks with the same rows sample the same answers, and only one of them scores them.
        is_first = mesh.coordinate("tp") == mesh.coordinate("pp") == 0
        request = SamplingRequest(
            [PromptToSample(number, rows.prompt_ids(number), key=draw) for draw, number in prompts],
            group_size=size,
            limits=self.texts.limits,
            seed=None if greedy else self.run.plan.train.seed,
            batch_rows=None if (rows_at_once := self.run.config.rollout.batch_rows) == "auto" else rows_at_once,
            is_over=is_over,
            # Each forward pass restarts the watchdog's limit, so that a long rollout does not count as a hang.
            on_forward=self.progress.restart_limit,
            on_answer=sampled.score if is_first else lambda *_: None,
        )
        sampled.wait = self.start(request)
        sampled.noted["sample"] = time.perf_counter() - began
        return sampled

    @property
    def objective(self) -> GrpoObjective:
        """The section `objective` of the run file."""
        section = self.run.config.objective
        assert isinstance(section, GrpoObjective)
        return section


def allowed_ids(vocabulary: Mapping[str, int], num_ids: int) -> torch.Tensor | None:
    """Mask of the model's ids that the tokenizer has, bool [ids]; None if the tokenizer has all of them."""
    allowed = torch.zeros(num_ids, dtype=torch.bool)
    allowed[[number for number in vocabulary.values() if number < num_ids]] = True
    return None if bool(allowed.all()) else allowed
