"""Where a run goes on from and how it is kept: the folder is tried, the newest checkpoint found, and a saver made."""

import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from ds_finetune.checkpoint.base_config import model_mismatch
from ds_finetune.checkpoint.files import (
    complete_steps,
    remove_checkpoint,
    rename_unusable,
    step_name,
    unfinished_folders,
)
from ds_finetune.checkpoint.folder import CheckpointFolder, open_checkpoint_folder, raise_on_every_rank, try_in_folder
from ds_finetune.checkpoint.locking import LOCK_SECONDS, lock_folder
from ds_finetune.checkpoint.part_file import part_name
from ds_finetune.checkpoint.random_state import restore_random_state
from ds_finetune.checkpoint.restore import UsableCheckpoint, named_checkpoint, newest_checkpoint, restore_engine
from ds_finetune.checkpoint.run_state import RunState, layout_of, versions
from ds_finetune.checkpoint.same_run import RunIdentity, changes_since_checkpoint
from ds_finetune.checkpoint.saver import Saver
from ds_finetune.checkpoint.storage import PartsReader, num_weights, read_state_groups
from ds_finetune.checkpoint.tools import BASE, CHECKPOINTS
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.batches import Position
from ds_finetune.data.stream import START, StreamedRows
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.state import Slice, StateGroup
from ds_finetune.errors import CheckpointError, FinetuneError, OutputError
from ds_finetune.observers.record import Resumable, StepRecord
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.inputs import Material
from ds_finetune.trainer.loop import BEGINNING, Progress
from ds_finetune.trainer.run_dir import available_bytes
from ds_finetune.units import GIB

Say = Callable[[str], None]
CONFIG = "config.json"
_REHEARSED = 4096
"""Elements that each rank writes and reads back before anything is loaded."""


@dataclass(frozen=True)
class Origin:
    """What a run goes on from; nothing where it begins anew. `held` keeps other runs out of the folder, on the rank
    that leads.
    """

    place: CheckpointFolder | None
    held: TextIO | None = None
    found: UsableCheckpoint | None = None

    @property
    def progress(self) -> Progress:
        """Steps, skipped steps and tokens of the run so far."""
        if self.found is None:
            return BEGINNING
        state = self.found.state
        return Progress(state.step, state.skipped_steps, state.tokens_seen)


def find_origin(plan: Plan, material: Material, say: Say) -> Origin:
    """Try the checkpoint folder for real and find what to go on from; collective, before the model is built.

    OutputError or CheckpointError on every rank; `say` prints which checkpoint is taken, and which were passed over and
    why.
    """
    wanted = plan.config.checkpoint
    if not wanted.every_steps:
        return Origin(None)
    folder = Path(plan.config.output_dir) / CHECKPOINTS
    place = open_checkpoint_folder(folder, rank=plan.world.rank, node_local=wanted.node_local)
    held = _locked(place, say)
    rehearse(place, is_asynchronous=plan.saves_aside)
    if wanted.resume == "never":
        return _tidied(Origin(place, held), say)
    found = (
        newest_checkpoint(place, folder) if wanted.resume == "auto" else named_checkpoint(place, Path(wanted.resume))
    )
    if found is None:
        if (folder.parent / "metrics.jsonl").exists():
            say(
                f"{folder.parent} holds a run that ended before its first checkpoint: it begins again, and its "
                "records go"
            )
        return _tidied(Origin(place, held), say)
    later = [step_name(step) for step in complete_steps(folder) if step > found.state.step]
    raise_on_every_rank(_mixed(folder, later, found) if wanted.resume != "auto" and later else None)
    raise_on_every_rank(model_mismatch(found.folder / BASE, CONFIG, material.config_tree))
    lines = [
        *changes_since_checkpoint(found.state, inputs_of(plan, material)),
        *_other_random_state(found, plan, material),
    ]
    lines += _left_out(found, plan, material)
    for line in (*found.passed_over, *_set_aside(place, later)):
        say(line)
    for line in (f"going on from {found.folder}, step {found.state.step} of {found.state.layout}", *lines):
        say(line)
    return _tidied(Origin(place, held, found), say)


def _tidied(origin: Origin, say: Say) -> Origin:
    """Take away what an earlier start did not finish; done last, when nothing can be refused any more."""
    if origin.place is not None and origin.place.is_leader:
        for left in unfinished_folders(origin.place.path):
            say(f"taken away: {left}, never completed")
            remove_checkpoint(left)
    return origin


def _locked(place: CheckpointFolder, say: Say) -> TextIO | None:
    held, error = None, None
    if place.is_leader:
        try:
            held = lock_folder(place.path, seconds=LOCK_SECONDS, say=say)
        except OutputError as taken:
            error = taken
    raise_on_every_rank(error)
    return held


