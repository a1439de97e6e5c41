"""Observers of rollouts: metrics, samples, a line on why the reward changes, and held-out prompts scored by rewards."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ds_finetune.console.phase_line import Say
from ds_finetune.data.batches import num_eval_rows
from ds_finetune.engine.results import HeldOutScores
from ds_finetune.objectives.grpo import pass_shares
from ds_finetune.objectives.rewards.answers import column_of
from ds_finetune.observers.record import Remembering, StepRecord
from ds_finetune.observers.writers import MOST_SAMPLES, LineFile
from ds_finetune.runs.metrics import ROLLOUTS, Sample
from ds_finetune.trainer.rollouts.causes import NAMES, Metrics, cause_line, mean_metrics
from ds_finetune.trainer.rollouts.rollout import AnswerGroup, Rollout, mean_score
from ds_finetune.trainer.rollouts.sampling import Sampler
from ds_finetune.trainer.rollouts.source import LOST, RolloutSource

EVERY = 10
"""Number of rollouts after which a line says why the reward rises or falls (causes.py)."""
_SAMPLED_GROUPS, _SAMPLED_ANSWERS = 2, 4
"""For each rollout, the number of groups written to rollouts.jsonl; for each group, the number of answers."""
LOSS_NOTE = (
    "the loss is close to 0 from the beginning and may rise, because advantages add up to 0: watch "
    "rollout/reward, and eval/reward of held-out prompts"
)


class RolloutMetrics(Remembering):
    """Adds `rollout/*` metrics to the record of the first step of each rollout, and prints cause lines (causes.py)."""

    saved: ClassVar = ("start", "recent", "since")

    def __init__(self, source: RolloutSource, say: Say) -> None:
        self._source, self._say = source, say
        self.start: Metrics | None = None
        """Mean metrics of the run's first rollouts, with which those of later rollouts are compared."""
        self.recent: list[Metrics] = []
        self.since = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the latest rollout's metrics to `record` if it begins with this step. Print a cause line if due."""
        rollout = self._source.latest
        if rollout is not None and rollout.first == record.step - 1:
            values = rollout_metrics(rollout, self._source.sampler)
            record = record.with_values({f"rollout/{name}": value for name, value in values.items()})
            metrics = {name.removeprefix("train/"): value for name, value in record.values.items()} | values
            self.recent.append({name: metrics[name] for name in NAMES if name in metrics})
        if self.recent and (len(self.recent) >= EVERY or record.is_last or record.stop):
            now = mean_metrics(self.recent)
            self.start = self.start or now
            self._say(cause_line(f"steps {self.since + 1:,} to {record.step:,}", now, self.start))
            self.recent, self.since = [], record.step
        return record


def rollout_metrics(rollout: Rollout, sampler: Sampler) -> dict[str, float]:
    """Metrics of a rollout, by their names after `rollout/`. Fractions refer to groups or to answers."""
    groups = rollout.groups
    answers = [answer for group in groups for answer in group.answers]
    rewards, parts = np.concatenate([group.rewards for group in groups]), np.concatenate([g.parts for g in groups])
    lengths = np.array([len(answer.ids) for answer in answers])
    values = {
        "reward": mean_score(rewards),
        "reward_std": float(np.mean([np.nanstd(g.rewards) if not np.isnan(g.rewards).all() else 0.0 for g in groups])),
    }
    for column, name in enumerate(sampler.rewards.names):
        values[f"part/{name}"] = mean_score(parts[:, column])
        values[f"scored/{name}"] = float((~np.isnan(parts[:, column])).mean())
    values |= {
        "groups": float(len(groups)),
        "all_right": float(np.mean([group.is_all_right for group in groups])),
        "all_wrong": float(np.mean([group.is_all_wrong for group in groups])),
        "no_spread": float(np.mean([not group.has_spread for group in groups])),
        "answer_tokens": float(lengths.mean()),
        "answer_tokens_min": float(lengths.min()),
        "answer_tokens_max": float(lengths.max()),
        "cut": float(np.mean([answer.finish == "length" for answer in answers])),
        "unparsed": rollout.noted.get("unparsed", 0.0) / len(answers),
        "prompts_drawn": float(rollout.until),
    }
    if sampler.run.config.rollout.ahead:
        values["behind"] = float(rollout.first - rollout.sampled_at)
    notes = rollout.noted
    values |= {f"{part}_seconds": notes.get(part, 0.0) for part in ("sample", "reward", "log_probs")}
    values["tokens_per_second"] = float(lengths.sum()) / max(notes.get("sample", 0.0), 1e-9)
    return values


