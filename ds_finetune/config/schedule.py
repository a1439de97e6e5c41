"""Durations and learning-rate schedules: pure functions of plain numbers, importable without torch."""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal, Self

Unit = Literal["steps", "epochs", "tokens"]
"""Unit in which the length of training is given."""
SchedulerName = Literal["cosine", "linear", "constant", "wsd", "exponential_rise"]

_TEXT = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*(step|epoch|token)s?\s*$")
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(second|minute|hour)s?")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}
WSD_DECAY_SHARE = 0.1
"""Fraction of the run at its end in which the learning rate of `wsd` decays (MiniCPM, arXiv 2404.06395)."""


@dataclass(frozen=True)
class Duration:
    """A length of training in one unit; `parse` reads `200 steps`, `3 epochs`, `1e9 tokens`."""

    value: float
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `N steps`, `N epochs` or `N tokens`; ValueError for any other text."""
        match = _TEXT.match(text)
        if not match:
            raise ValueError(f"`{text}` is not a duration; write `200 steps`, `3 epochs` or `1e9 tokens`")
        value, unit = float(match[1].replace("_", "")), f"{match[2]}s"
        if value <= 0 or not math.isfinite(value) or (unit != "epochs" and value != int(value)):
            raise ValueError(
                f"`{text}` is not a duration: {unit} must be a positive {'number' if unit == 'epochs' else 'integer'}"
            )
        return cls(value, unit)  # type: ignore[arg-type]

    def in_steps(self, *, rows: int, tokens: float, global_batch_size: int) -> int:
        """Convert to optimizer steps, rounded up; an epoch has `rows` rows with `tokens` tokens in total."""
        if self.unit == "steps":
            return int(self.value)
        if self.unit == "epochs":
            return math.ceil(self.in_rows(rows) / global_batch_size)
        return max(1, math.ceil(round(self.value / tokens * rows, 6) / global_batch_size))

    def in_rows(self, rows: int) -> int:
        """Convert a duration in epochs to rows, rounded up and at least one; an epoch has `rows` rows."""
        assert self.unit == "epochs"
        return max(1, math.ceil(round(self.value * rows, 6)))

    def __str__(self) -> str:
        """Text of this duration, from which `parse` reads the same duration."""
        is_whole = self.value == int(self.value)
        return f"{int(self.value) if is_whole else format(Decimal(repr(self.value)), 'f')} {self.unit}"


@dataclass(frozen=True)
class Interval:
    """Interval between events such as checkpoints, in steps, epochs or seconds. A field that is not given is infinite;
    if several are given, an event is due when the first of them has passed.

    Steps need not be whole: the events of 2.5 steps are at steps 3, 5, 8 and so on.
    """

    steps: float = math.inf
    seconds: float = math.inf
    epochs: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `N steps`, `N epochs`, a time such as `15 minutes`, or two joined, as in `500 steps or 15 minutes`."""
        given = dict[str, float]()
        for part in text.split(" or "):
            match = _TEXT.match(part)
            if _TIME.fullmatch(part.strip()) and "seconds" not in given:
                given["seconds"] = seconds_of(part)
            elif match and match[2] != "token" and not given.keys() & {"steps", "epochs"}:
                length = Duration.parse(part)
                given[length.unit] = length.value
            else:
                raise ValueError(
                    f"`{text}` is no interval; write `500 steps`, `1 epoch`, `15 minutes`, or two: `500 steps or 15 "
                    "minutes`"
                )
        return cls(**given)

    def in_steps(self, steps_per_epoch: float) -> "Interval":
        """The interval with epochs converted to steps."""
        return Interval(self.epochs * steps_per_epoch, self.seconds) if self.epochs < math.inf else self

    def times(self, step: int) -> int:
        """Number of events that are due by the end of optimizer step `step`, counted from 1."""
        return math.floor(step / self.steps + 1e-9)

    def is_due(self, step: int) -> bool:
        """Whether an event is due at the end of optimizer step `step`."""
        return self.times(step) > self.times(step - 1)


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """The learning rate of each step of a run of `steps` steps."""

    name: SchedulerName
    lr: float
    min_lr_ratio: float
    warmup_steps: int
    steps: int

    def at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 1; steps after the end use the last value.

        The peak `lr` is reached at the last step of warm-up, or at the first step without warm-up; the last step has
        `lr * min_lr_ratio`. `exponential_rise`, for learning-rate range tests, rises from `lr * min_lr_ratio` to `lr`
        without warm-up.
        """
        if self.name == "exponential_rise":
            rise = min(1.0, (step - 1) / (self.steps - 1)) if self.steps > 1 else 1.0
            return self.lr * self.min_lr_ratio ** (1 - rise)
        peak = max(1, self.warmup_steps)
        if step <= peak:
            return self.lr * step / peak
        progress = min(1.0, (step - peak) / (self.steps - peak)) if self.steps > peak else 1.0
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * _SHAPES[self.name](progress))


def warmup_steps(text: str, steps: int) -> int:
    """Number of warm-up steps for `N steps`, or for a share such as `3%` of a run of `steps` steps, rounded up."""
    percent = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if percent:
        return math.ceil(round(steps * float(percent[1]) / 100, 6))
    if text.strip() in ("0", "0 steps"):
        return 0
    match = _TEXT.match(text)
    if match is None or match[2] != "step":
        meant = f"{float(text) * 100:g}%" if re.fullmatch(r"\s*0?\.\d+\s*", text) else "3%"
        raise ValueError(f"`{text}` is not a warm-up; write `{meant}` of the run or `100 steps`")
    return int(Duration.parse(text).value)


def seconds_of(text: str) -> float:
    """Convert `90 seconds`, `30 minutes` or `2 hours` to seconds; ValueError for any other text."""
    match = _TIME.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise ValueError(f"`{text}` is not a time; write `90 seconds`, `30 minutes` or `2 hours`")
    return float(match[1]) * _SECONDS[match[2]]


_SHAPES = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
    "wsd": lambda progress: min(1.0, (1 - progress) / WSD_DECAY_SHARE),
}
