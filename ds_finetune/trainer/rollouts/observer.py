"""Observers of rollouts, which write metrics, samples, and every few rollouts the cause line."""

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ds_finetune.console.phase_line import Say
from ds_finetune.observers.record import Remembering, StepRecord
from ds_finetune.observers.writers import LineFile
from ds_finetune.runs.metrics import ROLLOUTS
from ds_finetune.trainer.rollouts.causes import NAMES, Metrics, cause_line, mean_metrics
from ds_finetune.trainer.rollouts.rollout import AnswerGroup, Rollout, mean_score
from ds_finetune.trainer.rollouts.sampling import Sampler
from ds_finetune.trainer.rollouts.source import RolloutSource

EVERY = 10
"""Number of rollouts between two cause lines."""
_SAMPLED_GROUPS, _SAMPLED_ANSWERS = 2, 4
"""Number of groups that are written per rollout, and of answers per group."""
LOSS_NOTE = (
    "the loss is close to 0 from the beginning and may rise, because advantages add up to 0: watch "
    "rollout/reward, and eval/reward of held-out prompts"
)


class RolloutMetrics(Remembering):
    """Adds `rollout/*` metrics to the record of the first step of each rollout, and prints the cause line."""

    saved: ClassVar = ("start", "recent", "since")

    def __init__(self, source: RolloutSource, say: Say) -> None:
        self._source, self._say = source, say
        self.start: Metrics | None = None
        """Metrics of the rollouts of the run's first cause line."""
        self.recent: list[Metrics] = []
        self.since = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the metrics of a rollout that begins with this step. At the last step the cause line is printed."""
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
    """Metrics of a rollout, by the last part of their names. Fractions refer to groups or to answers."""
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
        """Write samples of a rollout that begins with this step."""
        rollout = self._source.latest
        if rollout is not None and rollout.first == record.step - 1:
            # Groups with different rewards are first, because only they contribute to the gradient.
            first = sorted(rollout.groups, key=lambda group: not group.has_spread)[:_SAMPLED_GROUPS]
            for group in first:
                self.put(json.dumps({"step": record.step, **self._sample(group)}, ensure_ascii=False) + "\n")
        return record

    def _sample(self, group: AnswerGroup) -> dict[str, Any]:
        sampler, rows = self._source.sampler, self._source.rows
        order = np.argsort(-np.nan_to_num(group.rewards), kind="stable")
        # The answers with the highest and the lowest rewards are written.
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
