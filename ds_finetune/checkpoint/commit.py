"""Files of a checkpoint: they are written with checksums, listed in a manifest, and made complete by one rename.

A rank sends jobs over a pipe to its writer process (part_writer_process.py). That process imports this module, which
therefore does not import torch.
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
from itertools import count
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
"""Names of unfinished checkpoint folders that this program makes. Other folders belong to the user."""
_FINAL = re.compile(r"step-(\d+)")
"""Folder name of a complete checkpoint, with the step. The user may give a copy of the folder any other name."""


def step_name(step: int) -> str:
    """Name of the folder with the checkpoint of a step."""
    return f"{_PREFIX}{step:06d}"


def partial_name(step: int, token: str) -> str:
    """Folder name of a checkpoint that is being written. `token` distinguishes several starts of the run."""
    return f"{step_name(step)}.partial-{token}"


def part_name(rank: int, world_size: int) -> str:
    """File name of the state that `rank` saves in a checkpoint."""
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


class RenamedCheckpointError(CheckpointError):
    """A folder is named after one step, but has the checkpoint of another step."""


def find_renamed_checkpoint(checkpoints: Path) -> RenamedCheckpointError | None:
    """Make the error for the first renamed checkpoint folder in `checkpoints`, or None; damaged ones are skipped."""
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
    """Size of a file in bytes, and the xxh3-128 digest of its content."""

    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """Manifest of a complete checkpoint folder: its step, and its files with checksums. `ranks` are the ranks whose
    parts are in the folder: all ranks, or the ranks of one node if each node has its own folder.
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
        """Names of the part files in this checkpoint folder. Each has the state of one rank."""
        return [part_name(rank, self.world_size) for rank in self.ranks]

    @property
    def absent_parts(self) -> list[str]:
        """Names of the files with the state of ranks on other nodes, which are in the folders of those nodes."""
        return [part_name(rank, self.world_size) for rank in range(self.world_size) if rank not in self.ranks]

    @property
    def num_bytes(self) -> int:
        """Total size of the checkpoint's files in bytes."""
        return sum(file.num_bytes for file in self.files.values())

    def text(self) -> str:
        """Text of the manifest file. Its last line is a checksum of the other lines."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        return f"{body}\n{xxhash.xxh3_128_hexdigest(body.encode())}\n"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest of a checkpoint folder. CheckpointError if it is missing, damaged, or of another step."""
        path = folder / MANIFEST
        try:
            body, _, checksum = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
        except OSError as absent:
            raise CheckpointError(
                f"{folder} is not a complete checkpoint: {absent}", hint="use another checkpoint"
            ) from absent
        if xxhash.xxh3_128_hexdigest(body).encode() != checksum:
            raise CheckpointError(
                f"{path} is damaged: its checksum does not fit its text", hint="use another checkpoint"
            )
        tree = json.loads(body)
        if tree.pop("format") != FORMAT:
            raise CheckpointError(
                f"{path} has an unknown format; this version reads format {FORMAT}",
                hint="use the version of ds_finetune that wrote the checkpoint",
            )
        files = {name: FileChecksum(**file) for name, file in tree.pop("files").items()}
        manifest = cls(**{**tree, "ranks": tuple(tree["ranks"])}, files=files)
        named, step = _FINAL.fullmatch(folder.absolute().name), manifest.step
        if named and int(named[1]) != step:
            raise RenamedCheckpointError(
                f"{folder} was renamed: its name says step {int(named[1])}, but it is the checkpoint of step {step}",
                hint=f"rename the folder to {step_name(step)}, or to a name without a step",
            )
        return manifest


def write_checksummed(path: Path, chunks: Iterable[memoryview | bytes]) -> FileChecksum:
    """Write `chunks` to a new file, flush it to the disk, and return its checksum."""
    digest, total = xxhash.xxh3_128(), 0
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            view = memoryview(chunk)
            digest.update(view)
            total += len(view)
            while view:
                view = view[file.write(view) :]
            # The memory of this chunk is released before the next chunk is made.
            del chunk, view
        os.fsync(file.fileno())
    return FileChecksum(total, digest.hexdigest())


def byte_pieces(data: memoryview) -> Iterable[memoryview]:
    """Split `data` into chunks of at most 16 MiB."""
    return (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))