class RolloutSamples(LineFile):
    """Writes `rollouts.jsonl`: some groups of each rollout, one per line, with answers, rewards and advantages."""

    def __init__(self, folder: Path, source: RolloutSource, say: Say) -> None:
        super().__init__(folder / ROLLOUTS, say)
        self._source = source

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write samples of the latest rollout if it begins with this step."""
        rollout = self._source.latest
        if rollout is not None and rollout.first == record.step - 1:
            # Groups whose answers have different rewards come first, because only they contribute to the gradient.
            first = sorted(rollout.groups, key=lambda group: not group.has_spread)[:_SAMPLED_GROUPS]
            for group in first:
                self.put(json.dumps({"step": record.step, **self._sample(group)}, ensure_ascii=False) + "\n")
        return record

    def _sample(self, group: AnswerGroup) -> dict[str, Any]:
        sampler, rows = self._source.sampler, self._source.rows
        order = np.argsort(-np.nan_to_num(group.rewards), kind="stable")
        # Of a group, the answers with the highest and the lowest rewards are written.
        extremes = [*order[: _SAMPLED_ANSWERS // 2], *order[_SAMPLED_ANSWERS // 2 :][-(_SAMPLED_ANSWERS // 2) :]]
        return {
            "row": rows.where(group.number),
            "prompt": sampler.texts.prompt_text(rows, group.number),
            "answers": [
                {
                    "text": sampler.texts.text(group.answers[at]),
                    "reward": _number(group.rewards[at]),
                    "parts": {
                        name: _number(part) for name, part in zip(sampler.rewards.names, group.parts[at], strict=True)
                    },
                    "advantage": round(float(group.advantages[at]), 6),
                    "finish": group.answers[at].finish,
                    "tokens": len(group.answers[at].ids),
                }
                for at in extremes
            ],
        }


def _number(value: float) -> float | None:
    return None if np.isnan(value) else round(float(value), 6)


ALL_SETS = "eval"
"""Prefix of the names of metrics over all held-out sets together."""
Collect = Callable[[Sequence[Sample]], None]
"""Function that receives the first answers to the prompts of an evaluation."""


@dataclass(frozen=True)
class RewardEvaluation:
    """Evaluates the current weights by their answers to the run's held-out prompts."""

    source: RolloutSource
    is_stop_requested: Callable[[], bool]
    """Function that stops the evaluation when it returns True, on every rank. It is called before each batch."""
    collect: Collect | None = None
    """Function that receives the first greedy answers of each set."""

    def scores(self) -> Mapping[str, HeldOutScores] | None:
        """Scores of each held-out set and of all sets together; None after a signal, lost server or failing reward."""
        samples = self.source.run.config.rollout.eval_samples
        try:
            greedy = self._groups(0)
            sampled = self._groups(samples) if samples and greedy is not None else {}
        except LOST as lost:
            self.source.lost = lost
            return None
        if greedy is None or sampled is None:
            return None
        if self.collect is not None:
            self.collect([sample for name in greedy for sample in self._samples(name, greedy[name])])
        sets = {name: (greedy[name], sampled.get(name, [])) for name in greedy}
        if ALL_SETS not in sets:
            greedy_of_all, sampled_of_all = (
                list(chain.from_iterable(side)) for side in zip(*sets.values(), strict=True)
            )
            sets = {ALL_SETS: (greedy_of_all, sampled_of_all), **sets}
        return {name: held_out_scores(*of_set) for name, of_set in sets.items()}

    def _groups(self, size: int) -> dict[str, list[AnswerGroup]] | None:
        """Groups of answers to the prompts of each held-out set: `size` sampled answers, or the greedy answer if size
        is 0. None if a signal ended the evaluation.
        """
        run, groups_of = self.source.run, dict[str, list[AnswerGroup]]()
        for name, rows in run.inputs.held_out.items():
            # Training numbers its sampled prompts from 0 on. Evaluations use negative numbers, so that their answers
            # are sampled with other random numbers.
            prompts = [(-1 - number, number) for number in range(num_eval_rows(rows, run.config.eval.limit))]
            sampled = self.source.sampler.sample(
                rows, prompts, size or 1, greedy=not size, is_over=self.is_stop_requested
            )
            groups = sampled.groups()
            if groups is None:
                return None
            groups_of[name] = groups
        return groups_of

    def _samples(self, name: str, groups: Sequence[AnswerGroup]) -> Iterable[Sample]:
        texts, rows = self.source.sampler.texts, self.source.run.inputs.held_out[name]
        columns = [section.read_column for section in self.source.run.config.rewards if section.read_column]
        for group in groups[:MOST_SAMPLES]:
            value = column_of(rows.record(group.number), columns[0]) if columns else None
            expected = "" if value is None else str(value)
            prompt, answer = texts.prompt_text(rows, group.number), texts.text(group.answers[0])
            yield Sample(0, name, prompt, answer, expected, f"reward {group.rewards[0]:.4g}")


def held_out_scores(greedy: Sequence[AnswerGroup], sampled: Sequence[AnswerGroup]) -> HeldOutScores:
    """Metrics of the greedy answers, and of the sampled answers to the same prompts."""
    rewards = np.array([group.rewards[0] for group in greedy])
    metrics = {
        "reward": mean_score(rewards),
        "pass_at_1": float(np.mean([group.is_all_right for group in greedy])),
        "cut": float(np.mean([group.answers[0].finish == "length" for group in greedy])),
    }
    if sampled:
        size = len(sampled[0].answers)
        right = [int((group.verdicts >= 1).sum()) for group in sampled]
        metrics["sampled_reward"] = mean_score(np.array([group.rewards for group in sampled]))
        metrics |= {name: float(fractions.mean()) for name, fractions in pass_shares(right, samples=size).items()}
    return HeldOutScores(metrics, {}, is_per_token=False, sums={}, scores=np.zeros((0, 2)))
