"""The record of an exported folder: digests of its files and of the record itself, which reveal every changed byte."""

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
"""Number of bytes of a file that share one digest; a change is located within a segment of this size."""
Runs = list[tuple[int, int]]
"""Byte ranges of a file, each as first and last byte."""


@dataclass(frozen=True)
class FileSums:
    """The size of a file in bytes, and an xxh3 digest of each segment of `_SEGMENT_BYTES`."""

    size: int
    sums: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "FileSums":
        """Compute the digests of the file at `path`; one segment at a time is held in memory."""
        with path.open("rb") as file:
            sums = tuple(xxhash.xxh3_64_hexdigest(piece) for piece in iter(lambda: file.read(_SEGMENT_BYTES), b""))
        return cls(path.stat().st_size, sums)

    def differences(self, other: "FileSums") -> Runs:
        """Byte ranges in which two versions of a file differ, including segments that only one version has."""
        count = max(len(self.sums), len(other.sums))
        changed = [n for n in range(count) if self.sums[n : n + 1] != other.sums[n : n + 1]]
        runs: Runs = []
        for number in changed:
            begin, end = number * _SEGMENT_BYTES, min((number + 1) * _SEGMENT_BYTES, max(self.size, other.size)) - 1
            runs[-1:] = [(runs[-1][0], end)] if runs and runs[-1][1] == begin - 1 else [*runs[-1:], (begin, end)]
        return runs


def write_file_record(folder: Path, tree: Mapping[str, Any]) -> None:
    """Write the file RECORD into `folder`: entries `tree`, digests of all other files, and the record's own digest."""
    record = {**tree, "files": {name: asdict(FileSums.of(path)) for name, path in _files(folder)}}
    with as_output_errors(folder):
        (folder / RECORD).write_text(json.dumps({**record, "sum": _sum_of(record)}) + "\n", encoding="utf-8")


def read_file_record(folder: Path, kind: str) -> tuple[dict[str, FileSums], dict[str, Any]]:
    """Read the file RECORD of `folder`, which must have the format `kind`, e.g. `onnx 3`. Returns the digests of files
    by name, and the other entries of the record. ExportError if the record is missing, damaged or of another format.
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
            f"`{folder}` has no file {RECORD}", hint=f"name a folder that `export --format {name}` wrote"
        ) from None
    except (KeyError, TypeError, ValueError) as broken:
        wrong = str(broken)
    if wrong:
        raise ExportError(f"{folder}/{RECORD} cannot be read: {wrong}", hint="export the folder again")
    return files, tree


Tree = Mapping[str, Any]
Findings = tuple[list[str], list[str]]
"""Result of a comparison, as lines for the user: differences, and what was compared."""


def verify_files(
    folder: Path,
    base: Path | None,
    *,
    kind: str,
    parts_at: Callable[[Path, Tree, str, Mapping[str, Runs]], list[str]] = lambda *_: [],
    compare: Callable[[Path, Tree], Findings] = lambda *_: ([], []),
) -> VerificationResult:
    """Compare the files of an exported folder with the digests in its record, and mark the folder as verified or not.

    If files differ, `parts_at(folder, tree, name, changed)` names the changed tensors of the file `name`; `tree`
    is the parsed record and `changed` has the changed byte ranges by file. If no file differs, `compare(folder, tree)`
    checks the results that the model computes. ConfigError if `base` is given, because this comparison uses no base
    model; ExportError if the record cannot be read.
    """
    if base is not None:
        raise ConfigError(
            f"--base {base} is not valid with `{folder}`",
            hint="leave --base out: the folder is compared with its own record",
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
    named = [(path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file()]
    return sorted((name, path) for name, path in named if name not in (RECORD, UNVERIFIED))


def _sum_of(tree: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(tree).encode())
