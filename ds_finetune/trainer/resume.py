"""Resumes and saves a run: tests the checkpoint folder, finds and restores a checkpoint, and starts the saver."""

import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import torch

from ds_finetune.checkpoint.commit import (
    complete_steps,
    part_name,
    remove_checkpoint,
    rename_unusable,
    step_name,
    unfinished_folders,
)
from ds_finetune.checkpoint.folder import CheckpointFolder, open_checkpoint_folder, raise_on_every_rank, try_in_folder
from ds_finetune.checkpoint.locking import LOCK_SECONDS, lock_folder
from ds_finetune.checkpoint.part_storage import PartReader, num_weights, read_state_groups
from ds_finetune.checkpoint.restore import (
    UsableCheckpoint,
    named_checkpoint,
    newest_checkpoint,
    restore_engine,
    restore_random_state,
)
from ds_finetune.checkpoint.run_state import RunState, layout_of, versions
from ds_finetune.checkpoint.same_run import RunIdentity, changes_since_checkpoint, model_mismatch
from ds_finetune.checkpoint.saver import Saver
from ds_finetune.checkpoint.tools import BASE, CHECKPOINTS
from ds_finetune.config.objectives import rows_of_step
from ds_finetune.config.units import bytes_text
from ds_finetune.console.phase_line import Say
from ds_finetune.data.batches import Position
from ds_finetune.data.stream import START, StreamedRows
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.state.state import Slice, StateGroup
from ds_finetune.errors import CheckpointError, FinetuneError, OutputError
from ds_finetune.model.build.hub_folder import copy_model_file
from ds_finetune.observers.checkpointing import RunText
from ds_finetune.observers.record import Resumable, StepRecord
from ds_finetune.plan.plan import Plan
from ds_finetune.runs.folder import BEST_EXPORTS, RunFolder
from ds_finetune.system.free_memory import available_bytes
from ds_finetune.system.whole_file import synchronise_names
from ds_finetune.trainer.exports import adapt_tokenizer
from ds_finetune.trainer.loop import BEGINNING, Progress
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.resolve import ResolvedRun

CONFIG = "config.json"
_TEST_NUMBERS = 4096
"""Number of elements that each rank writes and reads back to test saving."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run resumes: this rank's checkpoint folder, and the checkpoint to resume from. A new run has no
    checkpoint. The folder's leading rank holds the lock, which keeps other runs out of the folder.
    """

    checkpoints: CheckpointFolder | None
    lock: TextIO | None = None
    checkpoint: UsableCheckpoint | None = None

    @property
    def state(self) -> RunState | None:
        """The run's state after the checkpoint's step; None for a new run."""
        return None if self.checkpoint is None else self.checkpoint.state

    @property
    def progress(self) -> Progress:
        """Steps, skipped steps and tokens up to the checkpoint; zeros for a new run."""
        state = self.state
        return BEGINNING if state is None else Progress(state.step, state.skipped_steps, state.tokens_seen)

    @property
    def record(self) -> StepRecord | None:
        """The record of the checkpoint's step, with the values that it had when saved; None for a new run."""
        if (state := self.state) is None:
            return None
        return StepRecord(state.step, state.values, best_step=self.observer_states.get("best", {}).get("best_step", 0))

    @property
    def observer_states(self) -> Mapping[str, Mapping[str, Any]]:
        """States of the observers by name; empty for a new run."""
        return {} if self.state is None else self.state.observers

    def restore(self, observers: Mapping[str, Resumable]) -> None:
        """Restore the states of `observers`, which are given by name."""
        for name in observers.keys() & self.observer_states.keys():
            observers[name].restore(self.observer_states[name])

    def check_not_past_end(self, *, steps: int, duration: str) -> None:
        """Raise CheckpointError if the checkpoint is past the run's last step: an export would be of a later step."""
        if self.checkpoint is not None and self.progress.step > steps:
            raise CheckpointError(
                f"checkpoint {self.checkpoint.folder} is of step {self.progress.step}, and train.for {duration} ends "
                f"after step {steps}",
                hint="raise train.for, or export the checkpoint's weights with `ds-finetune export`",
            )

    def ended_early(self, *, patience: int) -> bool:
        """Whether the run ended early because eval.patience was exhausted."""
        return 0 < patience <= self.observer_states.get("best", {}).get("worse_in_a_row", 0)

    def interrupted_evaluation(self, stream_position: Position, *, steps: int) -> list[StepRecord]:
        """The record of a step whose evaluation a signal interrupted, so that observers evaluate again; else empty."""
        state = self.state
        if state is None or not self.observer_states.get("evaluation", {}).get("is_due"):
            return []
        position = astuple(stream_position) if stream_position != START else state.position
        return [StepRecord(state.step, state.values, is_last=state.step >= steps, position=position)]


