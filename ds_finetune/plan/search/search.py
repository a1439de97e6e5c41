"""Finds the fastest layouts of a run that fit the memory of given machines.

The search knows how many seconds every layout of a group takes at least: those of the largest micro-batch with the
fastest activations and equal stages, whatever memory they take. It looks into groups in the order of these bounds, and
ends when the next bound is above the times of the layouts that it will list.
"""

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from math import inf
from typing import NamedTuple

from ds_finetune.plan.estimate.accelerators import Machine
from ds_finetune.plan.estimate.memory import (
    MemoryEstimate,
    estimate_memory,
    estimate_stages,
    fullest_stage,
    least_bytes_of_stages,
)
from ds_finetune.plan.estimate.operations import RowShape
from ds_finetune.plan.estimate.step_time import LeastSeconds, TimeEstimate, estimate_time, least_seconds
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.search.candidates import STAGES, Candidate, Candidates
from ds_finetune.plan.search.fitting import Budget
from ds_finetune.plan.search.layout import OFFLOADS, Activations, Layout, Offload, Sizes


@dataclass(frozen=True, order=True)
class LayoutGroup:
    """Layouts that differ only in micro-batch, activations and chunks of pipeline stages."""

    least_seconds: float
    """Seconds of a step of each of them, at least."""
    sizes: Sizes
    zero_stage: int
    offload: Offload

    def layout(self, rows: int, activations: Activations, vpp: int) -> Layout:
        """One of them."""
        return Layout(self.sizes, self.zero_stage, self.offload, rows, activations, vpp)


