"""Lists the first layouts of a run that fit given machines, in an order of simplicity. No speed is predicted.

Layouts are ordered by
1. what is in host memory: first nothing, then inputs of recomputed layers, then optimizer states, then also weights;
2. the number of communicating axes besides data parallelism, smaller first;
3. the ZeRO stage, lower first;
4. the product of the axes, smaller first; of equal products the larger ep comes first, then tp, sp and pp.

Of layouts that are equal in all four, the search lists one. It has the least recomputation at which any micro-batch
fits, and the largest micro-batch that then fits. A layout is left out if another one with the
same parallel sizes and ZeRO stage fits with less in host memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.config.units import GIB
from ds_finetune.errors import ConfigError, FinetuneError
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.plan.estimate.memory import MemoryEstimate, RunMemory
from ds_finetune.plan.estimate.traced import Tracer, by_rows, without_activations
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search.candidates import (
    OFFLOADS,
    STAGES,
    Activations,
    Candidate,
    Candidates,
    Layout,
    check_run,
    layout_overrides,
)
from ds_finetune.plan.search.fitting import SPARE, Budget, largest_micro_batch
from ds_finetune.plan.search.forecast import UNCONFIRMED, memory_tree
from ds_finetune.plan.search.machines import Target
from ds_finetune.plan.settings import RunSettings

LISTED = 5
"""Maximum number of layouts that a search lists."""
MOST_TRIED = 100
"""Maximum number of layouts, not counting micro-batch and recomputation, whose memory is estimated in full."""
ORDER = (
    "Order: nothing in host memory first, then fewer parallel axes, lower ZeRO stages and smaller axes; of each the "
    "least recomputation and the largest micro-batch that fit. No speed is predicted: measure the first ones."
)


class Proposal(NamedTuple):
    """A legal layout, the plan of the run in that layout, and the memory that a rank needs for it."""

    layout: Layout
    plan: Plan
    memory: MemoryEstimate


@dataclass(frozen=True)
class SearchResult:
    """Result of a search. Layouts that differ only in micro-batch or recomputation are counted as one layout."""

    proposals: tuple[Proposal, ...]
    """The first layouts that fit, in the order of the search."""
    nearest: Proposal | None
    """The best of the layouts that were estimated in full and do not fit: it exceeds the memory least. None if there is
    no such layout.
    """
    num_compared: int
    """Number of layouts whose states (weights, gradients, optimizer states) were compared with the available memory."""
    num_tried: int
    """Number of layouts whose memory was estimated in full, because their states fit."""
    is_cut_off: bool = False
    """Whether the search stopped after `MOST_TRIED` layouts although more layouts were left."""


@dataclass(frozen=True)
class Search:
    """Search for layouts with which one run fits the memory `budget` of each rank."""

    candidates: Candidates
    budget: Budget
    traces: Tracer

    def run(self) -> SearchResult:
        """Run the search. The result has no proposals if no layout fits."""
        proposals, misfits = list[Proposal](), list[Proposal]()
        too_large: list[tuple[int, Candidate]] = []
        fitting: set[tuple[ParallelConfig, int]] = set()
        states_only = without_activations(self.candidates.model)
        is_cut_off = False
        for first in self._groups():
            if is_cut_off := len(proposals) < LISTED and len(proposals) + len(misfits) == MOST_TRIED:
                break
            if len(proposals) == LISTED:
                break
            if first.layout[:2] in fitting:
                continue
            states = self._proposal(Candidate(first.layout, first.plan.with_recomputation("full")), states_only)
            if excess := self.budget.excess(states.memory):
                too_large.append((excess, first))
            elif self.budget.excess((best := self._best(first.layout)).memory):
                misfits.append(best)
            else:
                proposals.append(best)
                fitting.add(first.layout[:2])
        num_tried = len(proposals) + len(misfits)
        if not proposals and too_large:
            misfits.append(self._best(min(too_large, key=lambda each: each[0])[1].layout))
        nearest = min(misfits, key=lambda each: self.budget.excess(each.memory), default=None)
        return SearchResult(tuple(proposals), nearest, num_tried + len(too_large), num_tried, is_cut_off)

    def _groups(self) -> Iterator[Candidate]:
        """Yield a layout for each legal combination of parallel sizes, ZeRO stage and offload, in search order. The
        layout has all rows of a rank in one forward, so that no gradients are accumulated and its states are the
        smallest, and the least recomputation.
        """
        by_size = sorted(self.candidates.sizes, key=_order_of_sizes)
        axes = sorted({len(sizes.axes) for sizes in by_size})
        for offload, offloads_inputs, num_axes, stage in product(OFFLOADS, (False, True), axes, STAGES):
            sizes = [each for each in by_size if len(each.axes) == num_axes]
            for activations, each in product(self._settings_of_activations(offloads_inputs)[:1], sizes):
                rows = self.candidates.micro_batch_sizes(each)[-1]
                if candidate := self.candidates.find(Layout(each, stage, offload, rows, activations)):
                    yield candidate

    def _settings_of_activations(self, offloads_inputs: bool) -> list[Activations]:
        return [each for each in self.candidates.activations if each.activation_offload == offloads_inputs]

    def _best(self, first: Layout) -> Proposal:
        """Change `first` to the least recomputation at which a micro-batch fits, and to the largest micro-batch that
        then fits. If none fits, take the smallest micro-batch and the recomputation that exceeds the memory least.
        """
        misfits = []
        for activations in self._settings_of_activations(first.activations.activation_offload):
            layout = first._replace(activations=activations)
            # The largest micro-batch is found by memory that is extrapolated from traces of one and two rows. Only the
            # layouts that are listed are traced at their own micro-batch.
            extended = by_rows(self.traces)
            smallest = next(self._with_rows(layout, 0))
            smallest_run = RunMemory(smallest.plan, self.candidates.model, extended)
            rows = largest_micro_batch(smallest_run, budget=self.budget.device_bytes)
            for candidate in self._with_rows(layout, rows) if rows else ():
                if self.budget.excess(self._proposal(candidate, extended).memory):
                    continue
                if not self.budget.excess((proposal := self._proposal(candidate, self.traces)).memory):
                    return proposal
            misfits.append(self._proposal(smallest, extended))
        return min(misfits, key=lambda each: self.budget.excess(each.memory))

    def _with_rows(self, layout: Layout, rows: int) -> Iterator[Candidate]:
        """Candidates: `layout` with each legal micro-batch size up to `rows`, largest first. If all legal sizes are
        larger, `layout` with each of them, smallest first.
        """
        sizes = self.candidates.micro_batch_sizes(layout.parallel)
        lower = [size for size in reversed(sizes) if size <= rows]
        return filter(None, (self.candidates.find(layout._replace(micro_batch_size=n)) for n in lower or sizes))

    def _proposal(self, candidate: Candidate, traces: Tracer) -> Proposal:
        run = RunMemory(candidate.plan, self.candidates.model, traces, budget=self.budget.device_bytes)
        return Proposal(*candidate, run.estimate())


def _order_of_sizes(sizes: ParallelConfig) -> tuple[int, ...]:
    axes = sizes.ep, sizes.tp, sizes.sp, sizes.pp
    return prod(axes), *(-size for size in axes)


def search_layouts(given: RunSettings, target: Target, model: DescribedModel, traces: Tracer) -> SearchResult:
    """The first layouts of a run that fit the machines of `target`.

    ConfigError where no layout is legal or none fits, with what is missing and what would provide it.
    """
    if target.budget is None or not target.is_named:
        reason = "this machine has no GPU" if target.budget is not None else "the memory of a GPU is not known"
        raise ConfigError(
            f"--search for {target.ranks.number} GPU{'s' * (target.ranks.number > 1)} is impossible: {reason}",
            hint="name the GPU, as --gpu h100-80g, give --gpu-memory 40GiB, or --gpu cpu for this machine's CPU ranks",
        )
    # The search chooses the micro-batch size. Until then, `auto` counts as one row.
    run = replace(given, train=given.train.model_copy(update={"micro_batch_size": rows_of_forward(given.train)}))
    check_run(run, model)
    search = Search(Candidates(run, model, target.ranks), target.budget, traces)
    result = search.run()
    if result.proposals:
        return result
    raise _no_legal_layout(search) if result.nearest is None else _none_fits(search, target, result, result.nearest)


def _no_legal_layout(search: Search) -> FinetuneError:
    candidates = search.candidates
    run, number = candidates.run, candidates.ranks.number
    on_one_rank = replace(candidates, ranks=replace(candidates.ranks, number=1))
    pp_layers = run.parallel.pp_layers if (run.parallel.pp, run.parallel.vpp) == (1, 1) else ()
    refusal: FinetuneError | None = on_one_rank.refusal(ParallelConfig(pp_layers=pp_layers))
    if refusal is None and candidates.sizes:
        layout = Layout(candidates.sizes[0], 1, "none", 1, candidates.activations[0])
        try:
            make_plan(layout.apply(run), world=candidates.ranks.world, device=candidates.ranks.device)
        except ConfigError as refused:
            refusal = refused
    if refusal is not None:
        return refusal
    numbers = (n for n in range(number, 0, -1) if n % min(n, candidates.ranks.per_node) == 0)
    usable = next(n for n in numbers if replace(candidates, ranks=replace(candidates.ranks, number=n)).sizes)
    batch, tree = run.train.global_batch_size, candidates.model
    return ConfigError(
        f"no layout of {run.model.path} uses {number} ranks, over which {tree.get('num_attention_heads')} heads, "
        f"{tree.get('num_hidden_layers')} layers and train.global_batch_size {batch} cannot be divided",
        hint=f"use {usable} ranks, or set train.global_batch_size to a multiple of {number}",
    )


def _none_fits(search: Search, target: Target, result: SearchResult, nearest: Proposal) -> ConfigError:
    missing = search.budget.excess(nearest.memory) / GIB
    adapters = "train adapters by `lora`, " if search.candidates.run.lora is None else ""
    tried = f" (the search ended after {MOST_TRIED} layouts whose states fit)" if result.is_cut_off else ""
    return ConfigError(
        f"no layout of {search.candidates.run.model.path} fits {target.name}{tried}: {layout_text(nearest)} comes "
        f"nearest and {search.budget.problem(nearest.memory)} ({SPARE:.0%} stay free), so a rank lacks "
        f"{missing:,.1f} GiB",
        hint=f"take more GPUs or hosts with more memory, {adapters}or set a smaller train.max_seq_len",
    )


def layout_text(proposal: Proposal) -> str:
    """Text of a layout, such as `dp 8 x ep 8, ZeRO-3, micro-batch 2, activations recomputed`."""
    layout, offload = proposal.layout, OFFLOADS[proposal.layout.offload][1]
    text = f"{proposal.plan.mesh}, ZeRO-{layout.zero_stage}{offload}, micro-batch {layout.micro_batch_size}"
    return f"{text}, activations {layout.activations}"


def result_tree(result: SearchResult, given: RunSettings, target: Target) -> dict[str, Any]:
    """The result of a search for the run `given` as JSON values."""
    assert target.budget is not None
    return {
        "gpus": target.ranks.number,
        "gpus_per_node": target.ranks.per_node,
        "device_bytes": target.budget.device_bytes,
        "layouts": [
            {
                "text": layout_text(proposal),
                "overrides": layout_overrides(proposal.layout, given),
                "parallel": proposal.plan.parallel.model_dump(mode="json"),
                "deepspeed": proposal.plan.deepspeed,
                "train": proposal.layout.train_keys,
                "memory": memory_tree(proposal.memory),
            }
            for proposal in result.proposals
        ],
        "notes": result_notes(result, target),
    }


def result_notes(result: SearchResult, target: Target) -> list[str]:
    """Notes on the order of layouts, the number of compared layouts, and assumptions."""
    compared = (
        f"The states of {result.num_compared} layouts were compared with the memory by arithmetic, and all memory was "
        f"estimated of {result.num_tried} of them ({MOST_TRIED} at most)"
    )
    cut = "; the search ended before the last layout, and later ones may fit too" if result.is_cut_off else ""
    unconfirmed = () if target.ranks.device == "cpu" else (UNCONFIRMED,)
    return [ORDER, f"{compared}{cut}.", *unconfirmed, *target.notes]
