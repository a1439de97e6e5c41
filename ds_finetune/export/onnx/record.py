"""The record that an ONNX folder is verified against: digests of its files, and results of plain transformers."""

import base64
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ds_finetune.export.file_record import FileSums, Runs, check_files, read_file_record, write_file_record
from ds_finetune.export.onnx import MODEL
from ds_finetune.export.onnx.comparison import Case, Reference, compare, is_sampled
from ds_finetune.export.verify.verify import VerificationResult, mark_folder

FORMAT = "onnx 3"
"""Format of an ONNX folder's record."""
_SAMPLED_LOGITS = 1024
"""Minimum number of logits recorded for each position; more if the longest case would miss rows of the head."""


def write_record(folder: Path, reference: Reference, about: Mapping[str, Any]) -> None:
    """Write the file RECORD into a folder that was just written and compared.

    `about` has the result of the comparison and versions of packages, for people who read the file.
    """
    longest = max(len(case.logits) for case in reference.cases)
    arrays = {"tokens": reference.tokens, "leads": reference.leads, "chosen": reference.chosen}
    tree = {
        "format": FORMAT,
        **about,
        "cases": [_case_tree(case, longest) for case in reference.cases],
        "experts": reference.experts,
        "program": reference.program,
        **{name: None if part is None else part.tolist() for name, part in arrays.items()},
    }
    write_file_record(folder, tree)


def read_record(folder: Path) -> tuple[dict[str, FileSums], Reference]:
    """The digests of files by name, and the reference, from the file RECORD.

    ExportError where the record is missing, damaged or of another format.
    """
    return read_file_record(folder, FORMAT, _reference_of)


def _reference_of(tree: Mapping[str, Any]) -> Reference:
    dtypes = {"tokens": np.int64, "leads": np.float32, "chosen": np.int64}
    arrays = {name: None if tree[name] is None else np.array(tree[name], kind) for name, kind in dtypes.items()}
    cases = tuple(_case_from(each) for each in tree["cases"])
    return Reference(cases, tree["experts"], **arrays, program=tree["program"])


def verify_onnx_folder(folder: Path) -> VerificationResult:
    """Compare an ONNX folder with its record and mark it: the file UNVERIFIED is removed, or says what is wrong.

    Files are compared with what was written. If they are equal, logits and greedy tokens of ONNX Runtime are compared
    with the recorded ones of plain transformers, for tokens given at once and for a growing cache. ExportError without
    a readable record.
    """
    files, reference = read_record(folder)
    problems, lines = check_files(folder, files, partial(_weights_at, folder))
    if not problems:
        comparison = compare(folder, reference)
        problems, lines = list(comparison.failures), [*lines, comparison.line()]
    result = VerificationResult(folder, tuple(problems), tuple(lines))
    mark_folder(result)
    return result


def _weights_at(folder: Path, name: str, changed: Mapping[str, Runs]) -> list[str]:
    """Names of the graph's weights with bytes in a changed range of the file `name`."""
    import onnx

    if changed.get(MODEL) or not (folder / MODEL).is_file():
        return []
    names = []
    for tensor in onnx.load(folder / MODEL, load_external_data=False).graph.initializer:
        data = {entry.key: entry.value for entry in tensor.external_data}
        if f"onnx/{data.get('location')}" == name:
            begin, end = int(data["offset"]), int(data["offset"]) + int(data["length"])
            names += [tensor.name] if any(begin <= last and first < end for first, last in changed[name]) else []
    return names


def _case_tree(case: Case, longest: int) -> dict[str, Any]:
    """A case as JSON, with its sampled logits in fp32, flat in order of positions; all logits of a classifier.

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
    """The inverse of `_case_tree`; logits that were not recorded are 0."""
    logits = np.zeros(tree["shape"], dtype=np.float32)
    logits[is_sampled(logits.shape, tree["stride"])] = np.frombuffer(base64.b64decode(tree["logits"]), dtype="<f4")
    ids, mask = (np.array(tree[name], dtype=np.int64) for name in ("ids", "mask"))
    return Case(tree["name"], ids, mask, tuple(tree["chunks"]), logits, tree["stride"], tree["largest"])
