"""The cause line: why the reward of a run rises or does not, from a few shares, with one hint from a fixed table."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

MANY = 0.8
"""Share of groups from which a cause is named."""


@dataclass(frozen=True)
class Shares:
    """What a cause line is made of: means over the rollouts since the last line, and those of the run's beginning. NaN
    is what a rollout does not have.
    """

    reward: float
    all_right: float
    """Share of groups of which every answer is right; of `all_wrong` none is."""
    all_wrong: float
    no_spread: float
    """Share of groups whose answers have equal rewards."""
    cut: float
    """Share of answers that end at the limit of tokens."""
    unparsed: float
    """Share of answers without a result that a reward could read, or to which no reward applies."""
    tokens: float
    """Mean length of an answer."""
    entropy: float
    """It and the next two are means over answer tokens; NaN where no answer is left to train."""
    mismatch: float
    clipped: float
    empty: float = 0.0
    """Share of the rollouts whose first step has no answer left to train."""

    @classmethod
    def mean(cls, parts: list[Self]) -> Self:
        """The mean of each share over those that have it."""
        columns = [[getattr(part, each.name) for part in parts] for each in fields(cls)]
        known = [[value for value in column if not math.isnan(value)] for column in columns]
        return cls(*(sum(values) / len(values) if values else math.nan for values in known))


@dataclass(frozen=True)
class Cause:
    """A row of the table: whether it applies to shares and those of the beginning, and the hint."""

    applies: Callable[[Shares, Shares], bool]
    hint: str


CAUSES = (
    Cause(
        lambda now, _: now.unparsed > 0.3,
        "many answers have no result that a reward can read: see rollouts.jsonl, and `ds-finetune rewards RUN.yaml`",
    ),
    Cause(
        lambda now, _: now.cut > 0.3,
        "many answers are cut: raise rollout.max_new_tokens, or add the reward `length`",
    ),
    Cause(
        lambda now, _: now.all_wrong > MANY,
        "nearly all groups are all wrong: the task is too hard for this start, or the reward never fires; read "
        "rollouts.jsonl, take easier prompts, a larger objective.group_size, or fine-tune on a few answers first",
    ),
    Cause(
        lambda now, _: now.all_right > MANY,
        "nearly all groups are all right: take harder prompts, or end the run",
    ),
    Cause(
        lambda now, _: now.empty > 0.3,
        "many steps have no answer left to train: set objective.no_spread to resample or count, or raise "
        "rollout.max_new_tokens where answers that are cut are masked",
    ),
    Cause(
        lambda now, _: now.no_spread > MANY,
        "the answers of nearly all groups have equal rewards, from which nothing is learned: give a reward that tells "
        "them apart",
    ),
    Cause(
        lambda now, start: now.entropy < 0.1 * start.entropy,
        "the entropy has fallen to less than a tenth: raise objective.clip_high or objective.kl_weight, or lower "
        "optim.lr",
    ),
    Cause(
        lambda now, _: now.mismatch > 0.05,
        "sampling and training disagree: set objective.mismatch to token, or train.precision to fp32",
    ),
    Cause(
        lambda now, _: now.clipped > 0.2,
        "many tokens are clipped: lower optim.lr or rollout.steps_per_rollout",
    ),
    Cause(
        lambda now, start: now.reward < start.reward - 0.05,
        "the reward is lower than at the start: lower optim.lr, or raise optim.warmup",
    ),
    Cause(
        lambda now, start: now.reward > start.reward and now.tokens < 0.5 * start.tokens,
        "answers are less than half as long as at the start: read rollouts.jsonl, the reward may be tricked",
    ),
)
"""In the order in which they are looked for; the first that applies is named."""


def cause_line(steps: str, now: Shares, start: Shares) -> str:
    """One line on the rollouts of some steps."""
    between = max(1 - now.all_right - now.all_wrong, 0.0)
    hint = next((cause.hint for cause in CAUSES if cause.applies(now, start)), "")
    return (
        f"ROLLOUTS of {steps}: reward {now.reward:.3f} ({start.reward:.3f} at the start); groups "
        f"{now.all_right:.0%} all right, {now.all_wrong:.0%} all wrong, {between:.0%} between, "
        f"{now.no_spread:.0%} with equal rewards; answers {now.tokens:.0f} tokens, {now.cut:.0%} cut, "
        f"{now.unparsed:.0%} unparsed; entropy {now.entropy:.3g} ({start.entropy:.3g}), mismatch {now.mismatch:.2g}, "
        f"{now.clipped:.0%} clipped"
        + (f"; {now.empty:.0%} of the steps without an answer to train" if now.empty else "")
        + (f". {hint}" if hint else "")
    )
