"""The batches of a run with rollouts.

Prompts are sampled in the order of the run, before the steps that train on their answers. A run can resume in the
middle of a rollout.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.data.answer_batches import ScoredAnswer, answer_batch
from ds_finetune.data.batches import Batch, Position, row_id, rows_per_epoch
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.engine import Engine
from ds_finetune.errors import FinetuneError, RewardError
from ds_finetune.objectives.rewards.pool import open_rewards
from ds_finetune.trainer.batches import batch_plan, total_rows
from ds_finetune.trainer.loop import Progress
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.rollouts.rollout import AnswerGroup, Rollout, RolloutFiles, TokenNumbers
from ds_finetune.trainer.rollouts.sampling import PHASE, AnswerTexts, SampledGroups, Sampler
from ds_finetune.trainer.rollouts.vllm import ServerLostError, sampling_started

LOST = (ServerLostError, RewardError)
"""Errors after which the completed steps are saved before the run ends."""
MOST_DRAWS = 4
"""Limit of `no_spread: resample`: a rollout of n prompts samples answers to at most `MOST_DRAWS` * n prompts."""


class RolloutSource:
    """Makes the rollouts of a run and their batches, in the main thread of every rank, as sampling is collective."""

    def __init__(self, run: PreparedRun, engine: Engine, sampler: Sampler, files: RolloutFiles | None) -> None:
        assert isinstance(run.inputs.train, PreparedRows)
        self.run, self.rows, self.sampler = run, run.inputs.train, sampler
        self.latest: Rollout | None = None
        """The rollout to which the latest batch belongs."""
        self.lost: FinetuneError | None = None
        """The error (one of `LOST`) after which no more scored answers can be made; None before."""
        self._steps_left = 0
        """Number of steps of the current rollout that are still to come."""
        self._ahead: Rollout | Callable[[], Rollout] | None = None
        """The next rollout, if it has been sampled ahead, or a function that waits for its rewards."""
        self._resumed: dict[str, Any] = {}
        self._engine, self._files = engine, files
        self._plan = replace(batch_plan(run), shares_prompts=engine.shares_prompts)
        self._objective = sampler.objective
        self._steps = run.config.rollout.steps_per_rollout
        self._per_epoch = rows_per_epoch(self.rows, self._plan)

    def state(self) -> dict[str, Any]:
        """The state to save: step and hash of the rollout file; empty without an unfinished rollout. Collective."""
        if self.latest is None:
            # Before the first batch, the state to save is that of the checkpoint from which the run resumed.
            return self._resumed
        try:
            ahead = self._ahead() if callable(self._ahead) else self._ahead
        except LOST as lost:
            # A lost rollout is sampled again after resuming, with the weights of that time.
            self.lost, ahead = lost, None
        self._ahead, current = ahead, self.latest if self._steps_left else None
        if self._files is None or (current is None and ahead is None):
            return {}
        step = self.latest.first + self.latest.steps - self._steps_left
        return {"step": step, "digest": self._files.write(step, (current, ahead))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep `state`, which was saved in the checkpoint from which the run resumes."""
        self._resumed = dict(state)

    def batches(self, after: Progress, position: Position) -> Iterator[Batch]:
        """Yield this rank's batches of the remaining steps. `position` is the position of the next prompt in the data.
        Batches end early if the sampling server is lost, or if a reward fails.
        """
        try:
            for batch in self._batches(after, position):
                yield batch
                if self.lost is not None:
                    return
        except LOST as lost:
            self.lost = lost

    def _batches(self, after: Progress, position: Position) -> Iterator[Batch]:
        cursor = position.epoch * self._per_epoch + position.index
        if self._files is not None and self._resumed:
            self.latest, self._ahead = self._files.read(**self._resumed)
        for step in range(after.step, self.run.schedule.steps):
            if self.latest is None or step >= self.latest.first + self.latest.steps:
                rollout = self._complete(self._ahead or self._begin(step, cursor, done=step))
                # If `_begin` fails, the checkpoint then saved must include `rollout`, on which no step has trained.
                self._ahead, following = rollout, step + rollout.steps
                has_next = self.run.config.rollout.ahead and following < self.run.schedule.steps
                self._ahead = self._begin(following, rollout.until, done=step) if has_next else None
                self.latest = rollout
            cursor = self.latest.until
            self._steps_left = self.latest.first + self.latest.steps - step - 1
            batch = self._batch(self.latest, step - self.latest.first)
            yield replace(batch, position=Position(*divmod(cursor, self._per_epoch)))

    def _begin(self, first: int, cursor: int, *, done: int) -> Callable[[], Rollout]:
        """Start to sample answers for the steps from `first` on, and return a function that waits for their rewards.
        `cursor` is the position of the first prompt in the run's order, and `done` the number of completed steps.
        """
        steps = min(self._steps, self.run.schedule.steps - first)
        per_step = self.run.config.rollout.prompts_per_step
        # The last step of a run whose length is given in epochs may have fewer prompts.
        number = min((first + steps) * per_step, total_rows(self.run, self.rows)) - first * per_step
        draws = range(cursor, cursor + number)
        empty = Rollout(first, (), (), draws.stop, steps, done)
        return partial(self._scored, empty, draws, self._sample(draws))

    def _sample(self, draws: range) -> SampledGroups:
        with self.sampler.progress.during(PHASE):
            prompts = [(draw, row_id(draw, self._per_epoch, self._plan)) for draw in draws]
            return self.sampler.sample(self.rows, prompts, self._objective.group_size)

    def _complete(self, begun: Rollout | Callable[[], Rollout]) -> Rollout:
        rollout = begun() if callable(begun) else begun
        began = time.perf_counter()
        with self.sampler.progress.during(PHASE):
            old: TokenNumbers = {}
            reference: TokenNumbers = {}
            if rollout.steps > 1:
                # The rollout's first step uses log-probabilities of its own forward; later steps need stored ones.
                later = [self._batch(rollout, step) for step in range(1, rollout.steps)]
                old = self._engine.token_log_probs(later)
            if self._objective.has_reference(has_adapters=self.run.config.lora is not None):
                batches = [self._batch(rollout, step) for step in range(rollout.steps)]
                reference = self._engine.token_log_probs(batches, of_reference=True)
            rollout = replace(rollout, old=old, reference=reference)
        return replace(rollout, noted={**rollout.noted, "log_probs": time.perf_counter() - began})

    def _scored(self, empty: Rollout, draws: range, sampled: SampledGroups) -> Rollout:
        """Add scored groups to `empty`. With `no_spread: resample`, further prompts replace groups of equal rewards."""
        mode, groups, notes = self._objective.no_spread, list[AnswerGroup](), Counter[str]()
        prompts = len(draws)
        end = draws.start + MOST_DRAWS * prompts
        while True:
            with self.sampler.progress.during(PHASE):
                groups += sampled.groups() or ()
            notes.update(sampled.noted)
            missing = prompts - sum(group.has_spread for group in groups) if mode == "resample" else 0
            draws = range(draws.stop, min(draws.stop + missing, end))
            if not draws:
                break
            sampled = self._sample(draws)
        if not empty.first and all(np.isnan(group.rewards).all() for group in groups):
            raise RewardError(
                f"no reward applies to any of the {len(groups) * self._objective.group_size} answers of the first "
                f"rollout: {', '.join(self.sampler.rewards.names)} returned None",
                hint="return a number; None is only for answers to which a reward does not apply",
            )
        trained = tuple(index for index, group in enumerate(groups) if mode == "count" or group.has_spread)
        return replace(empty, groups=tuple(groups), trained=trained, until=draws.start, noted=notes)

    def _batch(self, rollout: Rollout, step: int) -> Batch:
        answers = []
        for index in rollout.groups_of_step(step):
            group = rollout.groups[index]
            for at, answer in enumerate(group.answers):
                if self._objective.truncated == "mask" and answer.finish == "length":
                    continue
                number = index * len(group.answers) + at
                scored = ScoredAnswer(
                    prompt_ids=self.rows.prompt_ids(group.number),
                    ids=answer.ids,
                    advantage=float(group.advantages[at]),
                    sampled=answer.log_probs,
                    old=rollout.old.get(number),
                    reference=rollout.reference.get(number),
                    # In later steps of the rollout the changed weights choose other experts than at sampling.
                    experts=answer.experts if index in rollout.groups_of_step(0) else None,
                    number=number,
                )
                answers.append(scored)
        return answer_batch(answers, self._plan)


