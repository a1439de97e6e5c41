"""Files of a checkpoint: written with checksums, listed in a manifest, and made complete by one rename.

The writer process imports this module, so it does not import torch.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import xxhash

from ds_finetune.config.units import MIB
from ds_finetune.errors import CheckpointError
from ds_finetune.system.whole_file import synchronise

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
_STATUS = ".written.json"
_PREFIX = "step-"
_CHUNK_BYTES = 16 * MIB
_POLL_SECONDS = 0.05
_NO_LINKS = (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOSYS)
_UNFINISHED = re.compile(r"step-\d+\.(partial-[0-9a-f-]+|replaced-[0-9a-f-]+|removing)|\.rehearsal-[0-9a-f-]+")
"""Names of unfinished folders that this program makes; every other folder belongs to the user."""
_FINAL = re.compile(r"step-(\d+)")
"""Name of a complete checkpoint, with its step; the user may give a copy any other name."""


def step_name(step: int) -> str:
    """Folder name of the checkpoint of a step."""
    return f"{_PREFIX}{step:06d}"


def partial_name(step: int, token: str) -> str:
    """Folder name while a checkpoint is being written; `token` distinguishes starts of the run."""
    return f"{step_name(step)}.partial-{token}"


def part_name(rank: int, world_size: int) -> str:
    """File name of the part of `rank`."""
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


class RenamedCheckpointError(CheckpointError):
    """Raised where the name of a checkpoint folder contains another step than the checkpoint itself."""


def find_renamed_checkpoint(checkpoints: Path) -> RenamedCheckpointError | None:
    """The error of the first checkpoint in the folder `checkpoints` that was renamed; damaged ones are skipped."""
    for step in complete_steps(checkpoints):
        try:
            Manifest.read(checkpoints / step_name(step))
        except RenamedCheckpointError as renamed:
            return renamed
        except CheckpointError:
            continue
    return None


@dataclass(frozen=True)
class FileChecksum:
    """Size of a file and the xxh3-128 digest of its bytes."""

    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a complete checkpoint folder.

    `ranks` are the ranks whose parts are in it: all ranks, unless each node has a separate folder.
    """

    step: int
    world_size: int
    ranks: tuple[int, ...]
    host: str
    token: str
    eval_loss: float | None
    files: Mapping[str, FileChecksum]

    @property
    def parts(self) -> list[str]:
        """Names of the parts of `ranks`."""
        return [part_name(rank, self.world_size) for rank in self.ranks]

    @property
    def absent_parts(self) -> list[str]:
        """Names of the parts of other ranks, which other nodes keep."""
        return [part_name(rank, self.world_size) for rank in range(self.world_size) if rank not in self.ranks]

    @property
    def num_bytes(self) -> int:
        """Total bytes of all files."""
        return sum(file.num_bytes for file in self.files.values())

    def text(self) -> str:
        """The text of the manifest file, which ends with a checksum of the rest."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        return f"{body}\n{xxhash.xxh3_128_hexdigest(body.encode())}\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The manifest of `folder`.

        CheckpointError where there is none, a byte of it is wrong, or the folder is named after another step.
        """
        path = folder / MANIFEST
        try:
            body, _, checksum = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
        except OSError as absent:
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: {absent}", hint="take another one"
            ) from absent
        if xxhash.xxh3_128_hexdigest(body).encode() != checksum:
            raise CheckpointError(
                f"{path} is damaged: its checksum is not that of its text", hint="take another checkpoint"
            )
        tree = json.loads(body)
        if tree.pop("format") != FORMAT:
            raise CheckpointError(
                f"{path} has a format this version does not read, {FORMAT} being known",
                hint="use the version that wrote it",
            )
        files = {name: FileChecksum(**file) for name, file in tree.pop("files").items()}
        manifest = cls(**{**tree, "ranks": tuple(tree["ranks"])}, files=files)
        named, step = _FINAL.fullmatch(folder.absolute().name), manifest.step
        if named and int(named[1]) != step:
            raise RenamedCheckpointError(
                f"{folder} was renamed: its name says step {int(named[1])} and it holds step {step}",
                hint=f"rename it to {step_name(step)}, or to a name that says no step",
            )
        return manifest


class ChecksummedFile:
    """A new file whose checksum is computed while it is written; it is on disk once `close` has returned."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._total = 0

    def write(self, data: memoryview | bytes) -> None:
        """Write all of `data`."""
        view = memoryview(data)
        self._digest.update(view)
        self._total += len(view)
        while view:
            view = view[self._file.write(view) :]

    def close(self) -> FileChecksum:
        """Flush the file to disk, and return its checksum."""
        os.fsync(self._file.fileno())
        self._file.close()
        return FileChecksum(self._total, self._digest.hexdigest())


def write_checksummed(path: Path, chunks: Iterable[memoryview | bytes]) -> FileChecksum:
    """Write `chunks` to a new file and flush it to disk."""
    file = ChecksummedFile(path)
    for chunk in chunks:
        file.write(chunk)
    return file.close()


def byte_pieces(data: memoryview) -> Iterable[memoryview]:
    """Split `data` into pieces of bounded size."""
    return (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))


def checksum_of(path: Path) -> FileChecksum:
    """Size and checksum of a file, which is read in pieces of bounded size."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileChecksum(file.tell(), digest.hexdigest())


