"""Finds held-out rows that are training rows too."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.sources import find_sources
from ds_finetune.data.stream import StreamedRows


def overlap_notes(train: PreparedRows | StreamedRows, held_out: Mapping[str, PreparedRows]) -> list[str]:
    """A line for each held-out set with the number of its documents that have the same tokens as a training document,
    or of its pairs that have the same tokens on both sides.

    A stream is not read before training; for a stream, the line names files that are in both.
    """
    if isinstance(train, StreamedRows):
        held_out_files = {
            Path(source.path).resolve()
            for source in find_sources(train.config.paths("eval"), purpose="eval")
            if source.format != "hub"
        }
        both = [
            source.path
            for source in train.sources
            if source.format != "hub" and Path(source.path).resolve() in held_out_files
        ]
        return [f"data.eval has training files: {', '.join(both)}"] if both else []
    known, unit = train.unit_digests(), train.kind.unit
    repeated = {name: _num_repeated(rows.unit_digests(), known) for name, rows in held_out.items()}
    return [
        f"data.{name.replace('/', '.')} repeats training data: {number:,} of {held_out[name].num_units:,} "
        f"held-out {unit} have the tokens of a training {unit.removesuffix('s')}"
        for name, number in repeated.items()
        if number
    ]


def _num_repeated(held_out: NDArray[np.uint64], train: NDArray[np.uint64]) -> int:
    """Number of `held_out` digests that are in `train`.

    It does not use numpy's `isin`, which sorts both and takes far longer for millions of rows.
    """
    values, numbers = np.unique(held_out, return_counts=True)
    indices = np.minimum(np.searchsorted(values, train), len(values) - 1)
    return int(numbers[np.unique(indices[values[indices] == train])].sum())
