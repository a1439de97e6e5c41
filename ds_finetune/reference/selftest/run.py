"""Command `ds-finetune selftest`: compares a run's layout, or a standard set of layouts, with the reference loop.

`start_world` starts the ranks, and `selftest` runs on each of them.
"""

import copy
import gc
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from ds_finetune.config.objectives import is_distillation, is_grpo, read_objective
from ds_finetune.config.sections import LoraConfig, ParallelConfig
from ds_finetune.console.phase_line import Say
from ds_finetune.console.quiet import quiet_packages, show_loading_as_phase
from ds_finetune.engine.devices import bf16_support, choose_device
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.default_group import process_group
from ds_finetune.engine.ops.deepspeed_ops import build_ops
from ds_finetune.errors import ConfigError, LaunchError, RunError
from ds_finetune.families.table import FAMILIES, STANDARD_SELFTEST, WITH_TINY_MODELS
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.model_plan import task_of
from ds_finetune.model.build.skeleton import has_class, read_hf_config
from ds_finetune.model.mtp import set_mtp_layers
from ds_finetune.plan.deepspeed_config import DERIVED_KEYS, choose_deepspeed, read_choices
from ds_finetune.plan.inexact import without_inexact
from ds_finetune.plan.mesh import TESTED_LAYOUTS, Mesh
from ds_finetune.plan.model_checks import check_model
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.precision import with_precision
from ds_finetune.plan.settings import ModelSettings, RunSettings
from ds_finetune.reference.selftest.cells import (
    OBJECTIVES,
    TINY_MODELS,
    Cell,
    enlarged_config,
    hf_config,
    objective_of,
    run_tree,
)
from ds_finetune.reference.selftest.compare import compare_layout, write_model
from ds_finetune.reference.selftest.plain_features import with_teacher, write_teacher
from ds_finetune.system.world import World, accelerate_choices

_LEFT_OUT = (*DERIVED_KEYS, "optimizer", "bf16", "fp16", "data_types")
"""DeepSpeed keys that the selftest leaves out: those that follow from the run file, and `data_types`, which rounds."""
_SMALL = {
    "stage3_param_persistence_threshold": 40,
    "reduce_bucket_size": 20_000,
    "allgather_bucket_size": 20_000,
    "stage3_prefetch_bucket_size": 5_000,
}
_STRUCTURE = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_qk_norm",
    "topk_method",
    "scoring_func",
    "norm_topk_prob",
    "routed_scaling_factor",
)
_WHOLE_BLOCKS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "v_head_dim": 16,
    "num_attention_heads": 4,
}
"""Sizes of a tiny model with which whole quantisation blocks (64) fit into rows of all weights but the experts'."""
_ACCUMULATION = 2
_ROUTER_SCALE = 16.0
"""Factor on the router weights of tiny models. Randomly initialised routers score all experts nearly equally, so that
rounding would decide some choices, which changes the loss of a step by 1e-4 and more.
"""


@dataclass(frozen=True)
class LayoutCase:
    """A layout to compare with the reference loop. `model` is the tiny model before it is enlarged for the parallel
    sizes. `tree` is the run file without the model's path.
    """

    name: str
    model: PretrainedConfig
    tree: dict[str, Any]


@dataclass(frozen=True)
class SelftestSize:
    """Size of a selftest: number of optimizer steps per layout, and model families of the standard set. The first
    family is compared in every layout.
    """

    steps: int = 3
    families: tuple[str, ...] = STANDARD_SELFTEST

    @property
    def arguments(self) -> list[str]:
        """Options by which `ds-finetune selftest` passes this size to the processes that it starts."""
        return ["--steps", str(self.steps), "--families", ",".join(self.families)]


def start_world(arguments: list[str], run: RunSettings | None, *, nproc: int, hostfile: str | None) -> int:
    """Run `ds-finetune selftest` with `arguments` in `nproc` processes on this machine, or on the hosts of `hostfile`.
    Returns the exit code. Without a hostfile, errors in the run file are raised before a process is started.
    """
    if hostfile is not None:
        if not Path(hostfile).is_file():
            raise LaunchError(
                f"hostfile `{hostfile}` does not exist", hint="name an existing file with lines like `host1 slots=8`"
            )
        launcher = ["deepspeed.launcher.runner", "--hostfile", hostfile, "--no_local_rank", "--module", "ds_finetune"]
    else:
        world, device = World(0, nproc, 0, nproc, "selftest"), choose_device()
        for case in _cases_of_run(run, world, device) if run is not None else []:
            make_plan(_settings(case, Path(), Path()), world=world, device=device)
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m", "ds_finetune"]
    return subprocess.run([sys.executable, "-m", *launcher, "selftest", *arguments], check=False).returncode


