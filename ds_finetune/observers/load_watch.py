"""Warns once where the loads of experts have become uneven."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.config.routers import RouterConfig
from ds_finetune.config.sections import LoraConfig
from ds_finetune.console.phase_line import Say
from ds_finetune.observers.expert_loads import Counts, max_violations, num_dead_experts
from ds_finetune.observers.record import Observer, StepRecord

_MOST_STEPS = 50
"""Loads are added up over so many steps, or a tenth of the run where that is less."""
_ENOUGH_TOKENS = 20
"""Mean number of tokens of an expert from which one without a token is not chance: with an even load it has
probability e^-20."""
_MANY_DEAD, _MORE_DEAD = 0.1, 0.01
"""Share of experts that are many without tokens, or many more than in the run's first steps."""
_GROWTH, _HIGH = 2.0, 2.0
"""MaxVio is high where it is above the latter and has grown by this factor since the run's first steps."""


@dataclass
class LoadWatch(Observer):
    """Says in one line, once in a run, where many experts get no token, or a few get much more than the mean.

    `steps` is the number of steps of the run, `advice` what the line ends with.
    """

    steps: int
    advice: str
    say: Say
    has_warned: bool = False
    first: tuple[int, float] | None = None
    """Experts without tokens and MaxVio (mean over layers) in the run's first steps."""
    _counts: Counts | None = None
    _since: int = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the loads of the step, and look at the sum when it is of enough steps and tokens."""
        if record.router_choices is None or self.has_warned:
            return record
        counts = record.router_choices.counts.numpy()
        if self._counts is None:
            self._counts, self._since = counts.copy(), record.step
        else:
            self._counts += counts
        wanted = max(1, min(_MOST_STEPS, self.steps // 10))
        if record.step - self._since + 1 >= wanted and self._counts.mean() >= _ENOUGH_TOKENS:
            self._look(self._counts, f"steps {self._since} to {record.step}")
            self._counts = None
        return record

    def state(self) -> dict[str, Any]:
        """What the first steps had, and whether the warning was given."""
        return {"has_warned": self.has_warned, "first": None if self.first is None else list(self.first)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; loads are added up anew."""
        self.has_warned = state["has_warned"]
        self.first = None if state["first"] is None else (state["first"][0], state["first"][1])

    def _look(self, counts: Counts, when: str) -> None:
        dead, violation = num_dead_experts(counts), float(max_violations(counts).mean())
        first = self.first or (dead, violation)
        self.first = first
        has_many = dead >= _MANY_DEAD * counts.size or dead > first[0] + _MORE_DEAD * counts.size
        is_uneven = violation > _HIGH and violation > _GROWTH * first[1]
        if not (has_many or is_uneven):
            return
        self.has_warned = True
        self.say(
            f"EXPERTS: {dead:,} of {counts.size:,} had no token in {when}, and the busiest of a layer had "
            f"{violation + 1:.1f} times the mean load (at the beginning {first[0]:,} and {first[1] + 1:.1f} times); "
            f"{self.advice}"
        )


def load_advice(lora: LoraConfig | None, router: RouterConfig | None) -> str:
    """What can be done about uneven loads, as the end of a line."""
    if lora is not None:
        return "other data, fewer steps or a lower optim.lr would change it"
    if router is not None and not router.train:
        return "routers are frozen: other data, or fewer steps, would change it"
    if router is None or not router.balance:
        return "set router.balance (0.0001) to keep loads even, or router.train to false to keep routers"
    return f"raise router.balance ({router.balance:g}), or lower optim.lr"
