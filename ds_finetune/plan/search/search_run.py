"""Searches layouts for a run; errors say what is missing and what would provide it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ds_finetune.config.sections import LoraConfig, ParallelConfig
from ds_finetune.config.units import GIB
from ds_finetune.errors import ConfigError, FinetuneError
from ds_finetune.families.table import family_of
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.plan.estimate.traced import Tracer
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.search.candidates import Candidates, Ranks, check_run
from ds_finetune.plan.search.fitting import SPARE
from ds_finetune.plan.search.forecast import UNCONFIRMED, memory_tree
from ds_finetune.plan.search.layout import OFFLOADS, Layout
from ds_finetune.plan.search.machines import GPUS_PER_NODE, Target
from ds_finetune.plan.search.search import MOST_TRIED, Proposal, Search, SearchResult
from ds_finetune.plan.settings import RunSettings

MOST_GPUS = 4096
ORDER = (
    "Order: nothing in host memory first, then fewer parallel axes, lower ZeRO stages and smaller axes; of each the "
    "least recomputation and the largest micro-batch that fit. No speed is predicted: measure the first ones."
)
_SHORTEST_ROW = 512


def search_layouts(given: RunSettings, target: Target, model: DescribedModel, traces: Tracer) -> SearchResult:
    """The first layouts of a run that fit the machines of `target`.

    ConfigError where no layout is legal or none fits, with what is missing and what would provide it.
    """
    if target.budget is None or not target.is_named:
        reason = "this machine has none" if target.budget is not None else "their memory is not known"
        raise ConfigError(
            f"--search for {target.ranks.number} GPU{'s' * (target.ranks.number > 1)}, and {reason}",
            hint="name the GPU, as --gpu h100-80g, give --gpu-memory 40GiB, or --gpu cpu for this machine's CPU ranks",
        )
    # An undecided micro-batch counts as one row; the search chooses it.
    run = replace(given, train=given.train.model_copy(update={"micro_batch_size": rows_of_forward(given.train)}))
    check_run(run, model)
    search = Search(Candidates(run, model, target.ranks), target.budget, traces)
    result = search.run()
    if result.proposals:
        return result
    raise _no_legal_layout(search) if result.nearest is None else _none_fits(search, target, result, result.nearest)


def _no_legal_layout(search: Search) -> FinetuneError:
    """Error where no layout is legal: the run file is refused in every layout, or no layout divides the ranks."""
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
        f"no layout of {run.model.path} uses {number} ranks: its {tree.get('num_attention_heads')} heads and "
        f"{tree.get('num_hidden_layers')} layers, and train.global_batch_size {batch}, cannot be divided so",
        hint=f"use {usable} ranks, or set train.global_batch_size to a multiple of {number}",
    )


def _none_fits(search: Search, target: Target, result: SearchResult, nearest: Proposal) -> ConfigError:
    """Error with the excess of the nearest layout, and changes that would make room for the states of one."""
    run, budget = search.candidates.run, search.budget
    missing = budget.excess(nearest.memory) / GIB
    changes = "; ".join(_remedies(search, target, has_states=result.num_tried > 0))
    hint = f"the states of a layout fit with one of: {changes}" if changes else "take GPUs or hosts with more memory"
    tried = f" (the search ended after {MOST_TRIED} layouts whose states fit)" if result.is_cut_off else ""
    return ConfigError(
        f"no layout of {run.model.path} fits {target.name}{tried}: {layout_text(nearest)} comes nearest and "
        f"{budget.problem(nearest.memory)} ({SPARE:.0%} stay free), so {missing:,.1f} GiB of a rank are missing",
        hint=hint,
    )


def _remedies(search: Search, target: Target, *, has_states: bool) -> Iterator[str]:
    """Single changes of a run or its machines with which the states of a layout fit; `has_states` is whether they fit
    without a change.
    """
    run, ranks = search.candidates.run, target.ranks
    family = family_of(str(search.candidates.model["model_type"]))
    others = []
    if run.lora is None and family.has_lora and not run.mtp.train and not run.indexer.train:
        others.append(("lora: {rank: 16}", replace(run, lora=LoraConfig(), router=None)))
    if run.lora is not None and run.lora.quantize is None:
        others.append(("lora.quantize: nf4", replace(run, lora=run.lora.model_copy(update={"quantize": "nf4"}))))
    yield from (text for text, other in others if _have_room(search, other, ranks))
    if has_states and run.train.max_seq_len // 2 >= _SHORTEST_ROW:
        yield f"train.max_seq_len: {run.train.max_seq_len // 2}"
    per_node = max(ranks.per_node, GPUS_PER_NODE)
    numbers = [] if ranks.device == "cpu" else [ranks.number * 2**n for n in range(1, MOST_GPUS.bit_length())]
    for number in (number for number in numbers if number <= MOST_GPUS):
        if _have_room(search, run, replace(ranks, number=number, per_node=min(number, per_node))):
            yield f"{number} GPUs"
            return


def _have_room(search: Search, run: RunSettings, ranks: Ranks) -> bool:
    return replace(search, candidates=replace(search.candidates, run=run, ranks=ranks)).has_fitting_states()


def layout_text(proposal: Proposal) -> str:
    """Text of a layout, such as `dp 8 x ep 8, ZeRO-3, micro-batch 2, activations recomputed`."""
    layout, offload = proposal.layout, OFFLOADS[proposal.layout.offload][1]
    text = f"{proposal.plan.mesh}, ZeRO-{layout.zero_stage}{offload}, micro-batch {layout.micro_batch_size}"
    return f"{text}, activations {layout.activations}"


def layout_header(best: Proposal, target: Target) -> list[str]:
    """Header lines for a run file with the first layout."""
    return [
        f"Layout for {target.name}, {target.ranks.per_node} in a node, by ds-finetune plan --search:",
        f"{layout_text(best)};",
        f"{best.memory.device_bytes / GIB:,.1f} GiB on the device are estimated.",
    ]


def result_tree(result: SearchResult, target: Target) -> dict[str, Any]:
    """A result as JSON values."""
    assert target.budget is not None
    return {
        "gpus": target.ranks.number,
        "gpus_per_node": target.ranks.per_node,
        "device_bytes": target.budget.device_bytes,
        "layouts": [
            {
                "text": layout_text(proposal),
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
    """Notes on the order of the layouts, the number compared, and assumptions."""
    compared = (
        f"The states of {result.num_compared} layouts were compared with the memory by arithmetic, and all memory was "
        f"estimated of {result.num_tried} of them ({MOST_TRIED} at most)"
    )
    cut = "; the search ended before the last layout, and later ones may fit too" if result.is_cut_off else ""
    unconfirmed = () if target.ranks.device == "cpu" else (UNCONFIRMED,)
    return [ORDER, f"{compared}{cut}.", *unconfirmed, *target.notes]
