"""Finds the fastest layouts of a run that fit the memory of given machines.

The time of a layout does not depend on whether it fits. So the search first bounds the time of each group of layouts:
that of its largest micro-batch with the fastest activations, whatever memory they take. It looks into groups in the
order of their bounds, and ends when the next bound is above the times of the layouts that it will list.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ds_finetune.estimate.accelerators import Machine
from ds_finetune.estimate.memory import MemoryEstimate, StateBytes, estimate_memory, least_bytes
from ds_finetune.estimate.step_time import RowShape, TimeEstimate, estimate_time
from ds_finetune.search.budget import Budget
from ds_finetune.search.candidates import Candidate, Candidates
from ds_finetune.search.layout import OFFLOADS, Activations, Layout, Offload, Sizes

LISTED = 5
"""Layouts that are listed, and at most as many that would be faster and do not fit."""


@dataclass(frozen=True)
class Proposal:
    """A legal layout that fits, with its memory and the time of a step."""

    candidate: Candidate
    memory: MemoryEstimate
    time: TimeEstimate

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.candidate.layout


@dataclass(frozen=True)
class Misfit:
    """A legal layout that does not fit, with the memory of its smallest form, and the time of its fastest one."""

    candidate: Candidate
    memory: MemoryEstimate
    seconds: float

    @property
    def layout(self) -> Layout:
        """The smallest form of the layout."""
        return self.candidate.layout


@dataclass(frozen=True)
class SearchResult:
    """What a search found."""

    proposals: tuple[Proposal, ...]
    """The fastest layouts that fit, of which each has other parallel sizes, ZeRO stage or offload; the best first."""
    misfits: tuple[Misfit, ...]
    """Layouts that would be faster than the best, and do not fit; all of the smallest ones where none fits."""
    budget: Budget
    num_groups: int
    """Combinations of parallel sizes, ZeRO stage and offload that are legal."""


@dataclass(frozen=True, order=True)
class _LayoutGroup:
    """Layouts that differ in micro-batch and activations alone."""

    bound: float
    """Seconds of a step at least."""
    is_shared: bool
    """Whether the bound is that of another offload."""
    sizes: Sizes
    zero_stage: int
    offload: Offload

    def layout(self, rows: int, activations: Activations) -> Layout:
        return Layout(self.sizes, self.zero_stage, self.offload, rows, activations)


@dataclass(frozen=True)
class Search:
    """The search for one run on one kind of machine."""

    candidates: Candidates
    machine: Machine
    budget: Budget
    rows: RowShape

    def run(self, listed: int = LISTED) -> SearchResult:
        """The best layouts of all groups; none where none fits."""
        queue = list(self._groups())
        number = len(queue)
        heapq.heapify(queue)
        found: list[Proposal] = []
        misfits: list[Misfit] = []
        beyond: list[tuple[int, _LayoutGroup]] = []
        while queue and (len(found) < listed or queue[0].bound < found[-1].time.seconds):
            group = heapq.heappop(queue)
            if group.is_shared:
                heapq.heappush(queue, self._bounded(group))
                continue
            if excess := self._least_excess(group):
                beyond.append((excess, group))
                continue
            best = self._best_of(group)
            if isinstance(best, Misfit):
                misfits.append(best)
            else:
                found = sorted([*found, best], key=_seconds)[:listed]
        if found:
            best_seconds = found[0].time.seconds
            groups = sorted((group for _, group in beyond if group.bound < best_seconds), key=_bound)[:listed]
            misfits = [misfit for misfit in misfits if misfit.seconds < best_seconds]
            misfits = sorted([*misfits, *map(self._smallest_of, groups)], key=lambda misfit: misfit.seconds)
        else:
            misfits = self._nearest(misfits, beyond, listed)
        return SearchResult(tuple(found), tuple(misfits[:listed]), self.budget, number)

    def _nearest(
        self, misfits: Sequence[Misfit], beyond: Sequence[tuple[int, _LayoutGroup]], listed: int
    ) -> list[Misfit]:
        """The layouts that lack least, of `misfits` and of groups that lack as many bytes as is said at least."""

        def lacking(misfit: Misfit) -> int:
            return self.budget.excess(misfit.memory)

        nearest = sorted(misfits, key=lacking)[:listed]
        for least, group in sorted(beyond):
            if len(nearest) == listed and least >= lacking(nearest[-1]):
                break
            nearest = sorted([*nearest, self._smallest_of(group)], key=lacking)[:listed]
        return nearest

    def has_fitting(self) -> bool:
        """Whether any layout fits."""
        groups = [
            _LayoutGroup(0.0, True, sizes, stage, offload)
            for sizes in self.candidates.sizes()
            for stage, offload in self.candidates.zero_stages(sizes)
        ]
        # What needs least comes first.
        groups.sort(key=lambda group: (group.zero_stage, OFFLOADS.index(group.offload)), reverse=True)
        may_fit = (group for group in groups if not self._least_excess(group))
        return any(not self.budget.excess(self._smallest_of(group).memory) for group in may_fit)

    def _groups(self) -> Iterator[_LayoutGroup]:
        """Every combination of parallel sizes, ZeRO stage and offload that is legal, with a bound of its time.

        Offload takes time, so the bound of a ZeRO stage without it holds for all offloads too.
        """
        for sizes in self.candidates.sizes():
            bounds: dict[int, float] = {}
            for stage, offload in self.candidates.zero_stages(sizes):
                group = _LayoutGroup(bounds.get(stage, 0.0), stage in bounds, sizes, stage, offload)
                group = group if group.is_shared else self._bounded(group)
                bounds[stage] = group.bound
                yield group

    def _bounded(self, group: _LayoutGroup) -> _LayoutGroup:
        """The group with the time of its fastest layout, whatever memory that takes."""
        every = self.candidates.micro_batch_sizes(group.sizes)
        times = self._times(group, every, self.candidates.activations[0])
        return replace(group, is_shared=False, bound=min((time.seconds for _, time in times), default=0.0))

    def _best_of(self, group: _LayoutGroup) -> Proposal | Misfit:
        """The fastest layout of a group that fits; its smallest one where none does."""
        smallest = self._smallest_of(group)
        if self.budget.excess(smallest.memory):
            return smallest
        every = self.candidates.micro_batch_sizes(group.sizes)
        found: list[Proposal] = []
        for activations in self.candidates.activations:
            sizes = self._fitting_sizes(group, every, activations)
            for candidate, time in self._times(group, sizes, activations):
                found.append(Proposal(candidate, self._memory(candidate), time))
            if len(sizes) == len(every):
                # What saves more memory costs time, and can gain no larger micro-batch.
                break
        return min(found, key=_seconds)

    def _fitting_sizes(self, group: _LayoutGroup, sizes: Sequence[int], activations: Activations) -> tuple[int, ...]:
        """The micro-batches of `sizes` that fit, ascending. The last one needs no memory to add up gradients, so that
        it may fit where smaller ones do not.
        """

        def exceeds(rows: int) -> bool:
            return not self._fits(group.layout(rows, activations))

        *several, whole = sizes
        number = bisect_left(several, True, key=exceeds)
        return (*several[:number], *(() if exceeds(whole) else (whole,)))

    def _least_excess(self, group: _LayoutGroup) -> int:
        """Bytes beyond the budget that every layout of a group needs; 0 where some may fit. The largest micro-batch
        has the smallest states, because it adds up no gradients.
        """
        return self.budget.least_excess(self._states(group, self.candidates.micro_batch_sizes(group.sizes)[-1]))

    def _states(self, group: _LayoutGroup, rows: int) -> StateBytes:
        found = self.candidates.find(group.layout(rows, self.candidates.activations[0]))
        if found is None:
            return StateBytes(0, 0)
        return least_bytes(found.config, found.plan, self.candidates.model)

    def _smallest_of(self, group: _LayoutGroup) -> Misfit:
        """The layout of a group that needs least."""
        largest = self.candidates.micro_batch_sizes(group.sizes)[-1]
        sizes = [1] if self._states(group, largest) == self._states(group, 1) else sorted({1, largest})
        beside = product(sizes, self.candidates.activations)
        every = [self.candidates.find(group.layout(*each)) for each in beside]
        misfits = [Misfit(each, self._memory(each), group.bound) for each in every if each is not None]
        return min(misfits, key=lambda misfit: self.budget.excess(misfit.memory))

    def _times(
        self, group: _LayoutGroup, sizes: Sequence[int], activations: Activations
    ) -> Iterator[tuple[Candidate, TimeEstimate]]:
        """Micro-batches of a group with the times of their steps: the largest of `sizes`, and in a pipeline, where more
        of them leave less of a step idle, all others.
        """
        for rows in sizes if group.sizes.pp > 1 else sizes[-1:]:
            candidate = self.candidates.find(group.layout(rows, activations))
            if candidate is not None:
                yield candidate, self._time(candidate)

    def _fits(self, layout: Layout) -> bool:
        candidate = self.candidates.find(layout)
        return candidate is not None and not self.budget.excess(self._memory(candidate))

    def _memory(self, candidate: Candidate) -> MemoryEstimate:
        return estimate_memory(candidate.config, candidate.plan, self.candidates.model)

    def _time(self, candidate: Candidate) -> TimeEstimate:
        model = self.candidates.model
        return estimate_time(candidate.config, candidate.plan, model, machine=self.machine, rows=self.rows)


def _seconds(proposal: Proposal) -> float:
    return proposal.time.seconds


def _bound(group: _LayoutGroup) -> float:
    return group.bound