def find_resume_point(run: PreparedRun, say: Say) -> ResumePoint:
    """Test writing to the checkpoint folder, and find where the run resumes; collective, before the model is built.
    `say` prints the chosen checkpoint, and rejected ones with reasons. OutputError or CheckpointError is raised on
    every rank.
    """
    policy = run.config.checkpoint
    if not policy.saves:
        return ResumePoint(None)
    folder = run.output_dir / CHECKPOINTS
    checkpoints = open_checkpoint_folder(folder, rank=run.plan.world.rank, node_local=policy.node_local)
    folder_lock = _lock_folder(checkpoints, say)
    try_saving(checkpoints, is_asynchronous=run.plan.saves_asynchronously)
    usable = None if policy.resume == "never" else _find_checkpoint(run, checkpoints, say)
    # Unfinished checkpoints of earlier starts are removed last, after all checks that may refuse this start.
    for unfinished in unfinished_folders(checkpoints.path) if checkpoints.is_leader else ():
        say(f"removed the unfinished checkpoint {unfinished}")
        remove_checkpoint(unfinished)
    return ResumePoint(checkpoints, folder_lock, usable)


def _find_checkpoint(run: PreparedRun, checkpoints: CheckpointFolder, say: Say) -> UsableCheckpoint | None:
    folder, requested = run.output_dir / CHECKPOINTS, run.config.checkpoint.resume
    has_resumed = requested != "auto" and _has_resumed(run, folder)
    if has_resumed:
        say(f"an earlier start with checkpoint.resume {requested} saved checkpoints in {folder}: the newest is used")
    is_automatic = requested == "auto" or has_resumed
    usable = newest_checkpoint(checkpoints, folder) if is_automatic else named_checkpoint(checkpoints, Path(requested))
    if usable is None:
        if (run.output_dir / "metrics.jsonl").exists():
            say(
                f"the run in {run.output_dir} ended before its first checkpoint: it starts again, and its records are "
                "removed"
            )
        return None
    state = usable.state
    later = [step_name(step) for step in complete_steps(folder) if step > state.step]
    error = CheckpointError(
        f"checkpoint.resume names step {state.step}, and {folder} has later checkpoints: {', '.join(later)}",
        hint="leave checkpoint.resume out to resume from the newest one, move the later checkpoints away, or name "
        "another output_dir",
    )
    raise_on_every_rank(error if later and not is_automatic else None)
    raise_on_every_rank(model_mismatch(usable.folder / BASE, CONFIG, run.inputs.config_tree))
    lines = [
        *changes_since_checkpoint(state, inputs_of(run)),
        *_random_state_changes(usable, run),
        *_rows_left_out(usable, run),
        *best_weights_lines(usable, run),
    ]
    for line in usable.passed_over:
        say(line)
    # Checkpoints after the resume point are renamed, so that they do not count among the newest ones to keep.
    for name in later if checkpoints.is_leader else ():
        say(f"{checkpoints.path / name} is renamed to {rename_unusable(checkpoints.path / name).name}")
    if checkpoints.is_leader:
        move_later_exports(run.output_dir, state.step, say)
    saved_by = f"{state.layout.get('mesh')}, ZeRO-{state.layout.get('zero_stage')}"
    for line in (f"resuming from {usable.folder}, step {state.step} of {saved_by}", *lines):
        say(line)
    return usable


