"""The layout of a run on machines that are not here: who holds what, from config.json alone."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import family_of
from ds_finetune.model.build import build_skeleton, model_class
from ds_finetune.model.four_bit import nf4_bytes
from ds_finetune.model.lora_plan import LoraPlan
from ds_finetune.model.model_plan import ModelPlan
from ds_finetune.model.parallel.expert import build_local_experts
from ds_finetune.model.parallel.pipeline import PipelineGroup, build_only_layers, install_pipeline_stage
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import local_config
from ds_finetune.plan.deepspeed_config import MOMENTS
from ds_finetune.plan.mesh import AXES, Mesh
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.trainer.inputs import make_model_plan, model_lines, token_limits, try_generic_type
from ds_finetune.units import GIB
from ds_finetune.world import World

_SHOWN_NODES = 4
_MASTER_BYTES = 4
_STAGE_OF_PARTITIONED_WEIGHTS = 3
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_IN_LAYER = re.compile(r"\.layers\.N\.")


@dataclass(frozen=True)
class Held:
    """A kind of tensor: its name with `N` for the layer, how often it is there, its shape, its shape on a rank, and who
    shares that.
    """

    name: str
    count: int
    whole: tuple[int, ...]
    local: tuple[int, ...]
    sharers: int

    @property
    def numel(self) -> int:
        """Elements on a rank, of all layers, before ZeRO shards them."""
        return self.count * math.prod(self.local)

    @property
    def sharded(self) -> int:
        """Elements of a rank where ZeRO shards them."""
        return self.count * -(-math.prod(self.local) // self.sharers)


@dataclass(frozen=True)
class PlannedRun:
    """A run on GPUs that are not here; `rich.print` shows it as `ds-finetune plan` does."""

    plan: Plan = field(repr=False)
    """What was decided: mesh, ZeRO stage, offload, the DeepSpeed JSON (`plan.deepspeed`)."""
    held: tuple[tuple[Held, ...], ...] = field(repr=False)
    """The tensors of a rank, by pipeline stage."""
    state_bytes: Mapping[str, int]
    """Bytes a rank keeps for weights, gradients and optimizer, of the stage that holds most."""
    lines: tuple[tuple[str, str], ...]
    """Names and texts for a person."""
    notes: tuple[str, ...] = ()
    """What a user might not expect."""

    def __rich__(self) -> RenderableType:
        return Group(
            _decisions(self.lines),
            *map(Text, self.notes),
            _rank_map(self.plan.mesh, self.plan.world.local_world_size),
            _shapes(_merged(self.held), self.plan),
            Text("DeepSpeed", style="bold"),
            Text(json.dumps(self.plan.deepspeed, indent=1)),
        )


def plan_run(config: RunConfig, *, gpus: int, gpus_per_node: int = 8) -> PlannedRun:
    """The layout of `config` on `gpus` GPUs, without weights or data; ConfigError as a run would raise it."""
    if gpus < 1 or gpus_per_node < 1 or gpus % min(gpus, gpus_per_node):
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {gpus_per_node}", hint="give a multiple of --gpus-per-node"
        )
    world = World(0, gpus, 0, min(gpus, gpus_per_node), "a dry run")
    plan = make_plan(config, world=world, device="cuda")
    model = make_model_plan(config, plan.mesh, is_config_alone=True)
    token_limits(config, model.hf_config)
    tried = try_generic_type(config, model.hf_config)
    held = tuple(tuple(held_tensors(plan, model, place)) for place in range(plan.mesh.pp))
    sizes = state_bytes(plan, _fullest(held), model.lora)
    lines = (*plan.decisions, *model_lines(model, plan))
    return PlannedRun(plan, held, sizes, (*lines, *_totals(plan, held, sizes)), tuple(tried))


def held_tensors(plan: Plan, model: ModelPlan, place: int = 0) -> list[Held]:
    """What a rank of stage number `place` holds of the model, built without memory; the other ranks of the stage hold
    as much.
    """
    hf_config, mesh = model.hf_config, plan.mesh
    family, kind = family_of(hf_config.model_type), model_class(hf_config)
    with (
        build_local_experts(kind, family, ep_size=mesh.ep, mark=lambda _: None),
        build_only_layers(kind, model.stages[place]),
    ):
        lm = build_skeleton(
            local_config(hf_config, mesh.tp), attention=model.attention, dtype=torch.bfloat16, device="meta"
        )
    if mesh.pp > 1:
        install_pipeline_stage(lm, PipelineGroup(None, mesh.pp, place), vocabulary=hf_config.vocab_size)
    model_shard = ModelShard.of(mesh)
    kinds: Counter[tuple[str, tuple[int, ...], tuple[int, ...], int]] = Counter()
    for name, param in lm.named_parameters():
        shard = model_shard.tensor_shard(name, tuple(param.shape))
        sharers = plan.zero_ranks // (mesh.ep if shard.is_expert_parallel else 1)
        kinds[_LAYER.sub("N", name), shard.whole_shape, tuple(param.shape), sharers] += 1
    return [Held(name, count, whole, local, sharers) for (name, whole, local, sharers), count in kinds.items()]


def _merged(stages: Sequence[Sequence[Held]]) -> list[Held]:
    """The kinds of all stages, each once."""
    found: dict[Held, int] = {}
    for kind in chain.from_iterable(stages):
        key = replace(kind, count=0)
        found[key] = found.get(key, 0) + kind.count
    return [replace(kind, count=count) for kind, count in found.items()]


def state_bytes(plan: Plan, held: Sequence[Held], lora: LoraPlan | None = None) -> dict[str, int]:
    """Bytes a rank keeps for weights, gradients, and fp32 weights with moments, by ZeRO stage; activations and buffers
    are not counted.

    With LoRA adapters alone have gradients and moments, and quantised weights are in four bits.
    """
    width = 4 if plan.precision == "fp32" else 2
    adapters = lora.num_params if lora is not None else 0
    numel, sharded = sum(kind.numel for kind in held), sum(kind.sharded for kind in held)
    stage = plan.zero_stage
    share = -(-adapters // plan.zero_ranks)
    quantised = lora.quantised_shapes if lora is not None else ()
    spared = sum(width * math.prod(shape) - nf4_bytes(shape) for shape in quantised)
    weights = sharded + share if stage >= _STAGE_OF_PARTITIONED_WEIGHTS else numel + adapters
    if lora is not None:
        numel, sharded = adapters, share
    # DeepSpeed 0.19.8 keeps a second fp32 copy of fp32 weights under ZeRO (zero/stage_1_and_2.py:560).
    copies = 1 if stage or width < _MASTER_BYTES else 0
    master = _MASTER_BYTES * (MOMENTS[plan.optimizer.name] + copies)
    return {
        "weights": width * weights - spared,
        "gradients": width * (sharded if stage >= 2 else numel),
        "optimizer": master * (sharded if stage else numel),
    }


def _decisions(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title="plan", title_justify="left", show_header=False, box=None)
    for name, text in rows:
        table.add_row(name, text)
    return table


def _fullest(stages: Sequence[Sequence[Held]]) -> Sequence[Held]:
    return max(stages, key=lambda held: sum(kind.numel for kind in held))


def _totals(plan: Plan, stages: Sequence[Sequence[Held]], sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    """Parameters of the model and of a rank, and the bytes `sizes` of its state: of the stage that holds most."""
    # A tied weight is on both ends of a pipeline and counts once.
    whole = sum(kind.count * math.prod(kind.whole) for kind in _merged(stages)) - _copied(stages)
    most = _fullest(stages)
    where = {"weights": plan.offload_param, "gradients": plan.offload_optimizer, "optimizer": plan.offload_optimizer}
    parts = [
        f"{name} {size / GIB:,.2f} GiB{'' if where[name] == 'none' else f' ({where[name]})'}"
        for name, size in sizes.items()
    ]
    where_most = f" of stage {stages.index(most)}" if len(stages) > 1 else ""
    return [
        ("parameters", f"{whole / 1e9:,.3f} B, {sum(kind.numel for kind in most) / 1e9:,.3f} B on a rank{where_most}"),
        (f"state of a rank{where_most}", ", ".join(parts)),
    ]


def _copied(stages: Sequence[Sequence[Held]]) -> int:
    ends = [{kind.name: math.prod(kind.whole) for kind in held if not _IN_LAYER.search(kind.name)} for held in stages]
    return sum(size for name, size in ends[-1].items() if len(stages) > 1 and name in ends[0])


def _rank_map(mesh: Mesh, per_node: int) -> Table:
    nodes = mesh.world_size // per_node
    shown = [*range(min(_SHOWN_NODES, nodes)), *([nodes - 1] if nodes > _SHOWN_NODES else [])]
    axes = [axis for axis in AXES if getattr(mesh, axis) > 1] or ["dp"]
    table = Table(title="ranks", title_justify="left", box=None)
    for head in ("node", "ranks", *axes, *(["experts"] if mesh.ep > 1 else [])):
        table.add_column(head)
    for node in shown:
        ranks = range(node * per_node, (node + 1) * per_node)
        places = [_range({mesh.place(axis, rank) for rank in ranks}) for axis in axes]
        parts = [_range({replace(mesh, rank=rank).expert_place for rank in ranks})] if mesh.ep > 1 else []
        table.add_row(str(node), _range(set(ranks)), *places, *parts)
    lines = [(axis, mesh.lines(axis)) for axis in axes] + ([("experts", mesh.expert_lines())] if mesh.ep > 1 else [])
    table.caption = "; ".join(f"a group along {axis} spans {_nodes(groups, per_node)}" for axis, groups in lines)
    table.caption_justify = "left"
    return table


def _nodes(groups: list[list[int]], per_node: int) -> str:
    most = max(len({rank // per_node for rank in group}) for group in groups)
    return "one node" if most == 1 else f"{most} nodes"


def _range(values: set[int]) -> str:
    return str(min(values)) if len(values) == 1 else f"{min(values)}-{max(values)}"


def _shapes(held: Sequence[Held], plan: Plan) -> Table:
    table = Table(title="tensors", title_justify="left", box=None)
    for head in ("name", "times", "whole", "on a rank", "shared by"):
        table.add_column(head, overflow="fold")
    for kind in held:
        table.add_row(kind.name, str(kind.count), _by(kind.whole), _by(kind.local), f"{kind.sharers} ranks")
    if plan.zero_stage == 3:
        table.caption = "ZeRO-3 keeps on each rank one of as many equal parts as ranks share a tensor"
        table.caption_justify = "left"
    return table


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
