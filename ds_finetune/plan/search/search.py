"""Finds the fastest layouts of a run that fit the memory of given machines.

The search knows how many seconds every layout of a group takes at least: those of the largest micro-batch with the
fastest activations and equal stages, whatever memory they take. It looks into groups in the order of these bounds, and
ends when the next bound is above the times of the layouts that it will list.
"""

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf

from ds_finetune.plan.estimate.accelerators import Machine
from ds_finetune.plan.estimate.memory import MemoryEstimate
from ds_finetune.plan.estimate.row_shape import RowShape
from ds_finetune.plan.estimate.step_time import TimeEstimate
from ds_finetune.plan.search.budget import Budget
from ds_finetune.plan.search.candidates import STAGES, Candidate, Candidates
from ds_finetune.plan.search.estimates import Estimates
from ds_finetune.plan.search.groups import GroupSearch, LayoutGroup
from ds_finetune.plan.search.layout import OFFLOADS, Layout

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
    """Layouts that would be faster than the best, and do not fit; where none fits, the one that lacks least."""
    budget: Budget
    num_groups: int
    """Combinations of parallel sizes, ZeRO stage and offload that are legal."""


@dataclass(frozen=True, order=True)
class _TooLarge:
    """A group of which no layout fits."""

    excess: int
    """Bytes beyond the budget that each of its layouts needs at least."""
    group: LayoutGroup


@dataclass(frozen=True)
class Search:
    """The search for one run on one kind of machine."""

    candidates: Candidates
    machine: Machine
    budget: Budget
    rows: RowShape

    def run(self, listed: int = LISTED) -> SearchResult:
        """The best layouts of all groups; none where none fits."""
        queue, within = list(self._within.groups()), self._within
        number = len(queue)
        heapq.heapify(queue)
        found: list[Proposal] = []
        too_large: list[_TooLarge] = []
        while queue and queue[0].least_seconds < (limit := found[-1].time.seconds if len(found) == listed else inf):
            group = heapq.heappop(queue)
            if group.is_shared:
                heapq.heappush(queue, within.bounded(group))
            elif excess := within.least_excess(group):
                too_large.append(_TooLarge(excess, group))
            elif not (divisions := within.divisions(group, limit)):
                continue
            elif not within.has_fitting(group):
                too_large.append(_TooLarge(0, group))
            elif (best := within.best_of(group, divisions, limit)) is not None:
                insort(found, Proposal(best, self._estimates.memory(best), self._estimates.time(best)), key=_seconds)
                del found[listed:]
        misfits = self._faster(too_large, found[0].time.seconds, listed) if found else self._nearest(too_large)
        return SearchResult(tuple(found), tuple(misfits), self.budget, number)

    def has_fitting(self) -> bool:
        """Whether any layout fits."""
        legal = {sizes: set(self.candidates.zero_stages(sizes)) for sizes in self.candidates.sizes()}
        # What needs least comes first.
        for choice in product(reversed(STAGES), reversed(OFFLOADS)):
            groups = [LayoutGroup(0.0, True, sizes, *choice) for sizes, choices in legal.items() if choice in choices]
            if any(map(self._within.has_fitting, groups)):
                return True
        return False

    def _faster(self, too_large: Sequence[_TooLarge], seconds: float, listed: int) -> list[Misfit]:
        """Layouts that would take less than `seconds`, the fastest first, in the form that needs least memory."""
        found: list[tuple[float, LayoutGroup]] = []
        for group in sorted(each.group for each in too_large):
            limit = found[-1][0] if len(found) == listed else seconds
            if group.least_seconds >= limit:
                break
            if (fastest := self._within.fastest_of(group, limit)) < limit:
                insort(found, (fastest, group))
                del found[listed:]
        return [self._misfit(group, fastest) for fastest, group in found]

    def _nearest(self, too_large: Sequence[_TooLarge]) -> list[Misfit]:
        """The layout that lacks least; none where there is no layout."""
        found: _TooLarge | None = None
        for each in sorted(too_large):
            if found is not None and each.excess >= found.excess:
                break
            exact = _TooLarge(self._estimates.excess(self._within.smallest_of(each.group)), each.group)
            found = exact if found is None else min(found, exact)
        return [] if found is None else [self._misfit(found.group, self._within.fastest_of(found.group))]

    def _misfit(self, group: LayoutGroup, seconds: float) -> Misfit:
        smallest = self._within.smallest_of(group)
        return Misfit(smallest, self._estimates.memory(smallest), seconds)

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self.candidates.model, self.machine, self.budget, self.rows)

    @cached_property
    def _within(self) -> GroupSearch:
        return GroupSearch(self.candidates, self._estimates)


def _seconds(proposal: Proposal) -> float:
    return proposal.time.seconds