def _has_resumed(run: PreparedRun, folder: Path) -> bool:
    """Whether an earlier start with this `checkpoint.resume` saved the newest checkpoint in the run's own `folder`;
    false if that checkpoint is damaged. Rank zero decides, since other hosts may have run folders of their own.
    """
    before = None
    with suppress(OSError, ValueError, LookupError, TypeError):
        before = RunState.read(folder / step_name(complete_steps(folder)[-1])).config["checkpoint"]["resume"]
    return bool(all_gather_object(before == run.config.checkpoint.resume)[0])


def best_weights_lines(usable: UsableCheckpoint, run: ResolvedRun, last: StepRecord | None = None) -> list[str]:
    """Lines that say where the weights of the checkpoint's best evaluation are. There are none if the run folder has
    these weights, or if `last`, the last record of an ended run, has a better evaluation.
    """
    folder, best_step = usable.folder.parent.parent, usable.state.observers.get("best", {}).get("best_step", 0)
    if not (best_step and run.config.eval.keep_best) or (last is not None and last.best_step != best_step):
        return []
    steps = _steps_of_best(folder)
    is_elsewhere = folder.resolve() != run.output_dir.resolve()
    best = f"the best evaluation so far is of step {best_step}"
    if steps and not set(steps.values()) - {best_step, None}:
        paths = " and ".join(str(folder / name) for name in steps)
        return [f"{best}, and its weights are {paths}"] if is_elsewhere else []
    first = _first_resumed(run, best_step)
    if first is not None and best_step in (earlier := _steps_of_best(first)).values():
        paths = " and ".join(str(first / name) for name, step in earlier.items() if step == best_step)
        return [f"{best}, and its weights are {paths}"]
    others = "".join(f"; {folder / name} is of step {step}" for name, step in steps.items() if is_elsewhere)
    checkpoint = usable.folder.with_name(step_name(best_step))
    command = f"; `ds-finetune export {checkpoint} OUT` exports them" if checkpoint.is_dir() else ""
    return [f"{best.upper()}, AND {folder} HAS NO EXPORT OF ITS WEIGHTS{others}{command}"]


def _first_resumed(run: ResolvedRun, best_step: int) -> Path | None:
    """Folder of the resumed run. `checkpoint.resume` is the path of that folder, of its `checkpoints`, or of one of
    them. None for `auto` and `never`, and if that checkpoint is older than the best evaluation.
    """
    requested = run.config.checkpoint.resume
    if requested in ("auto", "never"):
        return None
    path = Path(requested)
    if path.parent.name == CHECKPOINTS:
        return None if path.name < step_name(best_step) else path.parent.parent
    return path.parent if path.name == CHECKPOINTS else path


def _steps_of_best(folder: Path) -> dict[str, int | None]:
    """Step of each export of the best weights in a run folder, by name of the export; None where it is unknown."""
    run = RunFolder(folder)
    with suppress(OutputError):
        run.update()
    return {name: run.export_step(folder / name) for name in BEST_EXPORTS if (folder / name).is_dir()}


def move_later_exports(folder: Path, after_step: int, say: Say) -> None:
    """Rename exports of best weights from steps after `after_step`, because these steps are trained again."""
    for name, step in _steps_of_best(folder).items():
        if step is not None and step > after_step:
            new = next(path for n in count(1) if not (path := folder / f"{name}-of-step-{step}-{n}").exists())
            (folder / name).rename(new)
            say(f"{folder / name} is of step {step}, which is trained again, and is renamed to {new.name}")


def _lock_folder(checkpoints: CheckpointFolder, say: Say) -> TextIO | None:
    folder_lock, error = None, None
    if checkpoints.is_leader:
        try:
            folder_lock = lock_folder(checkpoints.path, seconds=LOCK_SECONDS, say=say)
        except OutputError as taken:
            error = taken
    raise_on_every_rank(error)
    return folder_lock


