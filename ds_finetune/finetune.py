"""One run from its configuration to its report: the page to read first."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_finetune.config import RunConfig
from ds_finetune.data.batches import Batch, BatchPlan, eval_batches, training_batches
from ds_finetune.data.stream import StreamedRows, streaming_batches
from ds_finetune.engine.core import Engine, EvalResult
from ds_finetune.engine.processes import choose_device, process_group
from ds_finetune.engine.start import DTYPES, start_engine
from ds_finetune.export.folder import TOKENIZER_FILES, FolderParts, parse_bytes, write_folder
from ds_finetune.loop import run, training_steps
from ds_finetune.material import Material, gather_material
from ds_finetune.model.families import family_of
from ds_finetune.observers.evaluation import BestAndPatience, Evaluation, matches
from ds_finetune.observers.progress import ProgressLine
from ds_finetune.observers.record import Observer, StepRecord
from ds_finetune.observers.skipped import SkippedSteps
from ds_finetune.observers.utilisation import Utilisation, peak_flops
from ds_finetune.observers.writers import MetricsFile, Trackers, check_trackers
from ds_finetune.plan.layout import Plan, make_plan
from ds_finetune.run_folder import check_output, read_json, write_run_files
from ds_finetune.schedule import Duration, LrSchedule, warmup_steps
from ds_finetune.world import World, accelerate_choices, refuse_missing_hostfile

Announce = Callable[[Plan, Material], None]


@dataclass(frozen=True)
class Report:
    """What happened: the last record, the run folder, the exports that were written and how long it took."""

    last: StepRecord | None
    output_dir: Path
    exports: tuple[Path, ...]
    seconds: float


def train(config: RunConfig, *, announce: Announce) -> Report:
    """Fine-tune as `config` says and return what happened."""
    began = time.monotonic()
    world = World.from_environment(os.environ)
    world.export_to(os.environ)
    refuse_missing_hostfile()
    plan = make_plan(config, world=world, device=choose_device(), accelerate=accelerate_choices(os.environ))
    check_trackers(config.log.trackers)
    material = gather_material(config)
    check_output(config, material.shape.total_params if material.shape else None)
    if world.rank == 0:
        announce(plan, material)
    schedule = lr_schedule(config, material)
    with process_group(world, plan.device), start_engine(plan, material.hf_config) as engine:
        folder = write_run_files(plan)
        observers = make_observers(engine, material, schedule, folder)
        last = run(training_steps(engine, batches_of(plan, material, schedule), schedule), observers)
        for observer in observers:
            observer.close()
        exports = [folder / "export"] if config.export.at_end else []
        for out in exports:
            export(engine, material, out)
    return Report(last, folder, tuple(exports), time.monotonic() - began)


def lr_schedule(config: RunConfig, material: Material) -> LrSchedule:
    """Learning rate over the run, whose length in steps is known once the rows are."""
    length = Duration.parse(config.train.duration)
    rows, tokens = (0, 0) if isinstance(material.train, StreamedRows) else (len(material.train), material.train.num_tokens)
    steps = length.in_steps(rows=rows, tokens=tokens, global_batch_size=config.train.global_batch_size)
    optim = config.optim
    warmup = warmup_steps(optim.warmup, steps)
    return LrSchedule(name=optim.lr_scheduler, lr=optim.lr, min_lr_ratio=optim.min_lr_ratio, warmup_steps=warmup, steps=steps)


def batches_of(plan: Plan, material: Material, schedule: LrSchedule) -> Iterator[Batch]:
    """This rank's batches of the whole run; a run given in epochs sees each row exactly that often."""
    if isinstance(material.train, StreamedRows):
        return streaming_batches(material.train, batch_plan(plan, material), steps=schedule.steps)
    length = Duration.parse(plan.config.train.duration)
    rows = round(length.value * len(material.train)) if length.unit == "epochs" else schedule.steps * plan.config.train.global_batch_size
    return training_batches(material.train, batch_plan(plan, material), start_step=0, total_rows=rows)


def batch_plan(plan: Plan, material: Material) -> BatchPlan:
    """How rows are shared out over ranks and micro-batches."""
    config = plan.config
    return BatchPlan(
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        rank=plan.world.rank,
        dp=plan.dp,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        pad_token_id=material.pad_token_id,
        row_len=config.train.max_seq_len if config.data.packing else None,
    )


def make_observers(engine: Engine, material: Material, schedule: LrSchedule, folder: Path) -> list[Observer]:
    """The observers of a run in the order they see a record; files and lines are rank zero's."""
    config = engine.plan.config
    observers: list[Observer] = [SkippedSteps(config.train.max_skipped_steps), *_utilisation(engine.plan, material)]
    if material.held_out is not None:
        every = int(Duration.parse(config.eval.every).value) if config.eval.every else 0
        observers.append(Evaluation(every, *_evaluations(engine, material)))
        observers.append(BestAndPatience(config.eval, lambda step: export(engine, material, folder / "export-best")))
    if engine.is_rank_zero:
        observers.append(MetricsFile(folder / "metrics.jsonl"))
        observers.append(Trackers.open(config.log.trackers, folder, {"model": config.model.path, "lr": config.optim.lr}))
        observers.append(ProgressLine(steps=schedule.steps, every=config.log.every))
    return observers


def export(engine: Engine, material: Material, out: Path) -> None:
    """Write the weights as they are now to the Hugging Face folder `out`; every rank takes part, rank zero writes."""
    config = engine.plan.config
    names = ("generation_config.json",)
    files = [material.folder / name for name in names] + [material.tokenizer_folder / name for name in TOKENIZER_FILES]
    template = {} if config.data.template in ("auto", "plain") else {"chat_template.jinja": Path(config.data.template).read_text(encoding="utf-8")}
    parts = FolderParts(
        family=family_of(material.hf_config.model_type),
        config=read_json(material.folder / "config.json"),
        architecture=type(engine.lm).__name__,
        dtype=DTYPES[config.train.precision],
        files=tuple(file for file in files if file.is_file()),
        texts=template,
    )
    write_folder(engine.tensors(), engine.tensor_specs(), out, parts, max_shard_bytes=parse_bytes(config.export.max_shard_size))


def _utilisation(plan: Plan, material: Material) -> list[Observer]:
    peak = peak_flops(torch.cuda.get_device_name()) if plan.device == "cuda" else None
    if material.shape is None or peak is None:
        return []
    attended = None if isinstance(material.train, StreamedRows) else material.train.mean_attended
    flops = material.shape.flops_per_token(plan.config.train.max_seq_len, mean_attended=attended)
    return [Utilisation(flops, peak, plan.world.world_size)]


def _evaluations(engine: Engine, material: Material) -> tuple[Callable[[], EvalResult], Callable[[], float] | None]:
    held_out = material.held_out
    assert held_out is not None
    asked = engine.plan.config.eval.generate

    def evaluate() -> EvalResult:
        return engine.evaluate(eval_batches(held_out, batch_plan(engine.plan, material)))

    def exact_match() -> float:
        prompts = held_out.prompts(asked.prompts)
        ids = engine.generate(
            [prompt for prompt, _ in prompts],
            max_new_tokens=asked.max_new_tokens,
            stop_ids=material.stop_ids,
            pad_id=material.pad_token_id,
        )
        texts = ([material.tokenizer.decode(part, skip_special_tokens=True) for part in parts] for parts in (ids, [answer for _, answer in prompts]))
        return matches(*texts)

    return evaluate, exact_match if asked.prompts else None
