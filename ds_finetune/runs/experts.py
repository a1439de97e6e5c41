"""Reads `experts.bin`, the loads of experts step by step (written by observers/routers.py)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def read_expert_table(path: Path) -> tuple[list[int], NDArray[Any]]:
    """Numbers of the layers, and the whole records of a table, with the fields of `TableLayout.record`.

    The table may be one that a run is writing. ValueError where it is no such table.
    """
    with path.open("rb") as file:
        header = json.loads(file.readline())
        kind = np.dtype([(name, base, tuple(shape)) for name, base, shape in header["record"]])
        return list(header["layers"]), np.fromfile(file, kind)