def selftest(run: RunSettings | None, size: SelftestSize, *, say: Say) -> None:
    """Compare every layout on these ranks, and print a line for each: the layout of `run`, or the standard set if there
    is no run. RunError if one differs from the reference loop.
    """
    # Tiny models are loaded hundreds of times, each time with progress bars and warnings, so these are turned off.
    quiet_packages()
    show_loading_as_phase()
    # The tolerances are too strict for TF32, which NVIDIA's containers enable (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).
    torch.set_float32_matmul_precision("highest")
    # Launchers send SIGTERM to the other ranks when one fails. With this handler, rank zero still removes its folder.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    world = World.from_environment(os.environ)
    world.set_environment(os.environ)
    device = choose_device()
    cases = (
        _standard_cases(world.world_size, size.families, device) if run is None else _cases_of_run(run, world, device)
    )
    left_out = _left_out(run) if run is not None else []
    if left_out and world.rank == 0:
        say(f"not compared: {', '.join(left_out)}")
    wrong, began = 0, time.monotonic()
    with process_group(world, device), _shared_folder(world) as folder:
        plan = make_plan(_settings(cases[0], folder, folder), world=world, device=device)
        built = build_ops(plan, all_gather_object, say)
        for note in built.notes[len(plan.notes) :] if world.rank == 0 else ():
            say(note)
        for number, case in enumerate(cases):
            wrong += not _is_equal(case, world, device, folder / str(number), size.steps, say)
            if number == 0:
                # DeepSpeed collects garbage whenever ZeRO-3 starts. This is faster if the present objects are frozen.
                gc.freeze()
    if world.rank == 0:
        right, seconds = len(cases) - wrong, time.monotonic() - began
        say(
            f"{right} of {len(cases)} layouts equal a plain loop on {world.world_size} ranks ({device}), "
            f"{seconds:.0f} s"
        )
    if wrong:
        raise RunError(
            f"{wrong} of {len(cases)} layouts differ from the reference loop",
            hint="do not train with these layouts on this machine; compare installed versions with constraints.txt",
        )


def _is_equal(case: LayoutCase, world: World, device: str, folder: Path, steps: int, say: Say) -> bool:  # noqa: PLR0913
    model = enlarged_config(case.model, ParallelConfig.model_validate(case.tree["parallel"]))
    section = read_objective(case.tree["objective"])
    if section.row.head == "scores":
        # transformers classifies by the last token that is not padding. Samples lack token 0, so this is the padding.
        model.num_labels, model.pad_token_id = section.num_outputs, 0
    has_mtp = case.tree.get("mtp", {}).get("train", False)
    text = f"{task_of(section)} {has_mtp} {model.to_json_string()}"
    # All layouts of a model share a folder, so that the reference loop runs once for each model.
    where = folder.parent / f"model-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if world.rank == 0 and not where.exists():
        write_model(model, where, objective=section, has_mtp=has_mtp, router_scale=_ROUTER_SCALE)
    run = _settings(case, where, folder)
    if world.rank == 0 and is_distillation(run.objective):
        write_teacher(model, run.objective)
    all_gather_object(None)
    comparison = compare_layout(run, world, device, folder, steps=steps)
    if comparison is not None:
        say(f"{'equal' if comparison.is_equal else 'WRONG'}  {case.name:44} {comparison.text()}")
    return all_gather_object(comparison)[0].is_equal  # type: ignore[union-attr]


def _settings(case: LayoutCase, model_folder: Path, folder: Path) -> RunSettings:
    model = case.tree["model"] | {"path": str(model_folder)}
    run = RunSettings.of(case.tree | {"model": model, "output_dir": str(folder)})
    if not is_distillation(run.objective):
        return run
    return replace(run, objective=with_teacher(run.objective, model_folder))


