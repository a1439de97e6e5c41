"""The model of a run file as the engine takes it, a run as the trainer prepares it, and rows with numbers."""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.data.prepared_rows import Row, empty_row
from ds_finetune.model.build.model_plan import ModelPlan, task_of
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.model.loss.score_config import set_classes
from ds_finetune.objectives.objective import ScoreObjective, make_objective
from ds_finetune.plan.batch import rows_of_forward
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel, Tracer
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search.candidates import OFFLOADS, STAGES, Activations, Candidate, Candidates, Layout, Offload
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import PreparedRun, read_run
from ds_finetune.trainer.resolve import ResolvedRun, plan_model
from ds_finetune.trainer.tracing.activations import trace
from ds_finetune.trainer.tracing.cache import traced_layout


class NumberedRows:
    """Rows whose first token is their number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Row:
        return empty_row(index)


def model_of(config: RunConfig) -> ModelPlan:
    objective = make_objective(config.objective)
    hf_config = read_hf_config(config.model.path, task=task_of(objective))
    if isinstance(objective, ScoreObjective):
        set_classes(hf_config, config.objective, outputs=objective.num_outputs)
    return plan_model(hf_config, RunSettings.of(config))


def planned_run(config: RunConfig) -> ResolvedRun:
    """The run of `config` on one rank with its plan, and no model."""
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
    return ResolvedRun(config, plan, None)  # type: ignore[arg-type]


def prepared_run(config: RunConfig, plan: Plan) -> PreparedRun:
    """The run of `config` with this plan, without the checks that a real start does."""
    return read_run(ResolvedRun(config, plan, model_of(config)))


def all_layouts(candidates: Candidates) -> Iterator[Candidate]:
    """Every legal layout; many, so this is for few ranks."""
    for sizes in candidates.sizes:
        rows = candidates.micro_batch_sizes(sizes)
        choices = product(STAGES, OFFLOADS, rows, candidates.activations)
        for stage, offload, number, each in choices:
            if (found := candidates.find(Layout(sizes, stage, offload, number, each))) is not None:
                yield found


def layout_of(config: RunConfig | RunSettings) -> Layout:
    """The layout of a run file as it is written."""
    parallel, train = config.parallel, config.train
    zero = given_choices(config.deepspeed)[0].get("zero_optimization") or {}
    devices = [(zero.get(key) or {}).get("device") or "none" for key in ("offload_param", "offload_optimizer")]
    offload: Offload = "all" if devices[0] != "none" else "optimizer" if devices[1] != "none" else "none"
    mode = "full" if train.activation_checkpointing == "auto" else train.activation_checkpointing
    activations = Activations(mode, train.activation_offload, train.tiled_mlp)
    sizes = ParallelConfig(tp=parallel.tp, pp=parallel.pp, sp=parallel.sp, ep=parallel.ep)
    return Layout(sizes, int(zero.get("stage", 0)), offload, rows_of_forward(train), activations)


def traces_of(tree: Mapping[str, Any]) -> Tracer:
    """The traces of plans for a model with this config.json, and for a teacher whose folder is here."""
    text = json.dumps(dict(tree))
    return lambda plan: _traced(text, plan)


_TRACED: dict[str, TracedModel] = {}


def _traced(text: str, plan: Plan) -> TracedModel:
    key = f"{text} {traced_layout(plan)}"
    if key not in _TRACED:
        sections = {name: getattr(plan, name) for name in ("lora", "mtp", "router", "indexer", "objective", "rollout")}
        given = {name: section.model_dump(mode="json") for name, section in sections.items() if section is not None}
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(text)
            run = {"model": folder, "data": {"train": "t.jsonl"}, "output_dir": "o", "rewards": ["number"], **given}
            _TRACED[key] = trace(plan, model_of(RunConfig.model_validate(run)))
    return _TRACED[key]


def few_bytes(model: DescribedModel) -> Tracer:
    """Activations as if each layer of `model` kept a number for each token and held as many again: for what is asked of
    states and of the order of layouts.
    """
    layers = len(model.tensors.layers) - model.tensors.num_predictions

    def trace(plan: Plan) -> TracedModel:
        train, tokens = (
            plan.train,
            plan.micro_batch_size * plan.train.max_seq_len // (plan.mesh.sp * plan.mesh.tp),
        )
        kept = {"none": 40, "selective": 20, "full": 0 if train.activation_offload else 10}
        on_host = 10 * tokens if train.activation_offload else 0
        backward = (30 if train.tiled_mlp else 60) * tokens
        layer = TracedLayer(kept[plan.activation_checkpointing] * tokens, 20 * tokens, backward, on_host)
        return TracedModel((layer,) * layers, tokens, tokens, tokens, tokens, tokens, tokens, 0)

    return trace