class StepDivision(NamedTuple):
    """How a step is divided: into forwards of some rows, and each stage of a pipeline into chunks."""

    least_seconds: float
    """Seconds of a step, at least."""
    rows: int
    vpp: int

    @property
    def choice(self) -> tuple[int, int]:
        """It without the bound."""
        return self.rows, self.vpp


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
    _estimates: dict[Layout, MemoryEstimate] = field(init=False, default_factory=dict)
    _fitting: dict[Layout, bool] = field(init=False, default_factory=dict)
    _bounds_of: dict[Layout, LeastSeconds] = field(init=False, default_factory=dict)

    def run(self, listed: int = LISTED) -> SearchResult:
        """The best layouts of all groups; none where none fits."""
        queue = list(self._groups())
        number = len(queue)
        heapq.heapify(queue)
        found: list[Proposal] = []
        too_large: list[_TooLarge] = []
        while queue and queue[0].least_seconds < (limit := found[-1].time.seconds if len(found) == listed else inf):
            group = heapq.heappop(queue)
            if excess := self._least_excess(group):
                too_large.append(_TooLarge(excess, group))
            elif not (divisions := self._divisions(group, limit)):
                continue
            elif not self._has_fitting(group):
                too_large.append(_TooLarge(0, group))
            elif (best := self._best_of(group, divisions, limit)) is not None:
                insort(found, Proposal(best, self._memory(best), self._time(best)), key=lambda each: each.time.seconds)
                del found[listed:]
        misfits = self._faster(too_large, found[0].time.seconds, listed) if found else self._nearest(too_large)
        return SearchResult(tuple(found), tuple(misfits), self.budget, number)

    def has_fitting(self) -> bool:
        """Whether any layout fits."""
        legal = {sizes: set(self.candidates.zero_stages(sizes)) for sizes in self.candidates.sizes()}
        # What needs least comes first.
        for choice in product(reversed(STAGES), reversed(OFFLOADS)):
            groups = [LayoutGroup(0.0, sizes, *choice) for sizes, choices in legal.items() if choice in choices]
            if any(map(self._has_fitting, groups)):
                return True
        return False

    def _faster(self, too_large: Sequence[_TooLarge], seconds: float, listed: int) -> list[Misfit]:
        """Layouts that would take less than `seconds`, the fastest first, in the form that needs least memory."""
        found: list[tuple[float, LayoutGroup]] = []
        for group in sorted(each.group for each in too_large):
            limit = found[-1][0] if len(found) == listed else seconds
            if group.least_seconds >= limit:
                break
            if (fastest := self._fastest_of(group, limit)) < limit:
                insort(found, (fastest, group))
                del found[listed:]
        return [self._misfit(group, fastest) for fastest, group in found]

    def _nearest(self, too_large: Sequence[_TooLarge]) -> list[Misfit]:
        """The layout that lacks least; none where there is no layout."""
        found: _TooLarge | None = None
        for each in sorted(too_large):
            if found is not None and each.excess >= found.excess:
                break
            exact = _TooLarge(self._excess(self._smallest_of(each.group)), each.group)
            found = exact if found is None else min(found, exact)
        return [] if found is None else [self._misfit(found.group, self._fastest_of(found.group))]

    def _misfit(self, group: LayoutGroup, seconds: float) -> Misfit:
        smallest = self._smallest_of(group)
        return Misfit(smallest, self._memory(smallest), seconds)

    def _groups(self) -> Iterator[LayoutGroup]:
        """Every combination of parallel sizes, ZeRO stage and offload that is legal."""
        for sizes in self.candidates.sizes():
            for stage, offload in self.candidates.zero_stages(sizes):
                yield self._bounded(LayoutGroup(0.0, sizes, stage, offload))

    def _bounded(self, group: LayoutGroup) -> LayoutGroup:
        """The group with its bound, which has as short a bubble as the most forwards and chunks would give."""
        turns = self.candidates.rows_of_rank(group.sizes) * self.candidates.most_chunks(group.sizes)
        every = self._least_seconds(group)
        return replace(group, least_seconds=min(each.seconds(vpp=1, num_turns=turns) for each in every))

    def _least_seconds(self, group: LayoutGroup) -> list[LeastSeconds]:
        """Seconds of a step of which no micro-batch takes less than the least: those of the largest one with the
        fastest activations.
        """
        fewest = self.candidates.fewest_chunks(group.sizes)
        rows = self.candidates.micro_batch_sizes(group.sizes, fewest)
        # The heads of losses of documents compute more logits a second time where a forward has more tokens.
        if self.candidates.run.objective.row.head != "documents":
            rows = rows[-1:]
        fastest = self.candidates.activations[0]
        found = (self.candidates.find(group.layout(each, fastest, fewest)) for each in rows)
        return [self._least_of(candidate) for candidate in found if candidate is not None]

    def _least_excess(self, group: LayoutGroup) -> int:
        """Bytes beyond the budget that every layout of a group needs; 0 where some may fit. The largest micro-batch,
        with all rows of a rank in one forward, has the smallest states, because it adds up no gradients.
        """
        largest = self.candidates.largest(group.sizes, group.zero_stage, group.offload)
        assert largest is not None, group
        return self.budget.least_excess(least_bytes_of_stages(largest.plan, self.candidates.model))

    def _has_fitting(self, group: LayoutGroup) -> bool:
        """Whether a layout of a group fits."""
        return not self._least_excess(group) and any(
            self._fits(form) for vpp in self.candidates.chunks(group.sizes) for form in self._small_forms(group, vpp)
        )

    def _smallest_of(self, group: LayoutGroup) -> Candidate:
        """The layout of a group that needs least beyond the budget; of several the one with the fastest activations."""
        order = self.candidates.activations.index
        forms = (form for vpp in self.candidates.chunks(group.sizes) for form in self._small_forms(group, vpp))
        return min(forms, key=lambda form: (self._excess(form), order(form.layout.activations)))

    def _small_forms(self, group: LayoutGroup, vpp: int) -> Iterator[Candidate]:
        """Layouts of a group with these chunks of which one needs least."""
        # The slowest activations need least.
        for activations in reversed(self.candidates.activations):
            yield from self._smallest(group, vpp, activations)

    def _smallest(self, group: LayoutGroup, vpp: int, activations: Activations) -> Iterator[Candidate]:
        """Layouts with the smallest micro-batch, and with the largest one, which adds up no gradients."""
        rows = self.candidates.micro_batch_sizes(group.sizes, vpp)
        ends = (self.candidates.find(group.layout(each, activations, vpp)) for each in sorted({rows[0], rows[-1]}))
        return (candidate for candidate in ends if candidate is not None)

    def _best_of(self, group: LayoutGroup, divisions: Sequence[StepDivision], limit: float) -> Candidate | None:
        """The fastest layout of a group that fits and takes less than `limit` seconds, which has one of `divisions`;
        None where there is none.
        """
        found: Candidate | None = None
        fitting: dict[tuple[int, int], Activations] = {}
        for activations in self.candidates.activations:
            for division in self._with_activations(group, activations, divisions, limit):
                if division.least_seconds >= limit:
                    break
                faster = fitting.get(division.choice)
                if faster is not None and activations.is_slower_than(faster):
                    continue
                candidate = self._find(group, division, activations)
                if not self._fits(candidate):
                    continue
                fitting[division.choice] = activations
                if (seconds := self._time(candidate).seconds) < limit:
                    found, limit = candidate, seconds
        return found

    def _fastest_of(self, group: LayoutGroup, limit: float = inf) -> float:
        """Seconds of the fastest layout of a group, whatever memory it takes; `limit` where none takes less."""
        seconds, fastest = limit, self.candidates.activations[0]
        for division in self._divisions(group, limit):
            if division.least_seconds >= seconds:
                break
            seconds = min(seconds, self._time(self._find(group, division, fastest)).seconds)
        return seconds

    def _divisions(self, group: LayoutGroup, limit: float) -> list[StepDivision]:
        """Legal divisions of a group's step that may take less than `limit` seconds, with their bounds for the fastest
        activations, the lowest first.
        """
        sizes, fastest, found = group.sizes, self.candidates.activations[0], []
        every = self._least_seconds(group)
        for rows in self.candidates.micro_batch_sizes(sizes, self.candidates.fewest_chunks(sizes)):
            forwards = self.candidates.rows_of_rank(sizes) // rows
            chunks = [
                vpp
                for vpp in self.candidates.chunks(sizes)
                if rows in self.candidates.micro_batch_sizes(sizes, vpp)
                and any(each.seconds(vpp=vpp, num_turns=vpp * forwards) < limit for each in every)
            ]
            found += self._bounds(group, rows, fastest, chunks)
        return sorted(division for division in found if division.least_seconds < limit)

    def _with_activations(
        self, group: LayoutGroup, activations: Activations, fastest: Sequence[StepDivision], limit: float
    ) -> list[StepDivision]:
        """The divisions of `fastest` that may take less than `limit` seconds, with bounds for these activations,
        the lowest first.
        """
        chunks: dict[int, list[int]] = {}
        for division in fastest:
            if division.least_seconds < limit:
                chunks.setdefault(division.rows, []).append(division.vpp)
        return sorted(chain.from_iterable(self._bounds(group, rows, activations, chunks[rows]) for rows in chunks))

    def _bounds(
        self, group: LayoutGroup, rows: int, activations: Activations, chunks: Sequence[int]
    ) -> list[StepDivision]:
        """The division into forwards of `rows` rows with several numbers of chunks; none where it is refused."""
        fewest = self.candidates.fewest_chunks(group.sizes)
        candidate = self.candidates.find(group.layout(rows, activations, fewest)) if chunks else None
        if candidate is None:
            return []
        forwards = candidate.plan.batch.gradient_accumulation_steps
        least = self._least_of(candidate)
        return [StepDivision(least.seconds(vpp=vpp, num_turns=vpp * forwards), rows, vpp) for vpp in chunks]

    def _find(self, group: LayoutGroup, division: StepDivision, activations: Activations) -> Candidate:
        found = self.candidates.find(group.layout(division.rows, activations, division.vpp))
        assert found is not None, (group, division)
        return found

    def _memory(self, candidate: Candidate) -> MemoryEstimate:
        if candidate.layout not in self._estimates:
            self._estimates[candidate.layout] = estimate_memory(candidate.plan, self.candidates.model)
        return self._estimates[candidate.layout]

    def _excess(self, candidate: Candidate) -> int:
        return self.budget.excess(self._memory(candidate))

    def _fits(self, candidate: Candidate) -> bool:
        """Whether it exceeds nothing; where it does, that takes a part of the time of `_excess`."""
        if candidate.layout not in self._fitting:
            self._fitting[candidate.layout] = self._is_fitting(candidate.plan)
        return self._fitting[candidate.layout]

    def _is_fitting(self, plan: Plan) -> bool:
        stages = []
        for stage in estimate_stages(plan, self.candidates.model):
            if self.budget.device_excess(stage) > 0:
                return False
            stages.append(stage)
        return not self.budget.excess(fullest_stage(stages))

    def _time(self, candidate: Candidate) -> TimeEstimate:
        return estimate_time(candidate.plan, self.candidates.model, machine=self.machine, rows=self.rows)

    def _least_of(self, candidate: Candidate) -> LeastSeconds:
        """Seconds of a step at least, however the layers are divided over the stages of a pipeline."""
        if candidate.layout not in self._bounds_of:
            run = candidate.plan, self.candidates.model
            self._bounds_of[candidate.layout] = least_seconds(*run, machine=self.machine, rows=self.rows)
        return self._bounds_of[candidate.layout]
