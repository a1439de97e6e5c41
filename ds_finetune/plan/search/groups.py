"""Layouts that share parallel sizes, ZeRO stage and offload: the fastest, the smallest, and what all need at least."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import NamedTuple

from ds_finetune.plan.estimate.step_time import LeastSeconds
from ds_finetune.plan.search.candidates import Candidate, Candidates
from ds_finetune.plan.search.estimates import Estimates
from ds_finetune.plan.search.layout import Activations, Layout, Offload, Sizes


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


class StepDivision(NamedTuple):
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
        """The group with a bound of its own, which has as short a bubble as the most forwards and chunks would give."""
        turns = self.candidates.rows_of_rank(group.sizes) * self.candidates.most_chunks(group.sizes)
        every = self._least_seconds(group)
        return replace(
            group, is_shared=False, least_seconds=min(each.seconds(vpp=1, num_turns=turns) for each in every)
        )

    def _least_seconds(self, group: LayoutGroup) -> list[LeastSeconds]:
        """Seconds of a step of which no micro-batch takes less than the least: those of the largest one with the
        fastest activations.
        """
        fewest = self.candidates.fewest_chunks(group.sizes)
        rows = self.candidates.micro_batch_sizes(group.sizes, fewest)
        # The heads of losses of documents compute more logits a second time where a forward has more tokens.
        if self.candidates.config.objective.row.head != "documents":
            rows = rows[-1:]
        fastest = self.candidates.activations[0]
        found = (self.candidates.find(group.layout(each, fastest, fewest)) for each in rows)
        return [self.estimates.least_seconds(candidate) for candidate in found if candidate is not None]

    def least_excess(self, group: LayoutGroup) -> int:
        """Bytes beyond the budget that every layout of a group needs; 0 where some may fit. The largest micro-batch
        has the smallest states, because it adds up no gradients.
        """
        return self.estimates.least_excess(self._largest(group))

    def has_fitting(self, group: LayoutGroup) -> bool:
        """Whether a layout of a group fits."""
        return not self.least_excess(group) and any(
            self.estimates.fits(form)
            for vpp in self.candidates.chunks(group.sizes)
            for form in self._small_forms(group, vpp)
        )

    def smallest_of(self, group: LayoutGroup) -> Candidate:
        """The layout of a group that needs least beyond the budget; of several the one with the fastest activations."""
        order = self.candidates.activations.index
        forms = (form for vpp in self.candidates.chunks(group.sizes) for form in self._small_forms(group, vpp))
        return min(forms, key=lambda form: (self.estimates.excess(form), order(form.layout.activations)))

    def _small_forms(self, group: LayoutGroup, vpp: int) -> Iterator[Candidate]:
        """Layouts of a group with these chunks of which one needs least."""
        # The slowest activations need least.
        for activations in reversed(self.candidates.activations):
            yield from self._smallest(group, vpp, activations)

    def _smallest(self, group: LayoutGroup, vpp: int, activations: Activations) -> Iterator[Candidate]:
        """The same for these activations: the smallest micro-batch, and the largest one, which adds up no gradients."""
        rows = self.candidates.micro_batch_sizes(group.sizes, vpp)
        ends = (self.candidates.find(group.layout(each, activations, vpp)) for each in sorted({rows[0], rows[-1]}))
        return (candidate for candidate in ends if candidate is not None)

    def best_of(self, group: LayoutGroup, divisions: Sequence[StepDivision], limit: float) -> Candidate | None:
        """The fastest layout of a group that fits and takes less than `limit` seconds, which has one of `divisions`;
        None where there is none.
        """
        found: Candidate | None = None
        fitting: dict[tuple[int, int], Activations] = {}
        for activations in self.candidates.activations:
            smallest_fits: dict[int, bool] = {}
            for division in self._with_activations(group, activations, divisions, limit):
                if division.least_seconds >= limit:
                    break
                vpp, faster = division.vpp, fitting.get(division.choice)
                if faster is not None and activations.is_slower_than(faster):
                    continue
                if vpp not in smallest_fits:
                    smallest_fits[vpp] = any(map(self.estimates.fits, self._smallest(group, vpp, activations)))
                candidate = self._find(group, division, activations)
                if not smallest_fits[vpp] or not self.estimates.fits(candidate):
                    continue
                fitting[division.choice] = activations
                if (seconds := self.estimates.seconds(candidate)) < limit:
                    found, limit = candidate, seconds
        return found

    def fastest_of(self, group: LayoutGroup, limit: float = inf) -> float:
        """Seconds of the fastest layout of a group, whatever memory it takes; `limit` where none takes less."""
        seconds, fastest = limit, self.candidates.activations[0]
        for division in self.divisions(group, limit):
            if division.least_seconds >= seconds:
                break
            seconds = min(seconds, self.estimates.seconds(self._find(group, division, fastest)))
        return seconds

    def divisions(self, group: LayoutGroup, limit: float) -> list[StepDivision]:
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
        """Those of the divisions `fastest` that may take less than `limit` seconds, with bounds for these activations,
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
        least = self.estimates.least_seconds(candidate)
        return [StepDivision(least.seconds(vpp=vpp, num_turns=vpp * forwards), rows, vpp) for vpp in chunks]

    def _find(self, group: LayoutGroup, division: StepDivision, activations: Activations) -> Candidate:
        found = self.candidates.find(group.layout(division.rows, activations, division.vpp))
        assert found is not None, (group, division)
        return found

    def _largest(self, group: LayoutGroup) -> Candidate:
        """The layout with all rows of a rank in one forward."""
        found = self.candidates.largest(group.sizes, group.zero_stage, group.offload)
        assert found is not None, group
        return found
