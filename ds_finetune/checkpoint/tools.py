"""Commands for checkpoints: list, show, verify, and gather the parts of one checkpoint from several nodes."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ds_finetune.checkpoint.commit import (
    MANIFEST,
    Manifest,
    complete_steps,
    damage_of,
    link_or_copy,
    part_name,
    step_name,
    unfinished_folders,
    write_checksummed,
)
from ds_finetune.checkpoint.run_state import RunState
from ds_finetune.config.units import bytes_text
from ds_finetune.errors import CheckpointError
from ds_finetune.system.whole_file import synchronise

CHECKPOINTS = "checkpoints"
"""Name of the subfolder of a run's folder that has its checkpoints."""
BASE = "base"
"""Subfolder of a run, and of each checkpoint, that has the files besides weights that an export needs."""
Pair = tuple[str, str]


def find_checkpoint(path: Path) -> Path:
    """Find the checkpoint at `path`, or the newest complete one of a run; CheckpointError if there is none."""
    if (path / MANIFEST).is_file():
        return path
    for folder in (path / CHECKPOINTS, path):
        steps = complete_steps(folder)
        if steps:
            return folder / step_name(steps[-1])
    raise CheckpointError(
        f"{path} holds no complete checkpoint", hint="name a run, or a folder such as RUN/checkpoints/step-000200"
    )


def list_checkpoints(path: Path) -> Iterator[Pair]:
    """Yield names and descriptions of a run's checkpoints: complete ones, oldest first, then incomplete ones."""
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    steps = complete_steps(folder)
    if not steps and not unfinished_folders(folder):
        raise CheckpointError(f"{path} holds no checkpoints", hint="name the folder of a run")
    for step in steps:
        try:
            yield step_name(step), _line(Manifest.read(folder / step_name(step)))
        except CheckpointError as broken:
            yield step_name(step), broken.message
    yield from ((unfinished.name, "not complete") for unfinished in unfinished_folders(folder))


def describe_checkpoint(path: Path) -> Iterator[Pair]:
    """Yield the contents of a checkpoint as pairs of a name and a text."""
    folder = find_checkpoint(path)
    manifest, state = Manifest.read(folder), RunState.read(folder)
    yield "folder", str(folder)
    yield "state", _line(manifest)
    yield (
        "data",
        f"next is row {state.position[1]:,} of epoch {state.position[0]}; {state.tokens_seen:,} tokens seen; "
        f"{state.data}",
    )
    yield "optimizer", f"{state.engine['steps']} steps taken, {state.skipped_steps} skipped"
    yield "saved at", ", ".join(f"{key} {value}" for key, value in state.layout.items())
    yield "versions", ", ".join(f"{key} {value}" for key, value in state.versions.items())
    yield from ((name, f"{file.num_bytes:,} bytes, {file.xxh3_128}") for name, file in manifest.files.items())


def verify_checkpoint(path: Path, *, workers: int) -> str:
    """Compare all files of a checkpoint with their checksums. CheckpointError names damaged files."""
    folder = find_checkpoint(path)
    manifest = Manifest.read(folder)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        checks = pool.map(lambda name: damage_of(folder, manifest, [name]), manifest.files)
        damage = [problem for problems in checks for problem in problems]
    if damage:
        undamaged = len(manifest.files) - len(damage)
        raise CheckpointError(
            f"the checkpoint is damaged: {'; '.join(damage)}",
            hint=f"use another checkpoint; {undamaged} other files are undamaged",
        )
    return f"{folder}: {len(manifest.files)} files, {bytes_text(manifest.num_bytes)}, as they were written"


def gather_checkpoint(folders: Sequence[Path], out: Path) -> str:
    """Assemble one complete checkpoint `out` from the folders of several nodes. Files are hard-linked if the file
    system allows it. CheckpointError if `folders` are not of one save, or lack the part of some rank.
    """
    saves = [(folder, Manifest.read(folder)) for folder in map(find_checkpoint, folders)]
    kinds = {(manifest.step, manifest.world_size, manifest.token) for _, manifest in saves}
    if len(kinds) > 1:
        texts = ", ".join(f"{folder}: step {m.step} of {m.world_size} ranks, start {m.token}" for folder, m in saves)
        raise CheckpointError(
            f"the folders belong to different saves: {texts}", hint="name the folders of one checkpoint, one per node"
        )
    first = saves[0][1]
    missing = [
        part_name(rank, first.world_size)
        for rank in range(first.world_size)
        if not any(rank in m.ranks for _, m in saves)
    ]
    if missing:
        raise CheckpointError(
            f"{', '.join(missing)} of {first.world_size} ranks are in none of {', '.join(map(str, folders))}",
            hint="name the checkpoint folders of all nodes",
        )
    damage = [problem for folder, manifest in saves for problem in damage_of(folder, manifest, manifest.files)]
    if damage or out.exists():
        raise CheckpointError(
            "; ".join(damage) or f"{out} exists already",
            hint="name undamaged checkpoints, and a new folder to write to",
        )
    partial = out.with_name(f"{out.name}.partial-{os.getpid():x}")
    files = {name: (folder, file) for folder, manifest in reversed(saves) for name, file in manifest.files.items()}
    for name, (folder, _) in files.items():
        link_or_copy(folder / name, partial / name)
    sums = {name: file for name, (_, file) in sorted(files.items())}
    complete = replace(first, ranks=tuple(range(first.world_size)), files=sums)
    write_checksummed(partial / MANIFEST, [complete.text().encode()])
    synchronise(partial)
    for folder in {(partial / name).parent for name in files}:
        synchronise(folder)
    partial.rename(out)
    synchronise(out.absolute().parent)
    return f"{out}: {first.world_size} parts of step {first.step}, {bytes_text(complete.num_bytes)}"


def _line(manifest: Manifest) -> str:
    present = f"{len(manifest.ranks)} of " if manifest.absent_parts else ""
    parts = f"{present}{manifest.world_size} parts"
    loss = "" if manifest.eval_loss is None else f", eval/loss {manifest.eval_loss:.4f}"
    return f"step {manifest.step}, {parts}, {bytes_text(manifest.num_bytes)}, written on {manifest.host}{loss}"
