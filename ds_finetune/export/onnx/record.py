"""The record by which an ONNX folder is verified: digests of its files, and logits that plain transformers computed."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ds_finetune.export.file_record import Findings, Runs, write_file_record
from ds_finetune.export.onnx import MODEL
from ds_finetune.export.onnx.comparison import Case, Reference, compare, is_sampled

FORMAT = "onnx 3"
_SAMPLED_LOGITS = 1024
"""Maximum number of logits recorded per position, unless more are needed to record a logit of every token id."""


def write_record(folder: Path, reference: Reference, about: Mapping[str, Any]) -> None:
    """Write the file RECORD into an ONNX folder that was just written and compared. `about` has the result of the
    comparison and versions of packages, for people who read the file.
    """
    longest = max(len(case.logits) for case in reference.cases)
    cases = []
    for case in reference.cases:
        # A classifier's logits are all written. Those of a language model are sampled; the samples of the longest input
        # cover every row of the head.
        shape = case.logits.shape
        stride = min(-(-shape[1] // _SAMPLED_LOGITS), longest) if case.chunks else 1
        logits = case.logits[is_sampled(shape, stride)].astype("<f4").tobytes()
        cases.append(
            {
                "name": case.name,
                "ids": case.ids.tolist(),
                "mask": case.mask.tolist(),
                "chunks": case.chunks,
                "stride": stride,
                "largest": case.largest,
                "shape": shape,
                "logits": base64.b64encode(logits).decode(),
            }
        )
    arrays = {"tokens": reference.tokens, "leads": reference.leads, "chosen": reference.chosen}
    tree = {
        "format": FORMAT,
        **about,
        "cases": cases,
        "experts": reference.experts,
        "program": reference.program,
        **{name: None if part is None else part.tolist() for name, part in arrays.items()},
    }
    write_file_record(folder, tree)


def reference_of(tree: Mapping[str, Any]) -> Reference:
    """Read the results of plain transformers from the parsed verification record `tree`."""
    dtypes = {"tokens": np.int64, "leads": np.float32, "chosen": np.int64}
    arrays = {name: None if tree[name] is None else np.array(tree[name], kind) for name, kind in dtypes.items()}
    return Reference(tuple(map(_case_from, tree["cases"])), tree["experts"], **arrays, program=tree["program"])


def compare_with_record(folder: Path, tree: Mapping[str, Any]) -> Findings:
    """Compare logits and greedy tokens of ONNX Runtime with those in the parsed verification record `tree`."""
    comparison = compare(folder, reference_of(tree))
    return list(comparison.failures), [comparison.line()]


def weights_at(folder: Path, _: object, name: str, changed: Mapping[str, Runs]) -> list[str]:
    """Names of the graph's weights that have changed bytes in the file `name`."""
    if changed.get(MODEL) or not (folder / MODEL).is_file():
        return []
    names = []
    for tensor in onnx.load(folder / MODEL, load_external_data=False).graph.initializer:
        data = {entry.key: entry.value for entry in tensor.external_data}
        if f"onnx/{data.get('location')}" == name:
            begin, end = int(data["offset"]), int(data["offset"]) + int(data["length"])
            names += [tensor.name] if any(begin <= last and first < end for first, last in changed[name]) else []
    return names


def _case_from(tree: Mapping[str, Any]) -> Case:
    logits = np.zeros(tree["shape"], dtype=np.float32)
    logits[is_sampled(logits.shape, tree["stride"])] = np.frombuffer(base64.b64decode(tree["logits"]), dtype="<f4")
    ids, mask = (np.array(tree[name], dtype=np.int64) for name in ("ids", "mask"))
    return Case(tree["name"], ids, mask, tuple(tree["chunks"]), logits, tree["stride"], tree["largest"])
