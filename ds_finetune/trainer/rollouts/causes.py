"""The cause line of rollouts: some metrics, and one hint from a table on why the reward rises or falls."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

MANY = 0.8
"""If a metric such as `all_wrong` is above this fraction of groups, the user gets the hint for that metric."""


Metrics = Mapping[str, float]
"""Metrics of rollouts, by the last part of their names, such as `reward` of `rollout/reward`. `entropy` and the names
after it are metrics of optimizer steps: means over answer tokens, absent in steps without answers.
"""
NAMES = (
    *("reward", "all_right", "all_wrong", "no_spread", "cut", "unparsed", "answer_tokens"),
    *("entropy", "mismatch", "clipped_low", "clipped_high"),
)


def mean_metrics(rollouts: Sequence[Metrics]) -> dict[str, float]:
    """The mean of each metric over the rollouts that have it; NaN if none has it. The entry `empty` is the fraction of
    rollouts whose first step has no answers to train on.
    """
    values_of = {name: [metrics[name] for metrics in rollouts if name in metrics] for name in NAMES}
    means = {name: fmean(values) if values else math.nan for name, values in values_of.items()}
    return means | {"empty": 1 - len(values_of["entropy"]) / len(rollouts)}


@dataclass(frozen=True)
class Cause:
    """A possible cause of bad training with sampled answers: a condition on the metrics now and at the run's start, and
    a hint what to change.
    """

    applies: Callable[[Metrics, Metrics], bool]
    hint: str


CAUSES = (
    Cause(
        lambda now, _: now["unparsed"] > 0.3,
        "many answers have no result that a reward can read: see rollouts.jsonl, and `ds-finetune rewards RUN.yaml`",
    ),
    Cause(
        lambda now, _: now["cut"] > 0.3,
        "many answers are cut: raise rollout.max_new_tokens, or add the reward `length`",
    ),
    Cause(
        lambda now, _: now["all_wrong"] > MANY,
        "nearly all groups are all wrong: the task is too hard for the model, or no answer can get a reward: read "
        "rollouts.jsonl, use easier prompts or a larger objective.group_size, or fine-tune on a few answers first",
    ),
    Cause(
        lambda now, _: now["all_right"] > MANY, "nearly all groups are all right: use harder prompts, or end the run"
    ),
    Cause(
        lambda now, _: now["empty"] > 0.3,
        "many steps have no answer left to train: set objective.no_spread to resample or count, or raise "
        "rollout.max_new_tokens where answers that are cut are masked",
    ),
    Cause(
        lambda now, _: now["no_spread"] > MANY,
        "the answers of nearly all groups have equal rewards, from which nothing is learned: use a reward that scores "
        "them differently",
    ),
    Cause(
        lambda now, start: now["entropy"] < 0.1 * start["entropy"],
        "the entropy has fallen to less than a tenth: raise objective.clip_high or objective.kl_weight, or lower "
        "optim.lr",
    ),
    Cause(
        lambda now, _: now["mismatch"] > 0.05,
        "sampling and training disagree: set objective.mismatch: token, or train.precision: fp32",
    ),
    Cause(
        lambda now, _: now["clipped_low"] + now["clipped_high"] > 0.2,
        "many tokens are clipped: lower optim.lr or rollout.steps_per_rollout",
    ),
    Cause(
        lambda now, start: now["reward"] < start["reward"] - 0.05,
        "the reward is lower than at the start: lower optim.lr, or raise optim.warmup",
    ),
    Cause(
        lambda now, start: now["reward"] > start["reward"] and now["answer_tokens"] < 0.5 * start["answer_tokens"],
        "answers are less than half as long as at the start: read rollouts.jsonl, the reward may favour wrong ones",
    ),
)
"""The table of causes in order of priority. The first row that applies gives the hint."""


def cause_line(steps: str, now: Metrics, start: Metrics) -> str:
    """One line for the user about the rollouts of some steps: metrics, and a hint on the reward."""
    between, clipped = max(1 - now["all_right"] - now["all_wrong"], 0.0), now["clipped_low"] + now["clipped_high"]
    hint = next((cause.hint for cause in CAUSES if cause.applies(now, start)), "")
    line = (
        "ROLLOUTS of {steps}: reward {reward:.3f} ({before[reward]:.3f} at the start); groups {all_right:.0%} all "
        "right, {all_wrong:.0%} all wrong, {between:.0%} between, {no_spread:.0%} with equal rewards; answers "
        "{answer_tokens:.0f} tokens, {cut:.0%} cut, {unparsed:.0%} unparsed; entropy {entropy:.3g} "
        "({before[entropy]:.3g}), mismatch {mismatch:.2g}, {clipped:.0%} clipped"
    ).format(steps=steps, before=start, between=between, clipped=clipped, **now)
    empty = f"; {now['empty']:.0%} of the steps without an answer to train" if now["empty"] else ""
    return line + empty + (f". {hint}" if hint else "")
