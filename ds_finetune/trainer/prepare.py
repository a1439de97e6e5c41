"""Prepares a run from its configuration, before any process group: plan, model, rows and learning rate."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.schedule import Duration, LrSchedule, warmup_steps
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.stream import StreamedRows
from ds_finetune.engine.device_memory import DeviceMemory, PeakMemory, read_device_memory
from ds_finetune.engine.devices import choose_device
from ds_finetune.families.table import family_of
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.unused_parameters import patterns_of, unused_parameters
from ds_finetune.model.mtp.layer import mtp_layers
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.objectives.objective import Objective
from ds_finetune.observers.trackers import check_trackers
from ds_finetune.plan.estimate.states import DiskNeed, RunEstimate, estimate_run
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.run_length import check_run_length
from ds_finetune.trainer.document_lengths import length_notes
from ds_finetune.trainer.inputs import (
    RunInputs,
    make_model_plan,
    read_inputs,
    try_generic_type,
    with_classes,
)
from ds_finetune.trainer.rank_tensors import rank_tensors, sizes_of
from ds_finetune.trainer.run_dir import check_only_own_files, check_run_disk, check_run_folder
from ds_finetune.world import World, accelerate_choices


@dataclass(frozen=True)
class PreparedRun:
    """A run before its process group exists: the run file, what was decided from it, and what it trains on."""

    config: RunConfig
    plan: Plan
    inputs: RunInputs
    schedule: LrSchedule
    estimate: RunEstimate
    reference: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Log-probabilities of the reference model, one for each document, by `train` and the names of held-out sets; empty
    where the objective has no cached reference."""
    memory: DeviceMemory | None = None
    """What this rank's device had free once the run was prepared; None where the system does not say."""
    peak: PeakMemory | None = None
    """The most that this rank has taken of its device since then."""

    @property
    def output_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.config.output_dir)


def prepare_run(config: RunConfig, world: World) -> PreparedRun:
    """Plan the run, read its model's config and tokenise its data, which takes as long as the data is large."""
    if world.rank == 0:
        # It writes what could replace files; other nodes may have a folder of their own, with checkpoints only.
        check_only_own_files(config)
    plan = make_plan(config, world=world, device=choose_device(), accelerate=accelerate_choices(os.environ))
    check_trackers(config.log.trackers)
    config = with_classes(config)
    model = make_model_plan(config, plan.mesh)
    plan = complete_plan(config, plan, model)
    inputs = read_inputs(config, model)
    check_baseline(plan, inputs)
    estimate = estimate_model(config, plan, model)
    check_run_folder(config)
    check_run_disk(Path(config.output_dir), _disk_need(estimate, world))
    schedule = make_schedule(config, inputs)
    rows = None if isinstance(inputs.train, StreamedRows) else inputs.train.rows_per_epoch
    notes = check_run_length(config, steps=schedule.steps, warmup=schedule.warmup_steps, rows=rows)
    inputs, memory = replace(inputs, notes=(*inputs.notes, *notes)), read_device_memory(world, plan.device)
    return PreparedRun(config, plan, inputs, schedule, estimate, memory=memory, peak=PeakMemory(plan.device))


def complete_plan(config: RunConfig, plan: Plan, model: ModelPlan) -> Plan:
    """The plan with what follows from the model: notes, and parameters that are not trained."""
    context = model.context.notes() if model.context is not None else ()
    plan = replace(plan, notes=(*plan.notes, *context, *try_generic_type(config, model), *length_notes(config, model)))
    return freeze_parameters(plan, model)


def mismatched_answers(plan: Plan, objective: Objective, rows: PreparedRows) -> MismatchedAnswers | None:
    """The documents of `rows` from which the objective's baseline is computed; None where it has no baseline."""
    if not objective.needs_baseline:
        return None
    batch = plan.batch
    return MismatchedAnswers(rows, seed=plan.seed, max_seq_len=batch.max_seq_len, is_packed=batch.is_packed)