@contextmanager
def open_rollouts(run: PreparedRun, engine: Engine, progress: RankProgress) -> Iterator[RolloutSource | None]:
    """Context with the batches of a run with rollouts, and reward processes; None if no answers are sampled."""
    if run.model.objective.head != "answers":
        yield None
        return
    steps, policy = run.config.rollout.steps_per_rollout, run.config.checkpoint
    files = None
    if (steps > 1 or run.config.rollout.ahead) and policy.saves:
        files = RolloutFiles(run.output_dir, is_rank_zero=engine.is_rank_zero)
    world, sections = run.plan.world, run.config.rewards
    prints = any(section.file for section in sections)
    log = run.output_dir / "rewards" / f"rank-{world.rank}.txt" if prints else None
    with (
        open_rewards(sections, ranks_here=world.local_world_size, log=log) as rewards,
        sampling_started(run, engine, progress) as start,
    ):
        rollout, vocabulary = run.config.rollout, int(run.model.hf_config.vocab_size)
        texts = AnswerTexts(run.inputs.tokenizer, tuple(run.inputs.stop_ids), vocabulary, rollout)
        sampler = Sampler(run, start, rewards, progress, texts)
        engine.allow_only(sampler.texts.limits.allowed)
        yield RolloutSource(run, engine, sampler, files)
