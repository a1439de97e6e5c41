"""Plans a run for GPUs that this machine does not have: layout and tensors of each rank, from config.json only."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ds_finetune.config.units import GIB
from ds_finetune.data.row_kind import RowKind
from ds_finetune.features.table import features_of
from ds_finetune.model.attention.kernels import problem_of_flash_3
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.estimate.memory import MemoryEstimate
from ds_finetune.plan.estimate.zero_rows import MemoryRow
from ds_finetune.plan.layer_stages import TensorKind
from ds_finetune.plan.mesh import AXES, Mesh
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.resolve import ResolvedRun

_SHOWN_NODES = 4


@dataclass(frozen=True)
class PlannedRun:
    """A run planned for GPUs that need not exist here; `rich.print` shows it as `ds-finetune plan` does."""

    plan: Plan = field(repr=False)
    """Decisions: mesh, ZeRO stage, offload, DeepSpeed configuration (`plan.deepspeed_config`)."""
    tensors: tuple[tuple[TensorKind, ...], ...] = field(repr=False)
    """For each pipeline stage, the tensors that one of its ranks holds."""
    states: MemoryEstimate
    """Estimated memory, without activations, of the rank that needs most."""
    lines: tuple[tuple[str, str], ...]
    """Plan lines: name and text of each decision."""
    notes: tuple[str, ...] = ()
    """Notes on what a user might not expect of the run."""

    @property
    def state_bytes(self) -> Mapping[str, int]:
        """Bytes by kind during training on the rank that needs most memory: weights, gradients, optimizer states,
        buffers and communicators. Activations are left out.
        """
        return {row.name: row.num_bytes for row in _state_rows(self.states)}

    def __rich__(self) -> RenderableType:
        table = Table(title="plan", title_justify="left", show_header=False, box=None)
        for name, text in self.lines:
            table.add_row(name, text)
        counts: Counter[TensorKind] = Counter()
        for kind in chain.from_iterable(self.tensors):
            counts[replace(kind, count=0)] += kind.count
        return Group(
            table,
            *map(Text, self.notes),
            _rank_map(self.plan.mesh, self.plan.world.local_world_size),
            _shapes([replace(kind, count=count) for kind, count in counts.items()], self.plan),
            Text("DeepSpeed", style="bold"),
            Text(json.dumps(self.plan.deepspeed_config, indent=1)),
        )


def planned_run(run: ResolvedRun) -> PlannedRun:
    """Plan a run and its plan lines, without reading weights or data."""
    lines = (*run.plan.decisions, *model_lines(run.model, run.plan), *_totals(run))
    notes, kind = run.plan.notes, RowKind.of(run.plan.objective)
    if kind.name == "labelled" and not kind.num_labels and not kind.labels:
        notes += ("2 classes are assumed: their number is found in the training rows, which are not read here",)
    return PlannedRun(run.plan, tuple(stage.kinds for stage in run.needs.weights), run.states, lines, notes)


def _state_rows(states: MemoryEstimate) -> list[MemoryRow]:
    return [row for row in states.rows if row.place != "disk" and row.when != ("rollout",)]


def _totals(run: ResolvedRun) -> list[tuple[str, str]]:
    files, states = run.needs.files, run.states
    stage, on_rank = f" of stage {states.stage}" if run.plan.mesh.pp > 1 else "", run.needs.weights[states.stage].numel
    parts = [
        f"{row.name} {row.num_bytes / GIB:,.2f} GiB{'' if row.place == 'gpu' else f' ({row.place})'}"
        for row in _state_rows(states)
        if row.num_bytes
    ]
    total = run.model.described.tensors.numel / 1e9
    disk = f"{files.num_bytes / GIB:,.2f} GiB: {files.exports} export(s) and {files.checkpoints} checkpoints at most"
    return [
        ("parameters", f"{total:,.3f} B, {on_rank / 1e9:,.3f} B on a rank{stage}"),
        (f"state of a rank{stage}", ", ".join(parts)),
        ("disk", disk),
    ]


def _rank_map(mesh: Mesh, per_node: int) -> Table:
    nodes = mesh.world_size // per_node
    shown = [*range(min(_SHOWN_NODES, nodes)), *([nodes - 1] if nodes > _SHOWN_NODES else [])]
    axes = [axis for axis in AXES if getattr(mesh, axis) > 1] or ["dp"]
    table = Table(title="ranks", title_justify="left", caption_justify="left", box=None)
    for head in ("node", "ranks", *axes, *(["experts"] if mesh.ep > 1 else [])):
        table.add_column(head)
    for node in shown:
        ranks = range(node * per_node, (node + 1) * per_node)
        coordinates = [_range({mesh.coordinate(axis, rank) for rank in ranks}) for axis in axes]
        parts = [_range({replace(mesh, rank=rank).expert_index for rank in ranks})] if mesh.ep > 1 else []
        table.add_row(str(node), _range(set(ranks)), *coordinates, *parts)
    lines = [(axis, mesh.groups(axis)) for axis in axes] + ([("experts", mesh.expert_groups())] if mesh.ep > 1 else [])
    table.caption = "; ".join(f"a group along {axis} spans {_nodes(groups, per_node)}" for axis, groups in lines)
    return table


def _nodes(groups: list[list[int]], per_node: int) -> str:
    most_nodes = max(len({rank // per_node for rank in group}) for group in groups)
    return "one node" if most_nodes == 1 else f"{most_nodes} nodes"


def _range(values: set[int]) -> str:
    return str(min(values)) if len(values) == 1 else f"{min(values)}-{max(values)}"


def _shapes(kinds: Sequence[TensorKind], plan: Plan) -> Table:
    table = Table(title="tensors", title_justify="left", caption_justify="left", box=None)
    for head in ("name", "times", "full shape", "on a rank", "shared by"):
        table.add_column(head, overflow="fold")
    for kind in kinds:
        shapes = (" x ".join(map(str, shape)) for shape in (kind.full_shape, kind.local))
        table.add_row(kind.name, str(kind.count), *shapes, f"{kind.sharers} ranks")
    if plan.zero_stage == 3:
        table.caption = "under ZeRO-3 the ranks that share a tensor hold equal parts of it"
    return table


def model_lines(model: ModelPlan, plan: Plan, *, capability: tuple[int, int] | None = None) -> list[tuple[str, str]]:
    """Plan lines about the model: context, vocabulary, classes, stages, features.

    `capability` is the compute capability of this rank's GPU; None on CPUs and in a dry run.
    """
    flash_3 = None if capability is None else problem_of_flash_3(model.hf_config)
    context = model.context.lines() if model.context is not None else []
    return [
        *context,
        *_vocabulary_lines(model),
        *_score_lines(model),
        *(
            [("dropout", f"off for {model.objective.name}: {', '.join(model.without_noise)}")]
            * bool(model.without_noise)
        ),
        *plan.model_lines(model.described, model.stages, capability=capability, flash_3=flash_3),
        *(line for feature in features_of(model, plan) for line in feature.lines()),
    ]


def _score_lines(model: ModelPlan) -> list[tuple[str, str]]:
    if model.task == "causal_lm":
        return []
    names = model.hf_config.id2label.values()
    text = f"{len(names)}: {', '.join(names)}" if model.objective.name == "classification" else "1, the reward"
    return [("scores", text), *([("padding token", model.padding)] if model.padding else [])]


def _vocabulary_lines(model: ModelPlan) -> list[tuple[str, str]]:
    if not model.resizes_vocabulary:
        return []
    before, after = model.published_vocab_size, int(model.hf_config.vocab_size)
    grown = f"{before} -> {after} tokens; {after - before} new rows of embedding and head, initialised like others"
    fits = f"the tokenizer's ids fit the {before} tokens; model.resize_vocabulary adds nothing"
    return [("vocabulary", grown if after > before else fits)]