def checksum_of(path: Path) -> FileChecksum:
    """Size and checksum of a file, which is read in bounded pieces."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return FileChecksum(file.tell(), digest.hexdigest())


def mark_part_written(part: Path, checksum: FileChecksum) -> None:
    """Write the checksum of the part file `part` to a file beside it, which marks the part as complete."""
    unnamed = part.with_name(part.name + ".aside")
    write_checksummed(unnamed, [json.dumps(asdict(checksum)).encode()])
    unnamed.rename(part.with_name(part.name + _STATUS))


@dataclass(frozen=True)
class CommitJob:
    """A checkpoint to complete in the folder `partial`. `manifest` does not list files yet. `texts` are the
    contents of files to write, by name; `linked` are existing files to hard-link, by their new names.
    """

    partial: Path
    manifest: Manifest
    texts: Mapping[str, str]
    linked: Mapping[str, Path]


@dataclass(frozen=True)
class ReserveJob:
    """Job of the writer process: allocate `num_bytes` of shared memory in advance."""

    num_bytes: int


@dataclass(frozen=True)
class WriteJob:
    """Job of the writer process: write shared memory to the file `part`, then run `commit` if it is given."""

    part: Path
    num_bytes: int
    commit: CommitJob | None


@dataclass(frozen=True)
class RemoveJob:
    """Job of the writer process: remove the checkpoints `folders`."""

    folders: list[Path]


class StopWaiting:
    """Message to the writer process, without reply: stop waiting for part files, since a rank failed to write one."""


Job = ReserveJob | WriteJob | RemoveJob


@dataclass(frozen=True)
class JobDone:
    """Reply of the writer process to a job of the class `job`. `error` is empty if the job succeeded."""

    job: type[Job]
    error: str


def commit(job: CommitJob, keep_waiting: Callable[[], bool]) -> Path:
    """Complete a checkpoint: when all its files are on the disk, rename its folder to `step-N`. Returns the new path.

    Only a folder with such a name counts as a checkpoint. Before the rename, the texts of `job` are written, its files
    are linked, the part files of other ranks are awaited, and a manifest of all files is written. TimeoutError if
    `keep_waiting` returns False while part files are missing. An older folder of the same step is removed at the end.
    """
    partial, manifest = job.partial, job.manifest
    sums = {name: write_checksummed(partial / name, [text.encode()]) for name, text in job.texts.items()}
    for name, source in job.linked.items():
        link_or_copy(source, partial / name)
        # The content of a hard-linked file may not be on the disk yet.
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
    """Remove a checkpoint. It is renamed first, so that a partly removed checkpoint never looks complete."""
    removing = folder if ".removing" in folder.name else folder.with_name(folder.name + ".removing")
    if folder.exists():
        folder.rename(removing)
    shutil.rmtree(removing, ignore_errors=True)


def rename_unusable(folder: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that no run resumes from it. Returns the new path."""
    names = (f"{folder.name}.unusable-{number}" for number in count(1))
    return folder.rename(next(path for path in map(folder.with_name, names) if not path.exists()))


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link an unchanging file to the new path `target`; copy it if the file system has no hard links."""
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
        # The folder is listed, because looking a name up makes NFS remember for a while that the file does not exist.
        seen = {entry.name for entry in os.scandir(partial)}
        for name in [name for name in names if name not in sums and name + _STATUS in seen]:
            sums[name] = FileChecksum(**json.loads((partial / (name + _STATUS)).read_bytes()))
        if len(sums) == len(names):
            return sums
        if not keep_waiting():
            raise TimeoutError(f"{len(names) - len(sums)} of {len(names)} parts were not written")
        time.sleep(_POLL_SECONDS)


def damage_of(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """List the damaged files of a complete checkpoint: missing, or with another size or checksum than in `manifest`."""
    damage = []
    for name in names:
        path, expected = folder / name, manifest.files[name]
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            damage.append(f"{path} is missing")
        elif size != expected.num_bytes:
            damage.append(f"{path} has {size} bytes, the manifest says {expected.num_bytes}")
        elif (seen := checksum_of(path)) != expected:
            damage.append(f"{path} is damaged: checksum {seen.xxh3_128}, the manifest says {expected.xxh3_128}")
    return damage


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first."""
    names = (_FINAL.fullmatch(path.name) for path in checkpoints.glob(f"{_PREFIX}*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def unfinished_folders(checkpoints: Path) -> list[Path]:
    """Folders of checkpoints that were not completely written, or not completely removed."""
    return sorted(path for path in checkpoints.glob("*") if path.is_dir() and _UNFINISHED.fullmatch(path.name))
