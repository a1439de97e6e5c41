"""Layouts that share parallel sizes, ZeRO stage and offload: the fastest, the smallest, and what all need at least."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import NamedTuple

from ds_finetune.plan.objectives import DOCUMENT_LOSSES
from ds_finetune.search.candidates import Candidate, Candidates
from ds_finetune.search.estimates import Estimates
from ds_finetune.search.layout import Activations, Layout, Offload, Sizes


@dataclass(frozen=True, order=True)
class LayoutGroup:
    """Layouts that differ in micro-batch, activations and chunks of pipeline stages alone."""

    least_seconds: float
    """Of a step of each of them."""
    is_shared: bool
    """Whether that is known of the group without offload alone, which takes no more time."""
    sizes: Sizes
    zero_stage: int
    offload: Offload

    def layout(self, rows: int, activations: Activations, vpp: int) -> Layout:
        """One of them."""
        return Layout(self.sizes, self.zero_stage, self.offload, rows, activations, vpp)


class _StepDivision(NamedTuple):
    """How a step is divided: into forwards of some rows, and each stage of a pipeline into chunks."""

    least_seconds: float
    """Of a step."""
    rows: int
    vpp: int

    @property
    def choice(self) -> tuple[int, int]:
        """It without the bound."""
        return self.rows, self.vpp


@dataclass(frozen=True)
class GroupSearch:
    """The search within groups."""

    candidates: Candidates
    estimates: Estimates

    def groups(self) -> Iterator[LayoutGroup]:
        """Every combination of parallel sizes, ZeRO stage and offload that is legal."""
        for sizes in self.candidates.sizes():
            bounds: dict[int, float] = {}
            for stage, offload in self.candidates.zero_stages(sizes):
                group = LayoutGroup(bounds.get(stage, 0.0), stage in bounds, sizes, stage, offload)
                group = group if group.is_shared else self.bounded(group)
                bounds[stage] = group.least_seconds
                yield group

    def bounded(self, group: LayoutGroup) -> LayoutGroup:
        """The group with a bound of its own: the seconds of its largest micro-batch, with as short a bubble as the most
        forwards and chunks would give.
        """
        largest = [self._largest(group)]
        if self.candidates.config.objective.name in DOCUMENT_LOSSES:
            # Their heads compute more logits a second time where a forward has more tokens.
            vpp = largest[0].layout.vpp
            rows = self.candidates.micro_batch_sizes(group.sizes, vpp)
            found = (self.candidates.find(group.layout(each, self.candidates.activations[0], vpp)) for each in rows)
            largest = [candidate for candidate in found if candidate is not None]
        turns = self.candidates.rows_of_rank(group.sizes) * self.candidates.most_chunks(group.sizes)
        least = min(self.estimates.least_seconds(each).seconds(vpp=1, num_turns=turns) for each in largest)
        return replace(group, is_shared=False, least_seconds=least)

    def least_excess(self, group: LayoutGroup) -> int:
        """Bytes beyond the budget that every layout of a group needs; 0 where some may fit. The largest micro-batch
        has the smallest states, because it adds up no gradients.
        """
        return self.estimates.least_excess(self._largest(group))

    def has_fitting(self, group: LayoutGroup) -> bool:
        """Whether a layout of a group fits."""
        return not self.least_excess(group) and any(map(self.estimates.fits, self._small_forms(group)))

    def smallest_of(self, group: LayoutGroup) -> Candidate:
        """The layout of a group that needs least beyond the budget."""
        return min(self._small_forms(group), key=self.estimates.excess)

    def _small_forms(self, group: LayoutGroup) -> Iterator[Candidate]:
        """Layouts of a group of which one needs least."""
        fastest = self.candidates.activations[0]
        for vpp in self.candidates.chunks(group.sizes):
            rows = self.candidates.micro_batch_sizes(group.sizes, vpp)
            ends = [self.candidates.find(group.layout(number, fastest, vpp)) for number in sorted({rows[0], rows[-1]})]
            legal = [each for each in ends if each is not None]
            if len(legal) > 1 and self.estimates.states(legal[0]) == self.estimates.states(legal[1]):
                legal = legal[:1]
            for end, activations in product(legal, self.candidates.activations):
                form = self.candidates.find(group.layout(end.layout.micro_batch_size, activations, vpp))
                assert form is not None, end.layout
                yield form

    def best_of(self, group: LayoutGroup, limit: float) -> Candidate | None:
        """The fastest layout of a group that fits and takes less than `limit` seconds; None where there is none."""
        found: Candidate | None = None
        fitting: dict[tuple[int, int], Activations] = {}
        for activations in self.candidates.activations:
            for division in self._divisions(group, activations, limit):
                if division.least_seconds >= limit:
                    break
                faster, candidate = fitting.get(division.choice), self._find(group, division, activations)
                if (faster is not None and activations.is_slower_than(faster)) or not self.estimates.fits(candidate):
                    continue
                fitting[division.choice] = activations
                if (seconds := self.estimates.seconds(candidate)) < limit:
                    found, limit = candidate, seconds
        return found

    def fastest_of(self, group: LayoutGroup) -> float:
        """Seconds of the fastest layout of a group, whatever memory it takes."""
        seconds, fastest = inf, self.candidates.activations[0]
        for division in self._divisions(group, fastest, inf):
            if division.least_seconds >= seconds:
                break
            seconds = min(seconds, self.estimates.seconds(self._find(group, division, fastest)))
        return seconds

    def _divisions(self, group: LayoutGroup, activations: Activations, limit: float) -> list[_StepDivision]:
        """Legal divisions of a group's step, the one with the lowest bound first; none that takes `limit` seconds or
        more even with the fastest activations.
        """
        sizes, found = group.sizes, []
        fewest, chunks = self.candidates.fewest_chunks(sizes), self.candidates.chunks(sizes)
        for rows in self.candidates.micro_batch_sizes(sizes, fewest):
            fastest = self.candidates.find(group.layout(rows, self.candidates.activations[0], fewest))
            candidate = self.candidates.find(group.layout(rows, activations, fewest))
            if fastest is not None and candidate is not None:
                legal = [vpp for vpp in chunks if rows in self.candidates.micro_batch_sizes(sizes, vpp)]
                may_be_better = [each.vpp for each in self._bounds(fastest, legal) if each.least_seconds < limit]
                found += self._bounds(candidate, may_be_better)
        return sorted(found)

    def _bounds(self, candidate: Candidate, chunks: Sequence[int]) -> list[_StepDivision]:
        """The division of a candidate with several numbers of chunks."""
        if not chunks:
            return []
        rows, forwards = candidate.layout.micro_batch_size, candidate.plan.batch.gradient_accumulation_steps
        least = self.estimates.least_seconds(candidate)
        return [_StepDivision(least.seconds(vpp=vpp, num_turns=vpp * forwards), rows, vpp) for vpp in chunks]

    def _find(self, group: LayoutGroup, division: _StepDivision, activations: Activations) -> Candidate:
        found = self.candidates.find(group.layout(division.rows, activations, division.vpp))
        assert found is not None, (group, division)
        return found

    def _largest(self, group: LayoutGroup) -> Candidate:
        """The layout with all rows of a rank in one forward."""
        found = self.candidates.largest(group.sizes, group.zero_stage, group.offload)
        assert found is not None, group
        return found