def _standard_cases(world_size: int, families: Sequence[str], device: str) -> list[LayoutCase]:
    """Standard set of layouts in fp32: data parallelism at every ZeRO stage, and tested combinations of parallel axes.
    Each parallel axis has two ranks; combinations that do not fit `world_size` ranks are left out. Two ZeRO stages are
    also compared in bf16, and on GPUs in fp16.
    """
    unknown = [family for family in families if family not in TINY_MODELS]
    if unknown:
        raise ConfigError(f"--families {','.join(unknown)} is not known", hint=f"choose from {','.join(TINY_MODELS)}")
    cells = [Cell(family, stage, _ACCUMULATION, packing=True) for family in families for stage in range(4)]
    for row, family in itertools.product(TESTED_LAYOUTS, families):
        sizes: dict[str, Any] = dict.fromkeys(row.axes, 2)
        cell = Cell(family, 0, _ACCUMULATION, packing=True, max_grad_norm=0.5, checkpointing=True, **sizes)
        if (
            world_size % cell.sharing == 0
            and world_size // (cell.tp * cell.pp) % cell.ep == 0
            and hf_config(family).model_type in row.families
        ):
            cells += [
                replace(cell, stage=stage) for stage in (row.stages if family == families[0] else row.stages[-1:])
            ]
    first = FAMILIES[hf_config(families[0]).model_type]
    for precision in ("bf16", "fp16") if device == "cuda" else ("bf16",):
        cells += [Cell(families[0], stage, _ACCUMULATION, packing=True, precision=precision) for stage in (1, 3)]
    cells += [
        Cell(families[0], stage, _ACCUMULATION, packing=True, objective=name)
        for stage, name in zip(itertools.cycle((1, 3, 2)), OBJECTIVES, strict=False)
        if has_class(hf_config(families[0]), task_of(objective_of(name))) and not (first.compresses and name == "grpo")
    ]
    if first.has_lora:
        all_cases = [(2, "fp32"), (3, "fp32"), *([(2, "fp16")] if device == "cuda" else [])]
        cells += [
            Cell(families[0], stage, _ACCUMULATION, packing=True, precision=precision, has_lora=True)
            for stage, precision in all_cases
        ]
    if first.router is not None:
        cells += [Cell(families[0], stage, _ACCUMULATION, packing=True, balances=True) for stage in (1, 3)]
    return [_case(cell, world_size) for cell in cells]


