"""Reads `ranks.jsonl`: the step time of each rank without collectives (written by observers/writers.py)."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.units import MIB

_MOST_BYTES = 8 * MIB
_MOST_INTEGER = 2**53


def read_rank_times(path: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Steps [n] and seconds [n, ranks] of the last 8 MiB of the file; None where there are none.

    Only the lines with the last line's number of ranks count: a run may resume on another number.
    """
    try:
        with path.open("rb") as file:
            start = max(path.stat().st_size - _MOST_BYTES, 0)
            file.seek(start)
            lines = file.read(_MOST_BYTES).splitlines()[bool(start) :]
    except OSError:
        return None
    found = [times for line in lines if (times := _times_of(line)) is not None]
    found = [times for times in found if len(times[1]) == len(found[-1][1])]
    if not found:
        return None
    return np.array([step for step, _ in found], dtype=np.int64), np.array([seconds for _, seconds in found])


def _times_of(line: bytes) -> tuple[int, list[float]] | None:
    try:
        record = json.loads(line)
        step, seconds = record["step"], [float(each) for each in record["seconds"]]
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    return (step, seconds) if isinstance(step, int) and 0 <= step < _MOST_INTEGER and seconds else None