def check_baseline(plan: Plan, inputs: RunInputs) -> None:
    """DataError where the objective needs a baseline, and the rows have nothing to compute it from."""
    named = {"data.train": inputs.train, **{f"data.{name}": rows for name, rows in inputs.held_out.items()}}
    for name, rows in named.items():
        mismatched = None
        if not isinstance(rows, StreamedRows):
            mismatched = mismatched_answers(plan, inputs.model.objective, rows)
        if mismatched is not None:
            mismatched.check(name)


def freeze_parameters(plan: Plan, model: ModelPlan) -> Plan:
    """Freeze what is not trained: parameters that no loss reaches, and routers where the run file says so."""
    return freeze_routers(freeze_unreached(plan, model), model)


def freeze_unreached(plan: Plan, model: ModelPlan) -> Plan:
    """Freeze parameters that get no gradient from the loss, since weight decay would shrink them; a note names them.

    In the model types of the family table these are indexers, or all others where indexers are trained alone.
    """
    hf_config = model.hf_config
    family = family_of(hf_config.model_type)
    if model.lora is not None:
        return plan
    if family.indexer is not None:
        every = build_meta_model(hf_config, model.task).named_parameters()
        return _with_frozen(plan, tuple(name for name, _ in every if model.is_untrained(name)))
    if not family.is_generic:
        return plan
    decay = plan.optimizer.weight_decay
    try:
        names = unused_parameters(hf_config, tokens=plan.batch.max_seq_len, task=model.task)
    except NotImplementedError as unknown:
        note = (
            f"not examined: whether the loss reaches every parameter of model_type {hf_config.model_type} ({unknown}); "
            f"optim.weight_decay {decay} would shrink one that it does not reach"
        )
        return replace(plan, notes=(*plan.notes, note)) if decay else plan
    return _with_frozen(plan, names)


def _with_frozen(plan: Plan, names: tuple[str, ...]) -> Plan:
    if not names:
        return plan
    note = f"frozen: {len(names)} parameters that the loss does not reach, kept as they are: {patterns_of(names)}"
    return replace(plan, frozen=names, notes=(*plan.notes, note))


def freeze_routers(plan: Plan, model: ModelPlan) -> Plan:
    """Freeze the weights of routers where the run file says so; a note names them."""
    if model.router is None or model.router.section.train:
        return plan
    names = model.router.parameters(mtp_layers(model.hf_config))
    note = f"frozen: {len(names)} weights of routers, since router.train is false: {patterns_of(names)}"
    return replace(plan, frozen=(*plan.frozen, *names), notes=(*plan.notes, note))


def estimate_model(config: RunConfig, plan: Plan, model: ModelPlan) -> RunEstimate:
    """What the run needs, from the shapes of the tensors that its ranks hold."""
    return estimate_run(config, plan, sizes_of(rank_tensors(config, plan, model), model.lora, model.teacher))


def drawn_line(run: PreparedRun, drawn: tuple[str, ...]) -> str:
    """What is printed where the parameters `drawn` were not loaded."""
    return f"drawn from train.seed, since {run.inputs.model.path} lacks them: {patterns_of(drawn)}"


def _disk_need(estimate: RunEstimate, world: World) -> DiskNeed:
    """What this host writes; where all hosts share the folder, each checks it for everything."""
    is_first_host = world.rank < world.local_world_size or not estimate.is_node_local
    return estimate.disk(ranks=world.local_world_size, is_first_host=is_first_host)


def make_schedule(config: RunConfig, inputs: RunInputs) -> LrSchedule:
    """Learning rate over the run, whose length in steps is known once the rows are."""
    length, rows = Duration.parse(config.train.duration), inputs.train
    number, tokens = (0, 0.0) if isinstance(rows, StreamedRows) else (rows.rows_per_epoch, rows.tokens_per_epoch)
    steps = length.in_steps(rows=number, tokens=tokens, global_batch_size=config.train.global_batch_size)
    optim = config.optim
    return LrSchedule(
        name=optim.lr_scheduler,
        lr=optim.lr,
        min_lr_ratio=optim.min_lr_ratio,
        warmup_steps=warmup_steps(optim.warmup, steps),
        steps=steps,
    )
