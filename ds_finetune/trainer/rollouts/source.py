"""Where the batches of a run with rollouts come from: prompts in the order of the run, answers to them that are sampled
before the steps that train them, and the place from which all of this resumes.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ds_finetune.cluster.watchdog.progress import RankProgress
from ds_finetune.data.answer_batches import ScoredAnswer, answer_batch
from ds_finetune.data.batches import Batch, Position, row_id, rows_per_epoch
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.engine import Engine
from ds_finetune.objectives.rewards.pool import open_rewards
from ds_finetune.trainer.batches import batch_plan, total_rows
from ds_finetune.trainer.loop import Progress
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.rollouts.rollout import AnswerGroup, RewardRule, Rollout, RolloutFiles, TokenNumbers
from ds_finetune.trainer.rollouts.sampling import PHASE, Sampler

MOST_DRAWS = 4
"""With `no_spread: resample` a rollout draws at most so many times its number of prompts."""


class RolloutSource:
    """Makes the rollouts of a run and their batches, in the main thread of every rank, since sampling is collective."""

    def __init__(self, run: PreparedRun, engine: Engine, sampler: Sampler, files: RolloutFiles | None) -> None:
        assert isinstance(run.inputs.train, PreparedRows)
        self.run, self.rows, self.sampler = run, run.inputs.train, sampler
        self.latest: Rollout | None = None
        """The rollout of the latest batch."""
        self._digest, self._first, self._left = "", 0, 0
        """Hash of the file of the latest rollout, its first step, and how many of its steps follow."""
        self._engine, self._files = engine, files
        self._plan = batch_plan(run)
        self._objective = sampler.objective
        self._steps = run.config.rollout.steps_per_rollout
        self._per_epoch = rows_per_epoch(self.rows, self._plan)
        self.rule = RewardRule(sampler.rewards.weights, self._objective.reward_scale, self._objective.advantage)

    def state(self) -> dict[str, Any]:
        """The file that a run needs to resume in the middle of a rollout, which is kept; no file between two."""
        if self._left and self._files is not None:
            self._files.of_save = self._first
        return {"digest": self._digest if self._left else "", "first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over `state`."""
        self._digest, self._first = state["digest"], state["first"]

    def batches(self, after: Progress, position: Position) -> Iterator[Batch]:
        """This rank's share of the steps after those that are done; `position` is that of the next prompt to draw."""
        cursor = position.epoch * self._per_epoch + position.index
        if self._digest and self._files is not None:
            self.latest = self._files.read(self._first, self._digest)
        for step in range(after.step, self.run.schedule.steps):
            if self.latest is None or step >= self.latest.first + self.latest.steps:
                self.latest = self._make(step, cursor)
            cursor, self._first = self.latest.until, self.latest.first
            self._left = self.latest.first + self.latest.steps - step - 1
            batch = self._batch(self.latest, step - self.latest.first)
            yield replace(batch, position=Position(*divmod(cursor, self._per_epoch)))

    def _make(self, first: int, cursor: int) -> Rollout:
        """A new rollout with prompts from draw `cursor` on, written to a file where a run may resume in it."""
        self.sampler.noted.clear()
        steps = min(self._steps, self.run.schedule.steps - first)
        groups, trained, until = self._draw(cursor, self._num_prompts(first, first + steps))
        rollout = Rollout(first, tuple(groups), trained, until, steps)
        began = time.perf_counter()
        with self.sampler.progress.during(PHASE):
            rollout = self._with_log_probs(rollout)
        self._digest = self._files.write(rollout) if self._files is not None and steps > 1 else ""
        return replace(rollout, noted={**self.sampler.noted, "log_probs": time.perf_counter() - began})

    def _num_prompts(self, start: int, end: int) -> int:
        """Prompts of the steps from `start` to `end`; the last step of a run in epochs may have fewer."""
        per_step = self.run.config.rollout.prompts_per_step
        return min(end * per_step, total_rows(self.run, self.rows)) - start * per_step

    def _draw(self, cursor: int, prompts: int) -> tuple[list[AnswerGroup], tuple[int, ...], int]:
        """Groups, the indices of those that are trained, and the draw after them."""
        mode, groups, end = self._objective.no_spread, list[AnswerGroup](), cursor + MOST_DRAWS * prompts
        missing = prompts
        while missing and cursor < end:
            draws = range(cursor, min(cursor + missing, end))
            groups += self.sampler.groups(self.rows, [(draw, self._number(draw)) for draw in draws], self.rule)
            cursor = draws.stop
            missing = prompts - sum(group.has_spread for group in groups) if mode == "resample" else 0
        trained = [place for place, group in enumerate(groups) if mode == "count" or group.has_spread]
        return groups, tuple(trained), cursor

    def _number(self, draw: int) -> int:
        return row_id(draw, self._per_epoch, self._plan)

    def _with_log_probs(self, rollout: Rollout) -> Rollout:
        """The rollout with log-probabilities of the reference, and with those that the steps after the first one
        compare with: the model before the first step. The first step itself compares with its own.
        """
        old: TokenNumbers = {}
        reference: TokenNumbers = {}
        if rollout.steps > 1:
            later = [self._batch(rollout, place) for place in range(1, rollout.steps)]
            old = self._engine.token_log_probs(later)
        if self._objective.has_reference(has_adapters=self.run.config.lora is not None):
            every = [self._batch(rollout, place) for place in range(rollout.steps)]
            reference = self._engine.token_log_probs(every, adapters_off=True)
        return replace(rollout, old=old, reference=reference)

    def _batch(self, rollout: Rollout, place: int) -> Batch:
        """This rank's share of one of the steps of a rollout."""
        masks = self._objective.truncated == "mask"
        answers = [
            self._answer(rollout, index, at)
            for index in rollout.groups_of_step(place)
            for at in range(self._objective.group_size)
            if not (masks and rollout.groups[index].answers[at].finish == "length")
        ]
        return answer_batch(answers, self._plan)

    def _answer(self, rollout: Rollout, index: int, at: int) -> ScoredAnswer:
        group = rollout.groups[index]
        number, answer = index * len(group.answers) + at, group.answers[at]
        return ScoredAnswer(
            prompt_ids=self.rows.prompt_ids(group.number),
            ids=answer.ids,
            advantage=float(group.advantages[at]),
            sampled=answer.log_probs,
            old=rollout.old.get(number),
            reference=rollout.reference.get(number),
            number=number,
        )


@contextmanager
def open_rollouts(run: PreparedRun, engine: Engine, progress: RankProgress) -> Iterator[RolloutSource | None]:
    """The source of a run's batches, with the processes of its rewards; None where its objective samples no answers."""
    if run.model.objective.head != "answers":
        yield None
        return
    steps, policy = run.config.rollout.steps_per_rollout, run.config.checkpoint
    files = None
    if steps > 1 and policy.saves:
        files = RolloutFiles(run.output_dir, steps=steps, is_rank_zero=engine.is_rank_zero)
    world, sections = run.plan.world, run.config.rewards
    prints = any(section.file for section in sections)
    log = run.output_dir / "rewards" / f"rank-{world.rank}.txt" if prints else None
    with open_rewards(sections, ranks_here=world.local_world_size, log=log) as rewards:
        sampler = Sampler(run, engine, rewards, progress, Counter())
        engine.allow_only(sampler.limits.allowed)
        yield RolloutSource(run, engine, sampler, files)