def try_saving(checkpoints: CheckpointFolder, *, is_asynchronous: bool) -> None:
    """Save a few numbers as a trial checkpoint, read them back and remove them; collective. OutputError on every
    rank, with the reason of the first rank that fails.
    """
    trial = replace(checkpoints, path=checkpoints.path / f".rehearsal-{checkpoints.token}")
    numbers = torch.arange(_TEST_NUMBERS, dtype=torch.float32) + checkpoints.rank
    group = _group_of(numbers, checkpoints)
    raise_on_every_rank(try_in_folder(checkpoints.path, lambda: trial.path.mkdir(exist_ok=True)))
    saver = Saver(lambda: [group], trial, is_asynchronous, {})
    saver.start(0)
    saver.save(0, "{}", rank_state={})
    outcome = saver.settle(wait=True)
    saver.close()
    assert outcome is not None
    error: FinetuneError | None = None
    if outcome.errors:
        error = OutputError(
            f"saving to the checkpoint folder {checkpoints.path} fails on rank {checkpoints.rank}: "
            f"{'; '.join(outcome.errors)}",
            hint="repair the folder or its disk, or name another output_dir",
        )
    raise_on_every_rank(error)
    raise_on_every_rank(_read_back_error(trial, numbers))
    if checkpoints.is_leader:
        shutil.rmtree(trial.path)


def _read_back_error(trial: CheckpointFolder, numbers: torch.Tensor) -> OutputError | None:
    again = torch.full_like(numbers, float("nan"))
    reader = PartReader(trial.path / step_name(0) / part_name(rank, trial.world_size) for rank in trial.ranks)
    read_state_groups([_group_of(again, trial)], reader, absent="")
    if torch.equal(again, numbers):
        return None
    return OutputError(
        f"the checkpoint folder {trial.path.parent} returned other numbers than rank {trial.rank} had written",
        hint="set output_dir to a folder on another disk",
    )


def _group_of(numbers: torch.Tensor, checkpoints: CheckpointFolder) -> StateGroup:
    shape = (checkpoints.world_size, _TEST_NUMBERS)
    part = Slice("weight/rehearsal", shape, checkpoints.rank * _TEST_NUMBERS, _TEST_NUMBERS, torch.float32)
    return StateGroup((part,), lambda write: nullcontext(lambda key: numbers))


def resume_engine(run: PreparedRun, engine: Engine, point: ResumePoint) -> Position:
    """Restore the checkpoint of `point` into `engine`. Returns the position in the data; collective. CheckpointError if
    data were streamed by another number of ranks.
    """
    if point.checkpoint is None or point.checkpoints is None:
        return START
    own = restore_engine(engine, point.checkpoints, point.checkpoint)
    if own:
        restore_random_state(own["random"])
    is_stream = isinstance(run.inputs.train, StreamedRows)
    if is_stream and not own:
        raise CheckpointError(
            f"with data.streaming a run can only resume with the ranks it began with: "
            f"{point.checkpoint.state.layout['mesh']}, not {run.plan.mesh}",
            hint=f"start {point.checkpoint.manifest.world_size} ranks with the same `parallel`, or prepare the data "
            "(data.streaming false) in a new run",
        )
    return Position(*(own if is_stream else {"position": point.checkpoint.state.position})["position"])


@contextmanager
def start_saver(run: PreparedRun, engine: Engine, point: ResumePoint) -> Iterator[Saver | None]:
    """Context with a saver of the engine's state and the saver's process; None if the run saves no checkpoints."""
    checkpoints = point.checkpoints
    if checkpoints is None:
        yield None
        return
    base = run.output_dir / BASE
    sources = run.inputs.copied_files
    texts = {CONFIG: run.inputs.config_text}
    error: FinetuneError | None = None
    if checkpoints.is_leader:
        texts |= adapt_tokenizer(run).changed
        error = try_in_folder(checkpoints.path, lambda: _write_base(base, sources, texts))
    raise_on_every_rank(error)
    linked = {f"{BASE}/{name}": base / name for name in (*sources, *texts)}
    locks = [point.lock] if point.lock else []
    groups = partial(engine.state.groups, home=checkpoints.ranks)

    def checked_groups() -> list[StateGroup]:
        engine.check_replicas()
        return groups()

    saver = Saver(checked_groups, checkpoints, run.plan.saves_asynchronously, linked, locks)
    num_bytes = int(num_weights(groups(), portion=checkpoints.portion) * run.plan.checkpoint_bytes_per_parameter)
    raise_on_every_rank(_memory_error(num_bytes, run.plan))
    saver.start(num_bytes)
    try:
        yield saver
    finally:
        saver.close()


