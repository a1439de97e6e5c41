"""The record that an ONNX folder is verified against: digests of its files, and results of plain transformers."""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ds_finetune.config.units import GIB, MIB
from ds_finetune.errors import ExportError
from ds_finetune.export.classifiers import holds_classifier
from ds_finetune.export.formats import RECORD
from ds_finetune.export.onnx import MODEL
from ds_finetune.export.onnx.comparison import (
    WHOLE,
    InputCase,
    OnnxComparison,
    Reference,
    compare,
    is_sampled,
    make_reference,
)
from ds_finetune.export.onnx.scores import ScoreReference, compare_scores, make_score_reference
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.export.verify.verify import VerificationResult, mark_folder

FORMAT = "onnx 1"
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


@dataclass(frozen=True)
class OnnxRecord:
    """The record of an ONNX folder."""

    about: Mapping[str, Any]
    """The result of the comparison, and versions of packages, for people who read the file."""
    files: Mapping[str, FileSums]
    """The files that were written, by name."""
    reference: Reference | ScoreReference
    """Has about `_SAMPLED_LOGITS` logits of each position, at different rows of the head, or all of a classifier."""

    @classmethod
    def of(cls, folder: Path, reference: Reference | ScoreReference, about: Mapping[str, Any]) -> "OnnxRecord":
        """The record of a folder that has just been written and compared."""
        return cls(about, {path.name: FileSums.of(path) for path in _files(folder)}, reference)

    def write(self, folder: Path) -> None:
        """Write the file RECORD into `folder`."""
        of_reference = (
            self.reference.as_tree() if isinstance(self.reference, ScoreReference) else _reference_tree(self.reference)
        )
        tree = {
            "format": FORMAT,
            **self.about,
            "files": {name: asdict(sums) for name, sums in self.files.items()},
            **of_reference,
        }
        (folder / RECORD).write_text(json.dumps({**tree, "sum": _sum_of(tree)}) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "OnnxRecord":
        """Read the file RECORD; ExportError where there is none, or it is damaged or of another format."""
        try:
            tree: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            return cls._of(tree)
        except FileNotFoundError:
            raise ExportError(
                f"`{folder}` holds no {RECORD}", hint="name a folder that `export --format onnx` wrote"
            ) from None
        except (KeyError, TypeError, ValueError) as broken:
            raise ExportError(f"{folder}/{RECORD} cannot be read: {broken}", hint="export the folder again") from broken

    @classmethod
    def _of(cls, tree: dict[str, Any]) -> "OnnxRecord":
        if tree["format"] != FORMAT:
            raise ValueError(f"its format is {tree['format']}, not {FORMAT}")
        if tree.pop("sum") != _sum_of(tree):
            raise ValueError("its own digest differs: it was changed")
        reference = ScoreReference.from_tree(tree) if "texts" in tree else _reference_from(tree)
        return cls(
            tree, {name: FileSums(each["size"], tuple(each["sums"])) for name, each in tree["files"].items()}, reference
        )


def reference_of(folder: Path) -> Reference | ScoreReference:
    """What plain transformers computes with the model of `folder`."""
    return make_score_reference(folder) if holds_classifier(folder) else make_reference(folder)


def compare_with(folder: Path, reference: Reference | ScoreReference) -> OnnxComparison:
    """ONNX Runtime's results of `folder` compared with `reference`."""
    if isinstance(reference, ScoreReference):
        return compare_scores(folder, reference)
    return compare(folder, reference)


def verify_onnx_folder(folder: Path) -> VerificationResult:
    """Compare an ONNX folder with its record and mark it: the file UNVERIFIED is removed, or says what is wrong.

    Its files are compared with what was written. Where they are the same, logits and greedy tokens of ONNX Runtime are
    compared with the recorded ones of plain transformers, for tokens given at once and onto a growing cache.
    ExportError where there is no record that can be read.
    """
    record = OnnxRecord.read(folder)
    problems, lines = _check_files(folder, record)
    if not problems:
        comparison = compare_with(folder, record.reference)
        problems, lines = list(comparison.failures), [*lines, comparison.line()]
    result = VerificationResult(folder, tuple(problems), tuple(lines))
    mark_folder(result)
    return result


def _check_files(folder: Path, record: OnnxRecord) -> tuple[list[str], list[str]]:
    """Problems with the files on the disk, and lines that say what was compared."""
    present = {path.name: FileSums.of(path) for path in _files(folder)}
    problems = [f"{name} was written and is missing" for name in sorted(record.files.keys() - present.keys())]
    changed = {name: sums.differences(present[name]) for name, sums in record.files.items() if name in present}
    for name, runs in changed.items():
        weights = _weights_at(folder, name, runs) if not changed.get(MODEL) else []
        inside = f", in {', '.join(weights)}" if weights else ""
        problems += [f"{name} holds other bytes than were written, within {_ranges(runs)}{inside}"] if runs else []
    added = sorted(present.keys() - record.files.keys())
    size = sum(sums.size for sums in present.values()) / GIB
    lines = [] if problems else [f"{len(record.files)} files, each with the bytes that were written: {size:.2f} GiB"]
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


def _reference_tree(reference: Reference) -> dict[str, Any]:
    vocab = reference.logits[WHOLE[-1]].shape[-1]
    stride = min(-(-vocab // _SAMPLED_LOGITS), int(WHOLE[-1].mask().sum()))
    return {
        "cases": [_case_tree(case, reference, stride) for case in reference.logits],
        "tokens": reference.tokens.tolist(),
        "leads": reference.leads.tolist(),
        "experts": reference.experts,
    }


def _reference_from(tree: Mapping[str, Any]) -> Reference:
    cases = {InputCase(tuple(each["pads"]), each["length"], tuple(each["chunks"])): each for each in tree["cases"]}
    return Reference(
        logits={case: _logits_of(case, each) for case, each in cases.items()},
        ids={case: np.array(each["ids"], dtype=np.int64) for case, each in cases.items()},
        tokens=np.array(tree["tokens"], dtype=np.int64),
        leads=np.array(tree["leads"], dtype=np.float32),
        experts=tree["experts"],
        strides={case: each["stride"] for case, each in cases.items()},
        largest={case: each["largest"] for case, each in cases.items()},
    )


def _case_tree(case: InputCase, reference: Reference, stride: int) -> dict[str, Any]:
    """A case with the sampled logits of its tokens, flat, in order of positions, in fp32."""
    logits = reference.logits[case][case.mask().astype(bool)]
    sampled = logits[is_sampled(logits.shape, stride)].astype("<f4")
    return {
        **asdict(case),
        "ids": reference.ids[case].tolist(),
        "stride": stride,
        "vocab": logits.shape[1],
        "largest": float(np.abs(logits).max()),
        "logits": base64.b64encode(sampled.tobytes()).decode(),
    }


def _logits_of(case: InputCase, tree: Mapping[str, Any]) -> NDArray[np.float32]:
    """Logits [rows, length, vocabulary]; zero where they were not recorded."""
    is_token = case.mask().astype(bool)
    rows = np.zeros((int(is_token.sum()), tree["vocab"]), dtype=np.float32)
    rows[is_sampled(rows.shape, tree["stride"])] = np.frombuffer(base64.b64decode(tree["logits"]), dtype="<f4")
    logits = np.zeros((*is_token.shape, tree["vocab"]), dtype=np.float32)
    logits[is_token] = rows
    return logits


def _sum_of(tree: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(tree).encode())
