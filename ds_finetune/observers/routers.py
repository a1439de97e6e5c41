"""Observers of the loads of routed experts: metrics of each step, a warning about uneven loads, and the file
`experts.jsonl`.

In this module `counts` int64 [layers, experts] is the number of tokens routed to each expert in a step. All metrics are
0 if there is no token.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.sections import LoraConfig, RouterConfig
from ds_finetune.config.units import MIB
from ds_finetune.console.phase_line import Say
from ds_finetune.model.routers import RouterChoices
from ds_finetune.observers.record import Remembering, StepRecord
from ds_finetune.observers.writers import LineFile

_MOST_STEPS = 50
"""Loads of experts are judged by their sum over this number of steps, or over a tenth of the run if that is less."""
_ENOUGH_TOKENS = 20
"""Loads are judged if experts have at least this mean number of tokens. With even loads, an expert then gets no token
with a probability of only e^-20.
"""
_MANY_DEAD, _MORE_DEAD = 0.1, 0.01
"""The warning about loads is printed if the fraction _MANY_DEAD of experts gets no token, or if the fraction without
tokens has grown by more than _MORE_DEAD since the run's first steps.
"""
_GROWTH, _HIGH = 2.0, 2.0
"""The warning about loads is printed if MaxVio, the excess load of the busiest experts, is above _HIGH and has grown by
the factor _GROWTH since the run's first steps.
"""
Counts = NDArray[np.int64]
Layers = NDArray[np.float64]
MOST_BYTES, _BYTES_PER_LOAD = 64 * MIB, 8
"""Maximum size of `experts.jsonl`, and the bytes of one load with seven digits. A long run of a large model records
only every second, third, ... step to stay below the maximum. If a run is extended, the added steps may take as much
again.
"""
_MOST_WAITING = 100
"""Maximum number of lines of `experts.jsonl` that wait in memory while the disk is full."""


def max_violations(counts: Counts) -> Layers:
    """MaxVio of each layer, fp64 [layers]: the load of the layer's busiest expert divided by the layer's mean load,
    less 1 (Wang et al., arXiv 2408.15664, eq. 4).
    """
    mean = counts.mean(axis=1)
    return np.divide(counts.max(axis=1) - mean, mean, out=np.zeros_like(mean), where=mean > 0)


def effective_experts(counts: Counts) -> Layers:
    """Effective number of experts of each layer, fp64 [layers]: the exponential of the entropy of its loads."""
    total = counts.sum(axis=1, keepdims=True)
    fractions = counts / np.maximum(total, 1)
    nats = -(fractions * np.log(np.where(counts > 0, fractions, 1.0))).sum(axis=1)
    return np.where(total[:, 0] > 0, np.exp(nats), 0.0)


def num_dead_experts(counts: Counts) -> int:
    """Number of routed experts to which no token was sent, over all layers that got tokens."""
    return int((counts[counts.any(axis=1)] == 0).sum())


def busiest_rank_ratio(counts: Counts, ep: int) -> float:
    """Load of a layer's busiest expert-parallel rank, divided by the mean load of all `ep` ranks; averaged over layers.

    Each of the `ep` ranks has an equal shard of each layer's experts. In each layer all ranks wait for the busiest one,
    so the ratio says how much longer experts take than with even loads.
    """
    of_ranks = counts.reshape(len(counts), ep, -1).sum(axis=2)
    return float((max_violations(of_ranks) + of_ranks.any(axis=1)).mean())


@dataclass
class RouterMetrics(Remembering):
    """Adds the `router/*` metrics, which describe the loads of experts, to each step. `ep` is the number of
    expert-parallel ranks.

    Every rank knows the loads of all layers, also with pipeline stages. So every rank can track the router biases of
    all layers.
    """

    saved: ClassVar = ("moved",)
    ep: int
    bias_update: float
    """Amount by which each step changes a router's biases; a resumed run may use another amount."""
    without_bias: tuple[int, ...] = ()
    """Layers whose routers have no bias, as indices into the list of layers with experts."""
    moved: list[list[float]] | None = None
    """Movement of each expert's router bias since the run's start, [layers, experts]; None before an update."""

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the `router/*` metrics if routers counted tokens in this step."""
        choices: RouterChoices | None = record.counted.get("routers")
        if choices is None:
            return record
        counts = choices.counts.numpy()
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
        if self.ep > 1:
            values["busiest_rank_ratio"] = busiest_rank_ratio(counts, self.ep)
        if self.bias_update:
            # Router biases move as in `model.routers.update_biases`.
            moved: np.ndarray[Any, Any] = np.zeros(counts.shape) if self.moved is None else np.array(self.moved)
            if not record.values["train/skipped"]:
                above = np.sign(counts * counts.shape[1] - counts.sum(axis=1, keepdims=True))
                above[list(self.without_bias)] = 0
                moved -= self.bias_update * above
            self.moved = moved.tolist()
        if self.moved is not None:
            drift = np.abs(self.moved)
            values |= {"bias_drift_mean": float(drift.mean()), "bias_drift_max": float(drift.max())}
        return record.with_values({f"router/{name}": value for name, value in values.items()})


@dataclass
class LoadWatch(Remembering):
    """Prints one warning per run if many experts get no token, or if few experts get most tokens.

    `steps` is the number of steps of the run. `advice` is the end of the warning, which says what to change.
    """

    saved: ClassVar = ("has_warned", "first")
    steps: int
    advice: str
    say: Say
    has_warned: bool = False
    first: Sequence[float] | None = None
    """Loads of experts in the run's first steps: number of experts without tokens, and mean over layers of MaxVio."""
    _counts: Counts | None = None
    _since: int = 0

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the step's loads to a sum, and judge the sum once it covers enough steps and tokens."""
        if "routers" not in record.counted or self.has_warned:
            return record
        counts = record.counted["routers"].counts.numpy()
        if self._counts is None:
            self._counts, self._since = counts.copy(), record.step
        else:
            self._counts += counts
        window = max(1, min(_MOST_STEPS, self.steps // 10))
        if record.step - self._since + 1 < window or self._counts.mean() < _ENOUGH_TOKENS:
            return record
        counts, self._counts = self._counts, None
        dead, violation = num_dead_experts(counts), float(max_violations(counts).mean())
        first = self.first = self.first or (dead, violation)
        has_many = dead >= _MANY_DEAD * counts.size or dead > first[0] + _MORE_DEAD * counts.size
        is_uneven = violation > _HIGH and violation > _GROWTH * first[1]
        if has_many or is_uneven:
            self.has_warned = True
            self.say(
                f"EXPERTS: {dead:,} of {counts.size:,} had no token in steps {self._since} to {record.step}, and the "
                f"busiest of a layer had {violation + 1:.1f} times the mean load (at the beginning {first[0]:,} and "
                f"{first[1] + 1:.1f} times); {self.advice}"
            )
        return record


def load_advice(lora: LoraConfig | None, router: RouterConfig | None) -> str:
    """End of the warning about uneven loads, which advises which keys of the run file to change."""
    if lora is not None:
        return "other data, fewer steps or a lower optim.lr would change it"
    if router is not None and not router.train:
        return "routers are frozen: other data, or fewer steps, would change it"
    if router is None or not router.balance:
        return "set router.balance (0.0001) to keep loads even, or router.train to false to keep routers"
    return f"raise router.balance ({router.balance:g}), or lower optim.lr"


class ExpertLoadsFile(LineFile):
    """Writes the loads of experts to `experts.jsonl`, at every n-th step so that the file stays small.

    Each line describes one step: its number, its tokens without padding, the indices of the layers with routed experts,
    the entropy of each such layer's router in nats, and the number of tokens by layer and expert. While the disk is
    full, at most 100 lines wait in memory.
    """

    def __init__(self, path: Path, layers: Sequence[int], experts: int, *, steps: int, say: Say) -> None:
        super().__init__(path, say, most=_MOST_WAITING)
        self._layers = layers
        self.every = -(-steps * len(layers) * experts * _BYTES_PER_LOAD // MOST_BYTES)

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the loads of experts if this is a step to record."""
        if "routers" in record.counted and record.step % self.every == 0:
            choices: RouterChoices = record.counted["routers"]
            loads = {"num_tokens": choices.num_tokens, "layers": self._layers}
            loads |= {"entropy": [float(f"{nats:.6g}") for nats in choices.entropy.tolist()]}
            loads |= {"counts": choices.counts.tolist()}
            self.put(json.dumps({"step": record.step, **loads}, separators=(",", ":")) + "\n")
        return record
