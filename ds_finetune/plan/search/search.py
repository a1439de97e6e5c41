"""Lists the first layouts of a run that fit given machines, in an order of simplicity. No speed is predicted.

A layout comes before another one that
1. holds more in host memory: nothing, inputs of recomputed layers, optimizer states, and then weights too;
2. has more communicating axes besides data parallelism;
3. has a higher ZeRO stage;
4. has larger axes: their product counts, and of equal products the larger ep comes first, then tp, sp and pp.

Of each combination of these, the search takes the least recomputation with which a micro-batch fits, and then the
largest micro-batch. What would need host memory is left out where the same sizes and ZeRO stage fit without.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.plan.estimate.memory import MemoryEstimate, estimate_memory, least_bytes_of_stages
from ds_finetune.plan.estimate.traced import Tracer, by_rows
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.search.candidates import STAGES, Candidate, Candidates
from ds_finetune.plan.search.fitting import Budget, largest_micro_batch
from ds_finetune.plan.search.layout import OFFLOADS, Activations, Layout

LISTED = 5
"""Number of listed layouts."""
MOST_TRIED = 100
"""Maximum number of layouts, not counting micro-batch and recomputation, whose memory is estimated in full."""


class Proposal(NamedTuple):
    """A legal layout, the plan of the run in it, and its memory."""

    layout: Layout
    plan: Plan
    memory: MemoryEstimate


@dataclass(frozen=True)
class SearchResult:
    """Result of a search; layouts are counted by parallel sizes, ZeRO stage and offload."""

    proposals: tuple[Proposal, ...]
    """The first layouts that fit, in the order of the search."""
    nearest: Proposal | None
    """The fully estimated layout with the least excess among those that do not fit; None without any."""
    num_compared: int
    """Layouts whose states were compared with the memory."""
    num_tried: int
    """Layouts whose states fit and whose memory was estimated in full."""
    is_cut_off: bool
    """Whether the search stopped after `MOST_TRIED` layouts."""


@dataclass(frozen=True)
class Search:
    """Search for one run on machines with `budget` per rank."""

    candidates: Candidates
    budget: Budget
    traces: Tracer

    def run(self) -> SearchResult:
        """Run the search; without proposals if no layout fits."""
        proposals: list[Proposal] = []
        misfits: list[Proposal] = []
        too_large: list[tuple[int, Candidate]] = []
        fitting: set[tuple[ParallelConfig, int]] = set()
        is_cut_off = False
        for first in self._groups():
            if len(proposals) == LISTED or (is_cut_off := len(proposals) + len(misfits) == MOST_TRIED):
                break
            if first.layout[:2] in fitting:
                continue
            if excess := self._excess_of_states(first):
                too_large.append((excess, first))
            elif self.budget.excess((best := self._best(first.layout)).memory):
                misfits.append(best)
            else:
                proposals.append(best)
                fitting.add(first.layout[:2])
        num_tried = len(proposals) + len(misfits)
        if not proposals:
            smallest = sorted(too_large, key=lambda each: each[0])[:LISTED]
            misfits += [self._best(first.layout) for _, first in smallest]
        nearest = min(misfits, key=lambda each: self.budget.excess(each.memory), default=None)
        return SearchResult(tuple(proposals), nearest, num_tried + len(too_large), num_tried, is_cut_off)

    def has_fitting_states(self) -> bool:
        """Whether the states of some layout fit."""
        return not all(map(self._excess_of_states, self._groups()))

    def _excess_of_states(self, candidate: Candidate) -> int:
        return self.budget.least_excess(least_bytes_of_stages(candidate.plan, self.candidates.model))

    def _groups(self) -> Iterator[Candidate]:
        """For each legal combination of sizes, ZeRO stage and offload, in search order, the layout with all rows of a
        rank in one forward and the least recomputation.
        """
        by_size = sorted(self.candidates.sizes, key=_order_of_sizes)
        axes = sorted({len(sizes.axes) for sizes in by_size})
        for offload, offloads_inputs, num_axes, stage in product(OFFLOADS, (False, True), axes, STAGES):
            sizes = [each for each in by_size if len(each.axes) == num_axes]
            for activations in self._settings_of_activations(offloads_inputs)[:1]:
                legal = (self.candidates.largest(each, stage, offload, activations) for each in sizes)
                yield from filter(None, legal)

    def _settings_of_activations(self, offloads_inputs: bool) -> list[Activations]:
        return [each for each in self.candidates.activations if each.activation_offload == offloads_inputs]

    def _best(self, first: Layout) -> Proposal:
        """The layout with the least recomputation that fits, and its largest micro-batch; if none fits, the one with
        the least excess at its smallest micro-batch. `first` is the layout with the least recomputation.
        """
        misfits = []
        for activations in self._settings_of_activations(first.activations.activation_offload):
            layout = first._replace(activations=activations)
            # Up to the largest micro-batch, memory is extrapolated from traces of one and two rows; listed layouts get
            # their own trace.
            extended = by_rows(self.traces)
            smallest = next(self._with_rows(layout, 0))
            rows = largest_micro_batch(smallest.plan, self.candidates.model, extended, budget=self.budget.device_bytes)
            for candidate in self._with_rows(layout, rows) if rows else ():
                if self.budget.excess(self._proposal(candidate, extended).memory):
                    continue
                if not self.budget.excess((proposal := self._proposal(candidate, self.traces)).memory):
                    return proposal
            misfits.append(self._proposal(smallest, extended))
        return min(misfits, key=lambda each: self.budget.excess(each.memory))

    def _with_rows(self, layout: Layout, rows: int) -> Iterator[Candidate]:
        """The layout with each legal micro-batch of at most `rows` rows, largest first; if there is none, with all
        legal ones, smallest first.
        """
        sizes = self.candidates.micro_batch_sizes(layout.parallel)
        lower = [size for size in reversed(sizes) if size <= rows]
        return filter(None, (self.candidates.find(layout._replace(micro_batch_size=n)) for n in lower or sizes))

    def _proposal(self, candidate: Candidate, traces: Tracer) -> Proposal:
        budget = self.budget.device_bytes
        memory = estimate_memory(candidate.plan, self.candidates.model, traces, budget=budget)
        return Proposal(*candidate, memory)


def _order_of_sizes(sizes: ParallelConfig) -> tuple[int, ...]:
    """Sort key: product of all axes, then larger ep, tp, sp and pp first."""
    axes = sizes.ep, sizes.tp, sizes.sp, sizes.pp
    return prod(axes), *(-size for size in axes)