def _case(cell: Cell, world_size: int) -> LayoutCase:
    tree = run_tree(cell, Path(), Path(), dp=world_size // cell.sharing) | {"model": {"path": ""}}
    if cell.objective in OBJECTIVES:
        tree["objective"] = {"name": cell.objective} | OBJECTIVES[cell.objective]
    name = f"{cell.family} {cell.layout} ZeRO-{cell.stage} {cell.precision}{_objective_text(cell)}"
    return LayoutCase(name, hf_config(cell.family), tree)


def _objective_text(cell: Cell) -> str:
    objective = "" if cell.objective == "sft" else f" {cell.objective}"
    return f"{objective}{' routers' if cell.balances else ''}{' LoRA' if cell.has_lora else ''}"


def _cases_of_run(run: RunSettings, world: World, device: str) -> list[LayoutCase]:
    """Cases of a tiny model in the run's layout: in fp32, where gradients are compared, and in the run's precision."""
    hub = read_hf_config(run.model.path, files=("*.json",))
    if hub.model_type not in TINY_MODELS:
        raise ConfigError(
            f"the selftest has no tiny model of model_type {hub.model_type}",
            hint=f"it supports {', '.join(WITH_TINY_MODELS)}",
        )
    mesh = Mesh.of(run.parallel, world_size=world.world_size, rank=world.rank)
    given, _ = read_choices(choose_deepspeed(run.deepspeed, accelerate_choices(os.environ)))
    choices = {key: value for key, value in without_inexact(copy.deepcopy(given)).items() if key not in _LEFT_OUT}
    # With the bucket sizes of a real model, all tensors of the tiny model would fit into one bucket.
    choices["zero_optimization"] = (choices.get("zero_optimization") or {}) | _SMALL
    stage = choices["zero_optimization"].get("stage", 0)
    cases = []
    chosen = with_precision(run.train, device=device, support=bf16_support(device, world))[0].precision
    for precision in dict.fromkeys(("fp32", chosen)):
        cell = Cell(
            hub.model_type,
            stage,
            run.parallel.pp if run.parallel.vpp > 1 else _ACCUMULATION,
            run.data.packing,
            precision=precision,
            max_grad_norm=0.5,
            sp=run.parallel.sp,
            objective=run.objective.name,
            reduces_once=run.train.reduction_every == "step",
            has_lora=run.lora is not None,
        )
        recomputation = run.train.activation_checkpointing
        cell = replace(cell, checkpointing=recomputation != "none", is_selective=recomputation != "full")
        tree = run_tree(cell, Path(), Path(), dp=mesh.dp)
        tree["parallel"] = run.parallel.model_copy(update={"pp_layers": ()}).model_dump()
        attention = run.model.attention if precision == chosen else "sdpa"
        tree |= {"model": {"path": "", "attention": attention, "loss": run.model.loss}, "deepspeed": choices}
        tree |= {
            # Groups have two answers, because larger groups may not divide a layout's batch.
            "objective": run.objective.model_dump() | ({"group_size": 2} if is_grpo(run.objective) else {}),
            "router": run.router and run.router.model_dump(),
        }
        lora = run.lora and run.lora.model_dump() | {"start": None, "dropout": 0.0}
        tree |= {"lora": lora, "mtp": run.mtp.model_dump()}
        tree["train"] |= {name: getattr(run.train, name) for name in ("activation_offload", "tiled_mlp")}
        if precision == chosen and run.train.reduction_dtype == "fp32":
            tree["train"]["reduction_dtype"] = "fp32"
        tiny = _tiny_model_like(hub, cell.family, is_quantised=run.lora is not None and bool(run.lora.quantize))
        name = f"{hub.model_type} {mesh} ZeRO-{stage} {precision}{_objective_text(cell)}"
        cases.append(LayoutCase(f"{name}{' MTP' if run.mtp.train else ''}", tiny, tree))
    if run.lora is not None:
        check_model(ModelSettings(run, hub.to_dict()), "type of the model")
        _check_targets(tiny, run.lora, has_mtp=run.mtp.train)
    return cases


def _left_out(run: RunSettings) -> list[str]:
    settings = (
        (run.indexer.train, "indexer.train true"),
        (bool(run.inexact), f"inexact {', '.join(run.inexact)}"),
        (run.optim.name.lower() != "adamw", f"optim.name {run.optim.name}"),
        (run.train.reduction_dtype == "bf16", "train.reduction_dtype bf16"),
        (bool(run.lora and run.lora.dropout), "lora.dropout"),
        (bool(run.lora and run.lora.start), "lora.start"),
    )
    return [text for is_set, text in settings if is_set]


def _check_targets(tiny: PretrainedConfig, lora: LoraConfig, *, has_mtp: bool) -> None:
    """Raise ConfigError if the run's patterns name modules that the tiny model lacks, such as those of layer 20."""
    tiny = copy.deepcopy(tiny)
    set_mtp_layers(tiny, int(has_mtp))
    try:
        plan_lora(tiny, lora)
    except ConfigError as refused:
        raise ConfigError(
            f"the selftest uses a tiny {tiny.model_type} of {tiny.num_hidden_layers} layers: {refused.message}",
            hint=f"{refused.hint}; for the selftest, name modules without layer numbers",
        ) from refused


def _tiny_model_like(hub: PretrainedConfig, family: str, *, is_quantised: bool) -> PretrainedConfig:
    """Make a family's tiny model with the structure of `hub`: tied weights, biases, latent queries, routing and
    padding. If its weights are quantised to 4 bits, a whole number of quantisation blocks fits into each row.
    """
    tiny = hf_config(family)
    for name, size in _WHOLE_BLOCKS.items() if is_quantised else ():
        if hasattr(tiny, name):
            setattr(tiny, name, size)
    for name in _STRUCTURE:
        if hasattr(hub, name):
            setattr(tiny, name, getattr(hub, name))
    if getattr(hub, "q_lora_rank", 0) is None:
        tiny.q_lora_rank = None
    tiny.pad_token_id = None if hub.pad_token_id is None else 0
    return tiny


@contextmanager
def _shared_folder(world: World) -> Iterator[Path]:
    """Context with a new folder for all ranks; with several hosts it is in the working directory, which they share."""
    is_one_host = world.local_world_size == world.world_size
    path = tempfile.mkdtemp(prefix="selftest-", dir=None if is_one_host else Path.cwd()) if world.rank == 0 else ""
    folder = Path(all_gather_object(path)[0])
    try:
        yield folder
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