def mark_part_written(part: Path, checksum: FileChecksum) -> None:
    """Write the checksum of `part` to a file next to it, whose existence marks the part as complete."""
    unnamed = part.with_name(part.name + ".aside")
    write_checksummed(unnamed, [json.dumps(asdict(checksum)).encode()])
    unnamed.rename(part.with_name(part.name + _STATUS))


@dataclass(frozen=True)
class CommitJob:
    """A checkpoint to be completed in the folder `partial`.

    `manifest` has no files yet. `texts` maps names of new files to contents, and `linked` maps names to existing files.
    """

    partial: Path
    manifest: Manifest
    texts: Mapping[str, str]
    linked: Mapping[str, Path]


def commit(job: CommitJob, keep_waiting: Callable[[], bool]) -> Path:
    """Complete a checkpoint: rename its folder to `step-N` once all its files are on disk, and return the new path.

    Only a folder with such a name counts as a checkpoint.

    Before that, write the texts of `job`, link its files, wait for the parts that other ranks write, and write a
    manifest of all files. TimeoutError if `keep_waiting` returns false while parts are missing. An older folder of the
    same step is removed at the end.
    """
    partial, manifest = job.partial, job.manifest
    sums = {name: write_checksummed(partial / name, [text.encode()]) for name, text in job.texts.items()}
    for name, source in job.linked.items():
        link_or_copy(source, partial / name)
        # The content of a hard link may still be in memory only. Once it is on disk, this costs nothing.
        synchronise(partial / name)
        sums[name] = checksum_of(partial / name)
    for folder in {(partial / name).parent for name in job.linked}:
        synchronise(folder)
    sums |= _wait_for_parts(partial, manifest.parts, keep_waiting)
    complete = replace(manifest, files=dict(sorted(sums.items())))
    for name in manifest.parts:
        (partial / (name + _STATUS)).unlink()
    write_checksummed(partial / MANIFEST, [complete.text().encode()])
    synchronise(partial)
    final = partial.with_name(step_name(manifest.step))
    replaced = final.with_name(f"{final.name}.replaced-{manifest.token}")
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    synchronise(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a partly removed one never looks complete."""
    removing = folder if ".removing" in folder.name else folder.with_name(folder.name + ".removing")
    if folder.exists():
        folder.rename(removing)
    shutil.rmtree(removing, ignore_errors=True)


def rename_unusable(folder: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that it is neither resumed from nor counted; returns the new path."""
    unused = next(
        path
        for number in range(1, 10_000)
        if not (path := folder.with_name(f"{folder.name}.unusable-{number}")).exists()
    )
    return folder.rename(unused)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link an unchanging file to the new path `target`, or copy it where the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as refused:
        if refused.errno not in _NO_LINKS:
            raise
        with source.open("rb") as file:
            write_checksummed(target, iter(lambda: file.read(_CHUNK_BYTES), b""))


def _wait_for_parts(partial: Path, names: Sequence[str], keep_waiting: Callable[[], bool]) -> dict[str, FileChecksum]:
    sums: dict[str, FileChecksum] = {}
    while True:
        # List the folder to see files of other hosts: NFS caches that a name is absent when it is looked up too early.
        seen = {entry.name for entry in os.scandir(partial)}
        for name in [name for name in names if name not in sums and name + _STATUS in seen]:
            sums[name] = FileChecksum(**json.loads((partial / (name + _STATUS)).read_bytes()))
        if len(sums) == len(names):
            return sums
        if not keep_waiting():
            raise TimeoutError(f"{len(names) - len(sums)} of {len(names)} parts were not written")
        time.sleep(_POLL_SECONDS)


def damage_of(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """A line for each damaged file of a complete checkpoint: missing, or of another size or checksum."""
    damage = []
    for name in names:
        path, wanted = folder / name, manifest.files[name]
        size = path.stat().st_size if path.is_file() else None
        if size != wanted.num_bytes:
            damage.append(
                f"{path} has {size} bytes, the manifest says {wanted.num_bytes}"
                if size is not None
                else f"{path} is missing"
            )
        elif (seen := checksum_of(path)) != wanted:
            damage.append(f"{path} is damaged: checksum {seen.xxh3_128}, the manifest says {wanted.xxh3_128}")
    return damage


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps whose folders have their final name, oldest first."""
    names = (_FINAL.fullmatch(path.name) for path in checkpoints.glob(f"{_PREFIX}*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def unfinished_folders(checkpoints: Path) -> list[Path]:
    """Folders that were not finished, or not fully removed."""
    return sorted(path for path in checkpoints.glob("*") if path.is_dir() and _UNFINISHED.fullmatch(path.name))