def _write_base(base: Path, sources: Mapping[str, Path], texts: Mapping[str, str]) -> None:
    """Write the files that an export of a checkpoint needs: copies of tokenizer files, config.json, and `texts` by file
    name. They are copied once, so that later changes in the model's folder do not affect the checkpoints.
    """
    base.mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (base / name).unlink(missing_ok=True)
        (base / name).parent.mkdir(exist_ok=True)
        copy_model_file(source, base / name)
    for name, text in texts.items():
        (base / name).unlink(missing_ok=True)
        (base / name).write_text(text, encoding="utf-8")
    synchronise_names(base)


def _memory_error(num_bytes: int, plan: Plan) -> OutputError | None:
    needed, free = num_bytes * plan.world.local_world_size, available_bytes()
    if not plan.saves_asynchronously or needed <= free:
        return None
    return OutputError(
        f"checkpoint.asynchronous needs {bytes_text(needed)} of memory for a copy of the state, and host "
        f"{socket.gethostname()} has {bytes_text(free)} free",
        hint="set checkpoint.asynchronous: false; training then waits while a checkpoint is written",
    )


def make_state_text(run: PreparedRun, engine: Engine) -> RunText:
    """Make a function that serialises the run's state after a step, from the step's record and observers' states."""
    inputs = inputs_of(run)

    def state_text(record: StepRecord, observers: Mapping[str, Mapping[str, Any]]) -> str:
        return RunState(
            step=record.step,
            skipped_steps=int(record.values["train/skipped_steps"]),
            tokens_seen=int(record.values["data/tokens_seen"]),
            position=tuple(record.position),
            engine=engine.state.scalars(),
            observers=observers,
            values=dict(record.values),
            layout=layout_of(run.plan),
            versions=versions(),
            **asdict(inputs),
        ).text()

    return state_text


def inputs_of(run: PreparedRun) -> RunIdentity:
    """The run's configuration and fingerprints of its inputs, in the form that checkpoints store."""
    held_out = {name: rows.fingerprint() for name, rows in run.inputs.held_out.items()}
    return RunIdentity(
        config=run.tree,
        data=run.inputs.train.fingerprint(),
        base=run.inputs.base,
        teacher=run.inputs.teacher,
        held_out="; ".join(text if name == "eval" else f"{name}: {text}" for name, text in held_out.items()),
        deepspeed=run.plan.deepspeed_config,
    )


def _rows_left_out(usable: UsableCheckpoint, run: PreparedRun) -> list[str]:
    """A line on rows that are skipped if `train.for` was raised: the last step until now had fewer rows than others."""
    rows, config = run.inputs.train, run.config
    if isinstance(rows, StreamedRows) or usable.state.config["train"]["for"] == config.train.duration:
        return []
    epoch, index = usable.state.position[:2]
    of_step = rows_of_step(config.objective, config.rollout, config.train.global_batch_size)
    missed = usable.state.step * of_step - (epoch * rows.rows_per_epoch + index)
    text = f"{missed} rows of epoch {epoch + 1} are left out: step {usable.state.step} was the last one, and not full"
    return [text] if missed > 0 else []


def _random_state_changes(usable: UsableCheckpoint, run: PreparedRun) -> list[str]:
    """A line if dropout uses other random numbers than before, because the layout of ranks has changed."""
    tree = run.model.hf_config.to_dict()
    ratios = {key: value for key, value in tree.items() if key.endswith(("dropout", "_pdrop", "_dropout_prob"))}
    drops = [f"{key} {value}" for key, value in ratios.items() if isinstance(value, float) and value]
    drops += [f"lora.dropout {lora.dropout:g}"] if (lora := run.config.lora) is not None and lora.dropout else []
    then, now = usable.state.layout.get("mesh"), str(run.plan.mesh)
    if not drops or then == now:
        return []
    return [f"{', '.join(drops)} uses other random numbers than without the interruption: layout {then} -> {now}"]
