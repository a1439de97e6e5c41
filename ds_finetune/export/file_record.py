"""The record of a folder, with digests of its files: detects every changed byte, also of the record itself."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ds_finetune.config.units import MIB, bytes_text
from ds_finetune.errors import ConfigError, ExportError
from ds_finetune.export.output_folder import RECORD, as_output_errors
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.export.verify.verify import VerificationResult, mark_folder

_SEGMENT_BYTES = MIB
"""Bytes that share a digest, so that a message can name the changed range."""
Runs = list[tuple[int, int]]
"""Ranges of a file: first and last byte of each."""


@dataclass(frozen=True)
class FileSums:
    """Size of a file in bytes, and xxh3 of each `_SEGMENT_BYTES` of the file."""

    size: int
    sums: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "FileSums":
        """The digests of the file at `path`; holds one segment at a time in memory."""
        with path.open("rb") as file:
            sums = tuple(xxhash.xxh3_64_hexdigest(piece) for piece in iter(lambda: file.read(_SEGMENT_BYTES), b""))
        return cls(path.stat().st_size, sums)

    def differences(self, other: "FileSums") -> Runs:
        """First and last byte of each run of segments that differ from `other`, or that only one of both has."""
        count = max(len(self.sums), len(other.sums))
        changed = [n for n in range(count) if self.sums[n : n + 1] != other.sums[n : n + 1]]
        runs: Runs = []
        for number in changed:
            begin, end = number * _SEGMENT_BYTES, min((number + 1) * _SEGMENT_BYTES, max(self.size, other.size)) - 1
            runs[-1:] = [(runs[-1][0], end)] if runs and runs[-1][1] == begin - 1 else [*runs[-1:], (begin, end)]
        return runs


def write_file_record(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write `tree`, the digests of all files in `folder`, and a digest of both, to the file RECORD."""
    record = {**tree, "files": {name: asdict(FileSums.of(path)) for name, path in _files(folder)}}
    with as_output_errors(folder):
        (folder / RECORD).write_text(json.dumps({**record, "sum": _sum_of(record)}) + "\n", encoding="utf-8")


def read_file_record(folder: Path, kind: str) -> tuple[dict[str, FileSums], dict[str, Any]]:
    """Read the file RECORD of the format `kind`, e.g. `onnx 3`: the digests of files by name, and its tree.

    ExportError where the record is missing, damaged or of another format.
    """
    try:
        tree = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        wrong = "" if tree["format"] == kind else f"its format is {tree['format']}, not {kind}"
        if not wrong and tree.pop("sum") != _sum_of(tree):
            wrong = "its own digest differs: it was changed"
        entries = {} if wrong else tree["files"]
        files = {name: FileSums(each["size"], tuple(each["sums"])) for name, each in entries.items()}
    except FileNotFoundError:
        name = kind.partition(" ")[0]
        raise ExportError(
            f"`{folder}` holds no {RECORD}", hint=f"name a folder that `export --format {name}` wrote"
        ) from None
    except (KeyError, TypeError, ValueError) as broken:
        wrong = str(broken)
    if wrong:
        raise ExportError(f"{folder}/{RECORD} cannot be read: {wrong}", hint="export the folder again")
    return files, tree


Tree = Mapping[str, Any]
"""The content of a record."""
Findings = tuple[list[str], list[str]]
"""Lines on differences, and lines on what was compared."""


def verify_files(
    folder: Path,
    base: Path | None,
    *,
    kind: str,
    parts_at: Callable[[Path, Tree, str, Mapping[str, Runs]], list[str]] = lambda *_: [],
    compare: Callable[[Path, Tree], Findings] = lambda *_: ([], []),
) -> VerificationResult:
    """Compare the files of a folder of the format `kind` with the digests in its record, and mark the folder: the file
    UNVERIFIED is removed, or says what is wrong.

    `parts_at(folder, tree, name, changed)` names the parts of the file `name` that changed; `changed` has the changed
    ranges of bytes by file. If no file differs, `compare(folder, tree)` compares what the folder computes. ConfigError
    where a base is named, since the record is enough; ExportError without a readable record.
    """
    if base is not None:
        raise ConfigError(
            f"--base {base} is not valid with `{folder}`", hint="leave it out: the folder's record is enough"
        )
    files, tree = read_file_record(folder, kind)
    present = {name: FileSums.of(path) for name, path in _files(folder)}
    problems = [f"{name} was written and is missing" for name in sorted(files.keys() - present.keys())]
    changed = {name: sums.differences(present[name]) for name, sums in files.items() if name in present}
    for name, runs in ((name, runs) for name, runs in changed.items() if runs):
        parts = parts_at(folder, tree, name, changed)
        ranges = ", ".join(f"bytes {begin:,} to {end:,}" for begin, end in runs)
        inside = f", in {', '.join(parts)}" if parts else ""
        problems.append(f"{name} holds other bytes than were written, within {ranges}{inside}")
    added = sorted(present.keys() - files.keys())
    lines = [f"not of the export: {', '.join(added)}"] if added else []
    if not problems:
        size = sum(sums.size for sums in present.values())
        problems, compared = compare(folder, tree)
        lines = [f"{len(files)} files, each with the bytes that were written: {bytes_text(size)}", *lines, *compared]
    result = VerificationResult(folder, tuple(problems), tuple(lines))
    mark_folder(result)
    return result


def _files(folder: Path) -> list[tuple[str, Path]]:
    """Files in the folder and its subfolders, with their names relative to the folder."""
    named = [(path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file()]
    return sorted((name, path) for name, path in named if name not in (RECORD, UNVERIFIED))


def _sum_of(tree: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(tree).encode())