def _set_aside(place: CheckpointFolder, names: list[str]) -> list[str]:
    """Checkpoints later than the one that is gone on with cannot be used: they must not be counted among those that are
    kept.
    """
    return (
        [f"{place.path / name} is now {rename_unusable(place.path / name).name}" for name in names]
        if place.is_leader
        else []
    )


def _mixed(folder: Path, later: list[str], found: UsableCheckpoint) -> CheckpointError:
    return CheckpointError(
        f"{folder} holds {', '.join(later)}, later than step {found.state.step} that checkpoint.resume names",
        hint="move them away, or name another output_dir",
    )


def rehearse(place: CheckpointFolder, *, is_asynchronous: bool) -> None:
    """Save a few numbers by the very path that checkpoints take, read them back and take them away; collective.

    OutputError on every rank with the first one's reason where that fails.
    """
    trial = replace(place, path=place.path / f".rehearsal-{place.token}")
    numbers = torch.arange(_REHEARSED, dtype=torch.float32) + place.rank
    group = _group_of(numbers, place)
    raise_on_every_rank(try_in_folder(place.path, lambda: trial.path.mkdir(exist_ok=True)))
    saver = Saver(lambda: [group], trial, is_asynchronous, {})
    saver.start(0)
    saver.save(0, "{}", rank_state={})
    outcome = saver.settle(wait=True)
    saver.close()
    assert outcome is not None
    error: FinetuneError | None = None
    if outcome.errors:
        error = OutputError(
            f"checkpoint folder {place.path}, rank {place.rank}: {'; '.join(outcome.errors)}",
            hint="mend it before training",
        )
    raise_on_every_rank(error)
    raise_on_every_rank(_misread(trial, numbers))
    if place.is_leader:
        shutil.rmtree(trial.path)


def _misread(trial: CheckpointFolder, numbers: torch.Tensor) -> OutputError | None:
    again = torch.full_like(numbers, float("nan"))
    reader = PartsReader(trial.path / step_name(0) / part_name(rank, trial.world_size) for rank in trial.ranks)
    read_state_groups([_group_of(again, trial)], reader, absent="")
    if torch.equal(again, numbers):
        return None
    return OutputError(
        f"checkpoint folder {trial.path.parent} gives back other numbers than rank {trial.rank} wrote",
        hint="use another disk",
    )


def _group_of(numbers: torch.Tensor, place: CheckpointFolder) -> StateGroup:
    shape = (place.world_size, _REHEARSED)
    part = Slice("weight/rehearsal", shape, place.rank * _REHEARSED, _REHEARSED, torch.float32)
    return StateGroup((part,), lambda write: nullcontext(lambda key: numbers))


def go_on(engine: Engine, origin: Origin, material: Material) -> Position:
    """Bring the checkpoint of `origin` into `engine`; returns where the data of a stream stands. Collective.

    CheckpointError where a stream was shared out among another number of ranks.
    """
    if origin.found is None or origin.place is None:
        return START
    own = restore_engine(engine, origin.place, origin.found)
    if own:
        restore_random_state(own["random"])
    is_stream = isinstance(material.train, StreamedRows)
    if is_stream and not own:
        raise CheckpointError(
            f"data.streaming goes on with the ranks it began with: {origin.found.state.layout['mesh']}, not "
            f"{engine.plan.mesh}",
            hint=f"start {origin.found.manifest.world_size} ranks with the same `parallel`, or prepare the data "
            "(data.streaming false) in a new run",
        )
    return Position(*own["position"]) if is_stream else START


@contextmanager
def saver_of(engine: Engine, origin: Origin, base: Mapping[str, Path], *, config: str) -> Iterator[Saver | None]:
    """A saver of the engine's state whose process is running, None where nothing is saved.

    `base` are files that an export will need beside `config`, the text of the model's config.json.
    """
    place = origin.place
    if place is None:
        yield None
        return
    kept = Path(engine.plan.config.output_dir) / BASE
    if place.is_leader:
        kept.mkdir(parents=True, exist_ok=True)
        for name, source in base.items():
            (kept / name).unlink(missing_ok=True)
            # Copied once, so that whoever changes the model's folder does not change the checkpoint.
            (kept / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, kept / name)
        (kept / CONFIG).unlink(missing_ok=True)
        (kept / CONFIG).write_text(config, encoding="utf-8")
    beside = {f"{BASE}/{name}": kept / name for name in (CONFIG, *base)}
    saver = Saver(engine.state.groups, place, engine.plan.saves_aside, beside, [origin.held] if origin.held else [])
    num_bytes = num_weights(engine.state.groups(), writer=place.writer_share) * engine.plan.bytes_per_parameter
    raise_on_every_rank(_short_of_memory(num_bytes, engine.plan))
    saver.start(num_bytes)
    try:
        yield saver
    finally:
        saver.close()


