"""What an ONNX folder is held against later: sums of its files, and what plain transformers computed when it was
exported.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from ds_finetune.errors import ExportError
from ds_finetune.export.onnx.comparison import WHOLE, InputCase, OnnxComparison, Reference, compare, is_kept
from ds_finetune.export.verify.record import MODEL, ONNX_FORMAT, RECORD, UNVERIFIED
from ds_finetune.export.verify.verify import VerificationResult
from ds_finetune.units import GIB, MIB

_STRETCH = MIB
"""Bytes that have a sum of their own, so that what changed can be named."""
_KEPT_LOGITS = 1024
"""Logits of a position that are kept at least; so many more that the positions of the longest case meet every row of
the head.
"""


@dataclass(frozen=True)
class FileSums:
    """Bytes of a file, and xxh3 of each `_STRETCH` of them."""

    size: int
    sums: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "FileSums":
        """Of a file as it is; one stretch is in memory."""
        with path.open("rb") as file:
            sums = tuple(xxhash.xxh3_64_hexdigest(piece) for piece in iter(lambda: file.read(_STRETCH), b""))
        return cls(path.stat().st_size, sums)

    def changed(self, found: "FileSums") -> list[tuple[int, int]]:
        """First and last byte of each run of stretches that `found` has otherwise, is short of, or has beyond."""
        count = max(len(self.sums), len(found.sums))
        odd = [number for number in range(count) if self.sums[number : number + 1] != found.sums[number : number + 1]]
        runs: list[tuple[int, int]] = []
        for number in odd:
            begin, end = number * _STRETCH, min((number + 1) * _STRETCH, max(self.size, found.size)) - 1
            runs[-1:] = [(runs[-1][0], end)] if runs and runs[-1][1] == begin - 1 else [*runs[-1:], (begin, end)]
        return runs


@dataclass(frozen=True)
class OnnxRecord:
    """The record of an ONNX folder: what was written, what it was compared with, and what the comparison gave.

    `reference` holds about `_KEPT_LOGITS` logits of each position, other ones at each.
    """

    about: Mapping[str, Any]
    files: Mapping[str, FileSums]
    reference: Reference

    @classmethod
    def of(cls, folder: Path, reference: Reference, about: Mapping[str, Any]) -> "OnnxRecord":
        """Of a folder that has just been written and compared; `about` is kept for a reader."""
        return cls(about, {path.name: FileSums.of(path) for path in _files(folder)}, reference)

    def write(self, folder: Path) -> None:
        """Write RECORD into `folder`."""
        cases = [_case_tree(case, self.reference, self._stride()) for case in self.reference.logits]
        tree = {
            "format": ONNX_FORMAT,
            **self.about,
            "files": {name: asdict(sums) for name, sums in self.files.items()},
            "cases": cases,
            "tokens": self.reference.tokens.tolist(),
            "leads": self.reference.leads.tolist(),
            "experts": self.reference.experts,
        }
        (folder / RECORD).write_text(json.dumps({**tree, "sum": _sum_of(tree)}) + "\n", encoding="utf-8")

    def _stride(self) -> int:
        """Distance between the kept logits of a position."""
        vocab = self.reference.logits[WHOLE[-1]].shape[-1]
        return min(-(-vocab // _KEPT_LOGITS), int(WHOLE[-1].mask().sum()))

    @classmethod
    def read(cls, folder: Path) -> "OnnxRecord":
        """What `write` wrote; ExportError where there is none, or it is torn or of another format."""
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
        if tree["format"] != ONNX_FORMAT:
            raise ValueError(f"its format is {tree['format']}, not {ONNX_FORMAT}")
        if tree.pop("sum") != _sum_of(tree):
            raise ValueError("its own sum is another: it was changed")
        cases = {InputCase(tuple(each["pads"]), each["length"], tuple(each["chunks"])): each for each in tree["cases"]}
        reference = Reference(
            logits={case: _logits_of(case, each) for case, each in cases.items()},
            ids={case: np.array(each["ids"], dtype=np.int64) for case, each in cases.items()},
            tokens=np.array(tree["tokens"], dtype=np.int64),
            leads=np.array(tree["leads"], dtype=np.float32),
            experts=tree["experts"],
            strides={case: each["stride"] for case, each in cases.items()},
            largest={case: each["largest"] for case, each in cases.items()},
        )
        return cls(
            tree, {name: FileSums(each["size"], tuple(each["sums"])) for name, each in tree["files"].items()}, reference
        )


def check_onnx(folder: Path) -> VerificationResult:
    """Hold an ONNX folder against its record, and mark it: UNVERIFIED goes where all is well, and says why where not.

    Its files are summed and compared with what was written; where they are the same, ONNX Runtime's logits of the
    recorded tokens, whole and onto a growing cache, are compared with those that plain transformers gave, and
    greedy tokens too. ExportError where there is no record that can be read.
    """
    record = OnnxRecord.read(folder)
    problems, lines = _summed(folder, record)
    if not problems:
        verdict = compare(folder, record.reference)
        problems, lines = list(verdict.failures), [*lines, _said(verdict)]
    marker = folder / UNVERIFIED
    if problems:
        marker.write_text("\n".join(problems) + "\n", encoding="utf-8")
    else:
        marker.unlink(missing_ok=True)
    return VerificationResult(folder, tuple(problems), tuple(lines))


def _said(verdict: OnnxComparison) -> str:
    reached = f", reaching {verdict.experts}" if verdict.experts else ""
    flipped = f", {verdict.beyond} beyond" if verdict.beyond else ""
    return (
        f"ONNX Runtime on the CPU: {verdict.positions} positions{reached}, largest difference {verdict.largest:.1e} "
        "of the largest logit "
        f"(tolerance {verdict.tolerance:g}){flipped}, {verdict.new_tokens_differing} greedy tokens differ"
    )


def _summed(folder: Path, record: OnnxRecord) -> tuple[list[str], list[str]]:
    """Problems and lines about the files on the disk."""
    found = {path.name: FileSums.of(path) for path in _files(folder)}
    problems = [f"{name} was written and is gone" for name in sorted(record.files.keys() - found.keys())]
    changed = {name: sums.changed(found[name]) for name, sums in record.files.items() if name in found}
    for name, runs in changed.items():
        weights = _weights_at(folder, name, runs) if not changed.get(MODEL) else []
        inside = f", in {', '.join(weights)}" if weights else ""
        problems += [f"{name} holds other bytes than were written, within {_ranges(runs)}{inside}"] if runs else []
    added = sorted(found.keys() - record.files.keys())
    size = sum(sums.size for sums in found.values()) / GIB
    lines = [] if problems else [f"{len(record.files)} files, each with the bytes that were written: {size:.2f} GiB"]
    return problems, [*lines, *([f"not of the export: {', '.join(added)}"] if added else [])]


def _ranges(runs: list[tuple[int, int]]) -> str:
    return ", ".join(f"bytes {begin:,} to {end:,}" for begin, end in runs)


def _weights_at(folder: Path, name: str, runs: list[tuple[int, int]]) -> list[str]:
    """Weights of the graph that lie in a range of the file `name`."""
    import onnx

    if name == MODEL or not runs or not (folder / MODEL).is_file():
        return []
    found = []
    for tensor in onnx.load(folder / MODEL, load_external_data=False).graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place.get("location") == name:
            begin = int(place["offset"])
            found += (
                [tensor.name]
                if any(begin <= last and first < begin + int(place["length"]) for first, last in runs)
                else []
            )
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name not in (RECORD, UNVERIFIED))


def _case_tree(case: InputCase, reference: Reference, stride: int) -> dict[str, Any]:
    """A case with the logits of its tokens that are kept, fp32, one position behind the other."""
    at = case.mask().astype(bool)
    wanted = reference.logits[case][at]
    kept = wanted[is_kept(wanted.shape, stride)].astype("<f4")
    return {
        **asdict(case),
        "ids": reference.ids[case].tolist(),
        "stride": stride,
        "vocab": wanted.shape[1],
        "largest": float(np.abs(wanted).max()),
        "logits": base64.b64encode(kept.tobytes()).decode(),
    }


def _logits_of(case: InputCase, tree: Mapping[str, Any]) -> NDArray[np.float32]:
    """Logits [rows, length, vocabulary] where they were kept, elsewhere zero."""
    at = case.mask().astype(bool)
    wanted = np.zeros((int(at.sum()), tree["vocab"]), dtype=np.float32)
    wanted[is_kept(wanted.shape, tree["stride"])] = np.frombuffer(base64.b64decode(tree["logits"]), dtype="<f4")
    logits = np.zeros((*at.shape, tree["vocab"]), dtype=np.float32)
    logits[at] = wanted
    return logits


def _sum_of(tree: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(tree).encode())
