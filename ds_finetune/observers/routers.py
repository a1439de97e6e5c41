"""Load balance of routed experts: metrics of each step, a warning, and the file `experts.jsonl`.

`counts` int64 [layers, experts] are the tokens routed to each expert. Without any token every metric is 0.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.sections import LoraConfig, RouterConfig
from ds_finetune.config.units import MIB
from ds_finetune.console.phase_line import Say
from ds_finetune.model.routers import RouterChoices
from ds_finetune.observers.record import Observer, Remembering, StepRecord
from ds_finetune.observers.writers import LineFile

_MOST_STEPS = 50
"""Number of steps over which loads are summed for the warning, or a tenth of the run where that is less."""
_ENOUGH_TOKENS = 20
"""Mean number of tokens per expert from which an expert without tokens is not chance: with an even load its probability
is e^-20.
"""
_MANY_DEAD, _MORE_DEAD = 0.1, 0.01
"""Shares of experts without tokens that trigger the warning: in total, and above the share of the run's first steps."""
_GROWTH, _HIGH = 2.0, 2.0
"""MaxVio triggers the warning above `_HIGH` if it has grown by the factor `_GROWTH` since the run's first steps."""
Counts = NDArray[np.int64]
Layers = NDArray[np.float64]
MOST_BYTES, _BYTES_PER_LOAD = 64 * MIB, 8
"""Maximum size of `experts.jsonl`, if a load has at most seven digits: a long run of a large model records only every
second step, every third, and so on. An extended run keeps its records, and its further steps may take as much again.
"""
_MOST_WAITING = 100
"""Maximum number of lines that are queued on a full disk."""


def max_violations(counts: Counts) -> Layers:
    """MaxVio of each layer (Wang et al., arXiv 2408.15664, eq. 4): load of the busiest expert over the mean load, less
    1; fp64 [layers].
    """
    mean = counts.mean(axis=1)
    return np.divide(counts.max(axis=1) - mean, mean, out=np.zeros_like(mean), where=mean > 0)


def effective_experts(counts: Counts) -> Layers:
    """Effective number of experts of each layer: the exponential of its load's entropy; fp64 [layers]."""
    total = counts.sum(axis=1, keepdims=True)
    fractions = counts / np.maximum(total, 1)
    nats = -(fractions * np.log(np.where(counts > 0, fractions, 1.0))).sum(axis=1)
    return np.where(total[:, 0] > 0, np.exp(nats), 0.0)


def num_dead_experts(counts: Counts) -> int:
    """Number of experts without a token, over all layers."""
    return int((counts[counts.any(axis=1)] == 0).sum())


def busiest_rank_ratio(counts: Counts, ep: int) -> float:
    """Load of the busiest of `ep` expert parallel ranks relative to the mean rank, averaged over layers.

    Rank i holds the i-th of equal shards of each layer's experts. All ranks wait for the busiest one in each layer, so
    the ratio is the time of experts relative to that with even loads.
    """
    of_ranks = counts.reshape(len(counts), ep, -1).sum(axis=2)
    return float((max_violations(of_ranks) + of_ranks.any(axis=1)).mean())


