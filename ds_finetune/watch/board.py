"""What this rank is doing: phase, optimizer step and last collectives, kept at a microsecond a collective; and how long it may."""

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from ds_finetune.config import WatchdogConfig
from ds_finetune.observers.record import StepRecord
from ds_finetune.schedule import seconds_of

STEP_FACTOR, LEAST_SECONDS, RECENT_STEPS = 10, 60.0, 25
"""`auto` is this many times the median of so many recent steps, and not less than a minute."""
_RECENT_CALLS = 128
_WITHIN = -1.0
PREPARING = "preparation"
"""The phase without a limit: what it needs depends on the data, and nobody waits in a collective."""


class Call(NamedTuple):
    """One collective of this rank: its function, elements given, the ranks that share it, and its number among theirs, from 1."""

    name: str
    size: int
    ranks: str
    number: int

    def __str__(self) -> str:
        """For people."""
        return f"{self.name}" + (f" of {self.size:,} elements" if self.size else "") + f" (number {self.number:,} of {self.ranks})"

    @property
    def kind(self) -> tuple[str, int]:
        """What must be the same on every rank that takes part."""
        return self.name, self.size


@dataclass(frozen=True)
class Patience:
    """Seconds without progress after which a run has come to a stand: of a step (None: from measured steps), at the start, elsewhere."""

    step: float | None
    start: float
    other: float

    @classmethod
    def of(cls, config: WatchdogConfig) -> Self:
        """As the run file says; infinite where nothing is watched."""
        if config.limit == "never":
            return cls(math.inf, math.inf, math.inf)
        return cls(None if config.limit == "auto" else seconds_of(config.limit), seconds_of(config.start), seconds_of(config.other))


@dataclass(frozen=True)
class Answer:
    """What a rank says of itself when asked; `seconds` since its last progress, `inside` the collective it waits in."""

    rank: int
    phase: str
    step: int
    seconds: float
    inside: Call | None
    last: Call | None
    counts: dict[str, int]
    recent: tuple[Call, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, of which `parsed` makes the same again."""
        return asdict(self)

    def __str__(self) -> str:
        """For people."""
        last = f"the last was {self.last}" if self.last else "it has not been in any"
        where = f"waits in {self.inside}" if self.inside else f"is in no collective; {last}"
        return f"{where}; {self.phase}, {self.step:,} steps done, no progress for {self.seconds:.0f} s"


class Board:
    """Written by the threads that train, read by the one that watches."""

    def __init__(self, rank: int, limits: Patience) -> None:
        self.rank = rank
        self.limits = limits
        self.phase = PREPARING
        self.step = 0
        self.waited_seconds = 0.0
        """Seconds spent in collectives so far."""
        self.own_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        """Of each recent step but the first, its time without that in collectives."""
        self.last: Call | None = None
        self._inside: Call | None = None
        self._counts: Counter[str] = Counter()
        self._recent: deque[Call] = deque(maxlen=_RECENT_CALLS)
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._waited_before = 0.0
        self._progress_at = self._sign_at = time.monotonic()

    def enter(self, name: str, size: int, ranks: str) -> float:
        """A collective begins; returns when."""
        self._counts[ranks] += 1
        self.last = self._inside = call = Call(name, size, ranks, self._counts[ranks])
        self._recent.append(call)
        self._sign_at = now = time.monotonic()
        return now

    def leave(self, began: float) -> None:
        """It is over, or on its way where it is asynchronous."""
        if began == _WITHIN:
            return
        self._inside = None
        self._sign_at = now = time.monotonic()
        self.waited_seconds += now - began

    def wait(self) -> float:
        """An asynchronous collective is waited for; `leave` ends that too. Others wait inside their own call."""
        if self._inside is not None:
            return _WITHIN
        self._inside = self.last
        return time.monotonic()

    def counted(self, steps: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """The same records; each is progress, and its time is remembered."""
        self._waited_before = self.waited_seconds
        for record in steps:
            seconds = record.values["perf/step_seconds"]
            self._step_seconds.append(seconds)
            if self.phase == "step":
                self.own_seconds.append(max(seconds - (self.waited_seconds - self._waited_before), 0.0))
            self.step, self.phase = record.step, "step"
            self.progress()
            yield record
            self._waited_before = self.waited_seconds

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Evaluation, saving, export: neither is a step, nor as short as one."""
        before, self.phase = self.phase, phase
        self.progress()
        try:
            yield
        finally:
            self.phase = before
            self.progress()

    def over(self) -> None:
        """No further step: what is left takes its own time."""
        self.phase = "closing"
        self.progress()

    def progress(self) -> None:
        """The limit begins anew."""
        self._progress_at = time.monotonic()

    def limit(self) -> float:
        """Seconds that the phase may go without progress."""
        if self.phase == PREPARING:
            return math.inf
        if self.phase == "start":
            return self.limits.start
        if self.phase != "step":
            return self.limits.other
        if self.limits.step is not None:
            return self.limits.step
        return max(LEAST_SECONDS, STEP_FACTOR * statistics.median(self._step_seconds))

    def silent_since(self) -> float:
        """Time (monotonic) of the last progress: a step or a change of phase, and where tensors are passed one by one, each collective.

        A save asks every few milliseconds whether it is done, so collectives say nothing there.
        """
        return self._progress_at if self.phase in ("step", "save", "closing") else max(self._progress_at, self._sign_at)

    def answer(self) -> Answer:
        """What this rank is doing now."""
        return Answer(
            rank=self.rank,
            phase=self.phase,
            step=self.step,
            seconds=time.monotonic() - self.silent_since(),
            inside=self._inside,
            last=self.last,
            counts=dict(self._counts),
            recent=tuple(self._recent),
        )