def _short_of_memory(num_bytes: int, plan: Plan) -> OutputError | None:
    needed, free = num_bytes * plan.world.local_world_size, available_bytes()
    if not plan.saves_aside or free is None or needed <= free:
        return None
    sizes = (
        f"{needed / GIB:.2f} GiB of state to the memory of {socket.gethostname()}, which has {free / GIB:.2f} GiB left"
    )
    return OutputError(
        f"checkpoint.asynchronous copies {sizes}",
        hint="set checkpoint.asynchronous false: training then waits while a checkpoint is written",
    )


def run_text(engine: Engine, material: Material) -> Callable[[StepRecord, Mapping[str, Mapping[str, Any]]], str]:
    """A function that puts the run's state after a step into text."""

    inputs = inputs_of(engine.plan, material)

    def text(record: StepRecord, observers: Mapping[str, Mapping[str, Any]]) -> str:
        return RunState(
            step=record.step,
            skipped_steps=int(record.values["train/skipped_steps"]),
            tokens_seen=int(record.values["data/tokens_seen"]),
            position=tuple(record.position),
            engine=engine.state.scalars(),
            observers=observers,
            values=dict(record.values),
            layout=layout_of(engine.plan),
            versions=versions(),
            **asdict(inputs),
        ).text()

    return text


def remember(observers: Mapping[str, Resumable], origin: Origin) -> None:
    """Give observers back what they remembered."""
    kept = origin.found.state.observers if origin.found else {}
    for name in observers.keys() & kept.keys():
        observers[name].restore(kept[name])


def refuse_past_end(origin: Origin, *, steps: int, duration: str) -> None:
    """CheckpointError where the checkpoint is of a step past the run's end: it would export other weights."""
    if origin.found is not None and origin.progress.step > steps:
        raise CheckpointError(
            f"{origin.found.folder} is of step {origin.progress.step}, and train.for {duration} ends after step "
            f"{steps}",
            hint="raise train.for; to end with these weights, use `ds-finetune export` on the checkpoint",
        )


def ended_early(origin: Origin, config: RunConfig) -> bool:
    """Whether the run that is gone on with had lost its patience."""
    best = origin.found.state.observers.get("best", {}) if origin.found else {}
    return 0 < config.eval.patience <= best.get("worse_in_a_row", 0)


def cut_evaluation(origin: Origin, place_in_stream: Position, *, steps: int) -> list[StepRecord]:
    """The record of the step at which a signal cut the evaluation short, to be passed to the observers again; else
    nothing.
    """
    state = origin.found.state if origin.found else None
    if state is None or not state.observers.get("evaluation", {}).get("is_due"):
        return []
    position = astuple(place_in_stream) if place_in_stream != START else state.position
    return [StepRecord(state.step, state.values, is_last=state.step >= steps, position=position)]


def saved_record(origin: Origin) -> StepRecord | None:
    """The record of the step that is gone on from, as far as it was made when it was saved."""
    return StepRecord(origin.found.state.step, origin.found.state.values) if origin.found else None


def inputs_of(plan: Plan, material: Material) -> RunIdentity:
    """What this start is made of, as a checkpoint remembers it."""
    return RunIdentity(
        config=plan.config.model_dump(mode="json", by_alias=True),
        data=material.train.fingerprint(),
        base=material.base,
        held_out=material.held_out.fingerprint() if material.held_out is not None else "",
        deepspeed=plan.deepspeed,
    )


def _left_out(found: UsableCheckpoint, plan: Plan, material: Material) -> list[str]:
    """Rows that a longer run does not see: those for which a shorter one filled its last step up with empty rows."""
    if isinstance(material.train, StreamedRows) or found.state.config["train"]["for"] == plan.config.train.duration:
        return []
    epoch, index = found.state.position[:2]
    rows = found.state.step * plan.config.train.global_batch_size - (epoch * len(material.train) + index)
    text = f"{rows} rows of epoch {epoch + 1} are left out: step {found.state.step} was the last one, and not full"
    return [text] if rows > 0 else []


def _other_random_state(found: UsableCheckpoint, plan: Plan, material: Material) -> list[str]:
    """Random states are those of ranks, and nothing but dropout depends on them."""
    ratios = {key: value for key, value in material.hf_config.to_dict().items() if key.endswith(("dropout", "_pdrop"))}
    drops = [f"{key} {value}" for key, value in ratios.items() if isinstance(value, float) and value]
    then, now = found.state.layout.get("mesh"), str(plan.mesh)
    if not drops or then == now:
        return []
    return [f"{', '.join(drops)} draws other numbers than without the interruption: layout {then} -> {now}"]