@dataclass
class RouterMetrics(Observer):
    """Adds the `router/*` metrics of each step; `ep` is the number of expert parallel ranks.

    Every rank knows the loads of all layers, and so tracks the biases of all layers with any number of pipeline stages.
    """

    ep: int
    bias_update: float
    """Update rate of the bias in this run; it may have changed on resume."""
    without_bias: tuple[int, ...] = ()
    """Indices, among the layers with experts, of layers whose routers have no bias."""
    _moved: NDArray[np.float64] | None = None
    """Change of each expert's bias since the run's start, fp64 [layers, experts]; None until biases are updated."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the metrics of a step in which routers counted tokens."""
        choices: RouterChoices | None = record.counted.get("routers")
        if choices is None:
            return record
        counts = choices.counts.numpy()
        values = self._values(counts, choices)
        if self.bias_update:
            # The update rule of `model.routers.update_biases`.
            if self._moved is None:
                self._moved = np.zeros(counts.shape)
            if not record.values["train/skipped"]:
                above = np.sign(counts * counts.shape[1] - counts.sum(axis=1, keepdims=True))
                above[list(self.without_bias)] = 0
                self._moved -= self.bias_update * above
        if self._moved is not None:
            drift = np.abs(self._moved)
            values |= {"bias_drift_mean": float(drift.mean()), "bias_drift_max": float(drift.max())}
        return record.with_values({f"router/{name}": value for name, value in values.items()})

    def state(self) -> dict[str, Any]:
        """Changes of the biases so far."""
        return {"moved": None if self._moved is None else self._moved.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the changes of the biases."""
        self._moved = None if state["moved"] is None else np.array(state["moved"], dtype=np.float64)

    def _values(self, counts: Counts, choices: RouterChoices) -> dict[str, float]:
        violations, effective = max_violations(counts), effective_experts(counts)
        values = {
            "max_violation_mean": float(violations.mean()),
            "max_violation_max": float(violations.max()),
            "dead_experts": float(num_dead_experts(counts)),
            "effective_experts_mean": float(effective.mean()),
            "effective_experts_min": float(effective.min()),
            "entropy": float(choices.entropy.mean()),
        }
        if choices.mismatch is not None:
            values["mismatch"] = choices.mismatch
        return values | ({"busiest_rank_ratio": busiest_rank_ratio(counts, self.ep)} if self.ep > 1 else {})


@dataclass
class LoadWatch(Remembering):
    """Warns in one line, once per run, when many experts get no token, or a few experts get far more than the mean.

    `steps` is the number of steps of the run; `advice` ends the line.
    """

    saved: ClassVar = ("has_warned", "first")
    steps: int
    advice: str
    say: Say
    has_warned: bool = False
    first: Sequence[float] | None = None
    """Number of experts without tokens, and MaxVio averaged over layers, in the run's first steps."""
    _counts: Counts | None = None
    _since: int = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the loads of the step, and check the sum once it covers enough steps and tokens."""
        if "routers" not in record.counted or self.has_warned:
            return record
        counts = record.counted["routers"].counts.numpy()
        if self._counts is None:
            self._counts, self._since = counts.copy(), record.step
        else:
            self._counts += counts
        window = max(1, min(_MOST_STEPS, self.steps // 10))
        if record.step - self._since + 1 >= window and self._counts.mean() >= _ENOUGH_TOKENS:
            self._look(self._counts, f"steps {self._since} to {record.step}")
            self._counts = None
        return record

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
    """Advice against uneven loads, for the end of the warning."""
    if lora is not None:
        return "other data, fewer steps or a lower optim.lr would change it"
    if router is not None and not router.train:
        return "routers are frozen: other data, or fewer steps, would change it"
    if router is None or not router.balance:
        return "set router.balance (0.0001) to keep loads even, or router.train to false to keep routers"
    return f"raise router.balance ({router.balance:g}), or lower optim.lr"


class ExpertLoadsFile(LineFile):
    """Writes `experts.jsonl`: the expert loads of every n-th step of a run of `steps` steps.

    A line has the step, its number of tokens without padding, the indices of the layers with routed experts, the
    entropy of each of their routers in nats, and the number of tokens by layer and expert. On a full disk at most 100
    lines are queued.
    """

    def __init__(self, path: Path, layers: Sequence[int], experts: int, *, steps: int, say: Say) -> None:
        super().__init__(path, say, most=_MOST_WAITING)
        self._layers = layers
        self.every = -(-steps * len(layers) * experts * _BYTES_PER_LOAD // MOST_BYTES)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the loads of the step if it is to be recorded."""
        if "routers" in record.counted and record.step % self.every == 0:
            choices: RouterChoices = record.counted["routers"]
            loads = {"num_tokens": choices.num_tokens, "layers": self._layers}
            loads |= {"entropy": [float(f"{nats:.6g}") for nats in choices.entropy.tolist()]}
            loads |= {"counts": choices.counts.tolist()}
            self.put(json.dumps({"step": record.step, **loads}, separators=(",", ":")) + "\n")
        return record
