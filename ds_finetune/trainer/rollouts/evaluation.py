"""Evaluation on held-out prompts: the reward of greedy answers, and pass@k of sampled ones."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ds_finetune.data.batches import num_eval_rows
from ds_finetune.engine.results import HeldOutScores
from ds_finetune.objectives.grpo import pass_shares
from ds_finetune.objectives.rewards.answers import column_of
from ds_finetune.runs.metrics import Sample
from ds_finetune.trainer.rollouts.rollout import AnswerGroup, mean_score
from ds_finetune.trainer.rollouts.source import LOST, RolloutSource

_ALL = "eval"
_MOST_SAMPLES = 8
Collect = Callable[[Sequence[Sample]], None]


@dataclass(frozen=True)
class RewardEvaluation:
    """Evaluates the current weights by their answers to the run's held-out prompts."""

    source: RolloutSource
    is_stop_requested: Callable[[], bool]
    """Function that stops the evaluation when it returns True, on every rank. It is called before each batch."""
    collect: Collect | None = None
    """Function that receives the first greedy answers of each set."""

    def scores(self) -> Mapping[str, HeldOutScores] | None:
        """Scores of each held-out set and of all; None if a signal, lost server or failing reward ended them."""
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
        if _ALL not in sets:
            greedy_of_all, sampled_of_all = (
                list(chain.from_iterable(side)) for side in zip(*sets.values(), strict=True)
            )
            sets = {_ALL: (greedy_of_all, sampled_of_all), **sets}
        return {name: held_out_scores(*of_set) for name, of_set in sets.items()}

    def _groups(self, size: int) -> dict[str, list[AnswerGroup]] | None:
        """Groups of answers to the prompts of each held-out set: `size` sampled answers, or the greedy answer if size
        is 0. None if a signal ended the evaluation.
        """
        run, groups_of = self.source.run, dict[str, list[AnswerGroup]]()
        for name, rows in run.inputs.held_out.items():
            # Training numbers its sampled prompts from 0 on. Negative numbers give the answers of evaluations other
            # random numbers.
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
        for group in groups[:_MOST_SAMPLES]:
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
