"""Samples answers to prompts of the data and scores them: every rank knows all answers and all scores."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import numpy as np
import torch

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.config.objectives import GrpoObjective
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.sampling.answers import PromptToSample, SampledAnswer, SamplingLimits
from ds_finetune.errors import FinetuneError
from ds_finetune.objectives.rewards.answers import AnswerToScore
from ds_finetune.objectives.rewards.pool import Rewards
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.rollouts.rollout import AnswerGroup, Floats, RewardRule

PHASE = "rollout"
"""What the watchdog and the status call it."""
_TAIL = 16
"""Tokens that are decoded beyond those of the longest stop text: a token may be part of a character."""


class AnswerEngine(Protocol):
    """What samples answers: the engine of the run itself, or a server that has its weights."""

    def sample(  # noqa: PLR0913
        self,
        prompts: Sequence[PromptToSample],
        *,
        group_size: int,
        limits: SamplingLimits,
        seed: int,
        greedy: bool,
        batch_rows: int | None,
        is_over: Callable[[], bool],
        on_forward: Callable[[], object],
    ) -> list[list[SampledAnswer]] | None:
        """As `Engine.sample` describes it."""
        ...


@dataclass(frozen=True)
class Sampler:
    """Samples with an engine, and scores with its rewards; its methods are collective."""

    run: PreparedRun
    engine: AnswerEngine
    rewards: Rewards
    progress: RankProgress
    noted: Counter[str]
    """Seconds of `sample` and `reward`, and the number of answers that were `unparsed`: no reward applies to them, or
    one found no result that it could read. Added up until they are cleared.
    """

    def groups(self, rows: PreparedRows, prompts: Sequence[tuple[int, int]], rule: RewardRule) -> list[AnswerGroup]:
        """Groups of answers to prompts, which are given as their draws and their numbers in `rows`."""
        size = self.objective.group_size
        with self.progress.during(PHASE):
            answers = self.answers(rows, prompts, size)
            assert answers is not None
            parts = self.scores(rows, [number for _, number in prompts], answers)
        return [
            AnswerGroup.scored(prompt, of_prompt, of_group, rule)
            for prompt, of_prompt, of_group in zip(prompts, answers, parts.reshape(len(prompts), size, -1), strict=True)
        ]

    def answers(
        self,
        rows: PreparedRows,
        prompts: Sequence[tuple[int, int]],
        size: int,
        *,
        greedy: bool = False,
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[list[SampledAnswer]] | None:
        """`size` answers to each prompt; None where `is_over` was true before they were finished."""
        began = time.perf_counter()
        wanted = [PromptToSample(number, rows.prompt_ids(number), key=draw) for draw, number in prompts]
        answers = self.engine.sample(
            wanted,
            group_size=size,
            limits=self.limits,
            seed=self.run.plan.seed,
            greedy=greedy,
            batch_rows=None if (rows_at_once := self.run.config.rollout.batch_rows) == "auto" else rows_at_once,
            is_over=is_over,
            # So that the watchdog sees that a long rollout is no hang.
            on_forward=self.progress.restart_limit,
        )
        self._add("sample", began)
        return answers

    def scores(self, rows: PreparedRows, numbers: Sequence[int], answers: Sequence[Sequence[SampledAnswer]]) -> Floats:
        """Scores of all answers by each reward, fp64 [answers, rewards]; each data parallel rank scores its share.

        RewardError on every rank where a reward is at fault on one.
        """
        began = time.perf_counter()
        pairs = [(number, place) for number, of_prompt in enumerate(answers) for place in range(len(of_prompt))]
        mesh = self.run.plan.mesh
        is_first = mesh.place("tp") == mesh.place("sp") == mesh.place("pp") == 0
        places = range(mesh.place("dp"), len(pairs), self.run.plan.dp) if is_first else range(0)
        given = [self._to_score(rows, numbers[pairs[at][0]], answers[pairs[at][0]], pairs[at][1]) for at in places]
        scores = np.zeros((len(pairs), len(self.rewards.names)))
        for at, found, unparsed, error in all_gather_object((places, *self._score_share(given))):
            if error is not None:
                raise error
            scores[at] = found
            self.noted["unparsed"] += unparsed
        self._add("reward", began)
        return scores

    def _score_share(self, given: Sequence[AnswerToScore]) -> tuple[Floats | None, int, FinetuneError | None]:
        """Scores of this rank's share, how many answers of it are unparsed, and the error of a reward."""
        pending = self.rewards.start(given)
        try:
            scores = pending.result()
        except FinetuneError as error:
            return None, 0, error
        is_unparsed = (pending.has_result() == 0).any(axis=1) | np.isnan(scores).all(axis=1)
        return scores, int(is_unparsed.sum()), None

    def text(self, answer: SampledAnswer) -> str:
        """The text of an answer, without the token that ended it; other special tokens remain."""
        ids = answer.ids.tolist()
        ends = ids and ids[-1] in self.run.inputs.stop_ids
        return str(self.run.inputs.tokenizer.decode(ids[:-1] if ends else ids))

    def prompt_text(self, rows: PreparedRows, number: int) -> str:
        """The text of a prompt as the model sees it."""
        return str(self.run.inputs.tokenizer.decode(rows.prompt_ids(number)))

    @property
    def objective(self) -> GrpoObjective:
        """The section of the run file."""
        section = self.run.config.objective
        assert isinstance(section, GrpoObjective)
        return section

    @cached_property
    def limits(self) -> SamplingLimits:
        """Where an answer ends, and which ids are never drawn: those that the tokenizer does not have."""
        inputs, rollout = self.run.inputs, self.run.config.rollout
        num_ids = int(inputs.hf_config.vocab_size)
        return SamplingLimits(
            max_new_tokens=rollout.max_new_tokens,
            stop_ids=tuple(inputs.stop_ids),
            num_ids=num_ids,
            allowed=allowed_ids(inputs.tokenizer.get_vocab(), num_ids),
            stops=partial(self._has_stop, tuple(rollout.stop)) if rollout.stop else None,
        )

    def _has_stop(self, texts: Sequence[str], ids: list[int]) -> bool:
        """Whether the end of the tokens so far has one of `texts`."""
        tail = self.run.inputs.tokenizer.decode(ids[-(max(map(len, texts)) + _TAIL) :])
        return any(text in tail for text in texts)

    def _to_score(self, rows: PreparedRows, number: int, answers: Sequence[SampledAnswer], place: int) -> AnswerToScore:
        answer = answers[place]
        return AnswerToScore(
            record=rows.record(number),
            prompt=self.prompt_text(rows, number),
            text=self.text(answer),
            ids=answer.ids.tolist(),
            finish=answer.finish,
            where=f"{rows.where(number)}, answer {place + 1}",
        )

    def _add(self, part: str, began: float) -> None:
        self.noted[part] += time.perf_counter() - began  # type: ignore[assignment]


def allowed_ids(vocabulary: Mapping[str, int], num_ids: int) -> torch.Tensor | None:
    """Which of the model's ids the tokenizer has, bool [ids]; None where it has all of them."""
    allowed = torch.zeros(num_ids, dtype=torch.bool)
    allowed[[number for number in vocabulary.values() if number < num_ids]] = True
    return None if bool(allowed.all()) else allowed
