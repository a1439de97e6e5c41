"""Finds the checkpoint to resume from, and restores it into an engine of any layout and into random generators."""

import base64
import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_finetune.checkpoint.commit import (
    Manifest,
    complete_steps,
    damage_of,
    find_renamed_checkpoint,
    step_name,
    unfinished_folders,
)
from ds_finetune.checkpoint.folder import CheckpointFolder, raise_on_every_rank
from ds_finetune.checkpoint.part_storage import PartReader, read_state_groups
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.checkpoint.tools import CHECKPOINTS
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.state.state import BUFFER, WEIGHT
from ds_finetune.errors import CheckpointError


@dataclass(frozen=True)
class UsableCheckpoint:
    """An undamaged checkpoint with its run's state. `passed_over` has a line for each newer, unusable checkpoint."""

    folder: Path
    manifest: Manifest
    state: RunState
    passed_over: tuple[str, ...]


def newest_checkpoint(checkpoints: CheckpointFolder, folder: Path) -> UsableCheckpoint | None:
    """Find the newest checkpoint in `folder` that is complete on every node and undamaged; collective. The ranks divide
    the check of its files. None if there are no checkpoints; CheckpointError if none can be used or one was renamed.
    """
    raise_on_every_rank(find_renamed_checkpoint(folder))
    steps_of_ranks = all_gather_object((socket.gethostname(), set(complete_steps(folder))))
    all_steps = set.union(*(steps for _, steps in steps_of_ranks))
    steps = sorted(set.intersection(*(steps for _, steps in steps_of_ranks)), reverse=True)
    skipped = _unfinished(folder, newer_than=max(all_steps, default=-1))
    for step in sorted(all_steps - set(steps), reverse=True):
        hosts = ", ".join(
            f"rank {rank} on {host}" for rank, (host, present) in enumerate(steps_of_ranks) if step not in present
        )
        skipped.append(f"{folder / step_name(step)} is skipped: {hosts} does not have it")
    for step in steps:
        problems = _problems(checkpoints, folder / step_name(step))
        if not problems:
            return _usable(folder / step_name(step), tuple(skipped))
        skipped += [f"{folder / step_name(step)} is skipped: {problem}" for problem in problems]
    if all_steps:
        raise CheckpointError(
            f"none of the {len(all_steps)} checkpoints in {folder} can be used: {'; '.join(skipped)}",
            hint="restore the missing files, or set checkpoint.resume never and another output_dir to start a new run",
        )
    return None


def named_checkpoint(checkpoints: CheckpointFolder, path: Path) -> UsableCheckpoint:
    """Open the checkpoint at `path`, or the newest one of a run or folder of checkpoints; collective."""
    for folder in (path / CHECKPOINTS, path):
        if any(all_gather_object(bool(complete_steps(folder)))):
            usable = newest_checkpoint(checkpoints, folder)
            if usable is not None:
                return usable
    problems = _problems(checkpoints, path)
    if problems:
        raise CheckpointError(
            f"checkpoint.resume names {path}, which cannot be resumed: {'; '.join(problems)}",
            hint="name a run or one of its checkpoints",
        )
    return _usable(path, ())


def restore_engine(engine: Engine, checkpoints: CheckpointFolder, usable: UsableCheckpoint) -> dict[str, Any]:
    """Restore `engine` from a checkpoint; collective. Returns the state that this rank saved for itself, e.g. its
    random state; empty if the number of ranks or the mesh has changed. CheckpointError on every rank if a
    tensor is missing, has another shape, or is in a part file that is not available.
    """
    error, state = None, engine.state
    manifest, saved = usable.manifest, usable.state
    try:
        reader = PartReader(usable.folder / name for name in manifest.parts)
        state.create_optimizer_state(_kinds(reader))
        read_state_groups(state.groups(restoring=True), reader, absent=", ".join(manifest.absent_parts) or "none")
    except CheckpointError as failed:
        error = failed
    raise_on_every_rank(error)
    state.finish(saved.engine)
    taken, expected = state.scalars()["steps"], saved.engine["steps"]
    if taken != expected and any(_kinds(reader).values()):
        error = CheckpointError(
            f"the optimizer is at step {taken} after restoring {usable.folder}, which was saved at step {expected}",
            hint="this is a fault of the program: please report it",
        )
    raise_on_every_rank(error)
    own_parts = [part.extra for part in reader.parts if part.extra["rank"] == checkpoints.rank]
    is_same = manifest.world_size == checkpoints.world_size and saved.layout.get("mesh") == str(engine.plan.mesh)
    return own_parts[0] if own_parts and is_same else {}


def _usable(folder: Path, skipped: tuple[str, ...]) -> UsableCheckpoint:
    return UsableCheckpoint(folder, Manifest.read(folder), RunState.read(folder), skipped)


def _problems(checkpoints: CheckpointFolder, folder: Path) -> list[str]:
    """Lines on problems that any rank has found in a checkpoint; each rank checks some of the files."""
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        own_problems, token = [error.message], None
    else:
        index, count = checkpoints.portion
        own_problems, token = damage_of(folder, manifest, sorted(manifest.files)[index::count]), manifest.token
    of_ranks = all_gather_object((own_problems, token))
    problems = [problem for others, _ in of_ranks for problem in others]
    tokens = {token for _, token in of_ranks if token is not None}
    if len(tokens) > 1:
        problems.append(f"its parts are of {len(tokens)} different starts of the run")
    return list(dict.fromkeys(problems))


def _unfinished(folder: Path, *, newer_than: int) -> list[str]:
    steps = [
        (path, path.name.partition(".")[0].removeprefix("step-"))
        for path in unfinished_folders(folder)
        if ".partial-" in path.name
    ]
    own_paths = [str(path) for path, step in steps if step.isdigit() and int(step) > newer_than]
    return [
        f"{path} is skipped: it was never completed"
        for path in dict.fromkeys(path for others in all_gather_object(own_paths) for path in others)
    ]


def _kinds(reader: PartReader) -> dict[str, set[str]]:
    kinds: dict[str, set[str]] = {}
    for key in reader.held:
        kind, _, name = key.partition("/")
        if kind not in (WEIGHT, BUFFER):
            kinds.setdefault(name, set()).add(kind)
    return kinds


def random_state() -> dict[str, Any]:
    """States of the global random generators of torch (CPU and this process's GPU), numpy and Python."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "numpy": [kind, base64.b64encode(np.asarray(keys).tobytes()).decode(), position, has_gauss, cached],
        "python": [version, list(numbers), gauss],
    }


def restore_random_state(tree: dict[str, Any]) -> None:
    """Set the global random generators to the states that `random_state` returned."""
    torch.set_rng_state(_tensor(tree["torch"]))
    if tree["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_tensor(tree["cuda"]))
    kind, keys, position, has_gauss, cached = tree["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, cached))
    version, numbers, gauss = tree["python"]
    random.setstate((version, tuple(numbers), gauss))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
