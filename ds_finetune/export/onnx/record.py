"""The record that an ONNX folder is verified against: digests of its files, and results of plain transformers."""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ds_finetune.config.units import GIB, MIB
from ds_finetune.errors import ExportError
from ds_finetune.export.onnx import MODEL
from ds_finetune.export.onnx.comparison import Case, Reference, compare, is_sampled
from ds_finetune.export.output_folder import RECORD
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.export.verify.verify import VerificationResult, mark_folder

FORMAT = "onnx 2"
"""Format of the record of an ONNX folder."""
_SEGMENT_BYTES = MIB
"""Bytes with a digest of their own, so that a message can name the bytes that changed."""
_SAMPLED_LOGITS = 1024
"""Minimum number of logits recorded for each position; more where the longest case would leave out rows of the head."""


@dataclass(frozen=True)
class FileSums:
    """Size of a file in bytes, and xxh3 of each `_SEGMENT_BYTES` of it."""

    size: int
    sums: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "FileSums":
        """The digests of the file at `path`; one segment at a time is in memory."""
        with path.open("rb") as file:
            sums = tuple(xxhash.xxh3_64_hexdigest(piece) for piece in iter(lambda: file.read(_SEGMENT_BYTES), b""))
        return cls(path.stat().st_size, sums)

    def differences(self, other: "FileSums") -> list[tuple[int, int]]:
        """First and last byte of each run of segments in which `other` differs, or which only one of both has."""
        count = max(len(self.sums), len(other.sums))
        changed = [n for n in range(count) if self.sums[n : n + 1] != other.sums[n : n + 1]]
        runs: list[tuple[int, int]] = []
        for number in changed:
            begin, end = number * _SEGMENT_BYTES, min((number + 1) * _SEGMENT_BYTES, max(self.size, other.size)) - 1
            runs[-1:] = [(runs[-1][0], end)] if runs and runs[-1][1] == begin - 1 else [*runs[-1:], (begin, end)]
        return runs


def write_record(folder: Path, reference: Reference, about: Mapping[str, Any]) -> None:
    """Write the file RECORD into a folder that has just been written and compared.

    `about` is the result of the comparison, and versions of packages, for people who read the file.
    """
    longest = max(len(case.logits) for case in reference.cases)
    tree = {
        "format": FORMAT,
        **about,
        "files": {path.name: asdict(FileSums.of(path)) for path in _files(folder)},
        "cases": [_case_tree(case, longest) for case in reference.cases],
        "experts": reference.experts,
        "tokens": None if reference.tokens is None else reference.tokens.tolist(),
        "leads": None if reference.leads is None else reference.leads.tolist(),
    }
    (folder / RECORD).write_text(json.dumps({**tree, "sum": _sum_of(tree)}) + "\n", encoding="utf-8")


def read_record(folder: Path) -> tuple[dict[str, FileSums], Reference]:
    """The digests of files by name, and the reference, in the file RECORD.

    ExportError where there is none, or it is damaged or of another format.
    """
    try:
        return _record_of(json.loads((folder / RECORD).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ExportError(
            f"`{folder}` holds no {RECORD}", hint="name a folder that `export --format onnx` wrote"
        ) from None
    except (KeyError, TypeError, ValueError) as broken:
        raise ExportError(f"{folder}/{RECORD} cannot be read: {broken}", hint="export the folder again") from broken


def _record_of(tree: dict[str, Any]) -> tuple[dict[str, FileSums], Reference]:
    if tree["format"] != FORMAT:
        raise ValueError(f"its format is {tree['format']}, not {FORMAT}")
    if tree.pop("sum") != _sum_of(tree):
        raise ValueError("its own digest differs: it was changed")
    tokens = None if tree["tokens"] is None else np.array(tree["tokens"], dtype=np.int64)
    leads = None if tree["leads"] is None else np.array(tree["leads"], dtype=np.float32)
    cases = tuple(_case_from(each) for each in tree["cases"])
    files = {name: FileSums(each["size"], tuple(each["sums"])) for name, each in tree["files"].items()}
    return files, Reference(cases, tree["experts"], tokens, leads)


def verify_onnx_folder(folder: Path) -> VerificationResult:
    """Compare an ONNX folder with its record and mark it: the file UNVERIFIED is removed, or says what is wrong.

    Its files are compared with what was written. Where they are the same, logits and greedy tokens of ONNX Runtime are
    compared with the recorded ones of plain transformers, for tokens given at once and onto a growing cache.
    ExportError where there is no record that can be read.
    """
    files, reference = read_record(folder)
    problems, lines = _check_files(folder, files)
    if not problems:
        comparison = compare(folder, reference)
        problems, lines = list(comparison.failures), [*lines, comparison.line()]
    result = VerificationResult(folder, tuple(problems), tuple(lines))
    mark_folder(result)
    return result


def _check_files(folder: Path, files: Mapping[str, FileSums]) -> tuple[list[str], list[str]]:
    """Problems with the files on the disk, and lines that say what was compared."""
    present = {path.name: FileSums.of(path) for path in _files(folder)}
    problems = [f"{name} was written and is missing" for name in sorted(files.keys() - present.keys())]
    changed = {name: sums.differences(present[name]) for name, sums in files.items() if name in present}
    for name, runs in changed.items():
        weights = _weights_at(folder, name, runs) if not changed.get(MODEL) else []
        inside = f", in {', '.join(weights)}" if weights else ""
        problems += [f"{name} holds other bytes than were written, within {_ranges(runs)}{inside}"] if runs else []
    added = sorted(present.keys() - files.keys())
    size = sum(sums.size for sums in present.values()) / GIB
    lines = [] if problems else [f"{len(files)} files, each with the bytes that were written: {size:.2f} GiB"]
    return problems, [*lines, *([f"not of the export: {', '.join(added)}"] if added else [])]


def _ranges(runs: list[tuple[int, int]]) -> str:
    return ", ".join(f"bytes {begin:,} to {end:,}" for begin, end in runs)


def _weights_at(folder: Path, name: str, runs: list[tuple[int, int]]) -> list[str]:
    """Names of the graph's weights that have bytes in one of the ranges `runs` of the file `name`."""
    import onnx

    if name == MODEL or not runs or not (folder / MODEL).is_file():
        return []
    names = []
    for tensor in onnx.load(folder / MODEL, load_external_data=False).graph.initializer:
        data = {entry.key: entry.value for entry in tensor.external_data}
        if data.get("location") == name:
            begin, end = int(data["offset"]), int(data["offset"]) + int(data["length"])
            names += [tensor.name] if any(begin <= last and first < end for first, last in runs) else []
    return names


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name not in (RECORD, UNVERIFIED))


def _case_tree(case: Case, longest: int) -> dict[str, Any]:
    """A case with its sampled logits, flat, in order of positions, in fp32; those of a classifier are all recorded.

    `longest` is the number of positions of the longest case, which samples every row of the head.
    """
    stride = min(-(-case.logits.shape[1] // _SAMPLED_LOGITS), longest) if case.chunks else 1
    return {
        "name": case.name,
        "ids": case.ids.tolist(),
        "mask": case.mask.tolist(),
        "chunks": case.chunks,
        "stride": stride,
        "largest": case.largest,
        "shape": case.logits.shape,
        "logits": base64.b64encode(case.logits[is_sampled(case.logits.shape, stride)].astype("<f4").tobytes()).decode(),
    }


def _case_from(tree: Mapping[str, Any]) -> Case:
    """The case of `_case_tree`; logits that were not recorded are 0."""
    logits = np.zeros(tree["shape"], dtype=np.float32)
    logits[is_sampled(logits.shape, tree["stride"])] = np.frombuffer(base64.b64decode(tree["logits"]), dtype="<f4")
    ids, mask = (np.array(tree[name], dtype=np.int64) for name in ("ids", "mask"))
    return Case(tree["name"], ids, mask, tuple(tree["chunks"]), logits, tree["stride"], tree["largest"])


def _sum_of(tree: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(tree).encode())
