"""Splits of a folder or a data set by their names, as `datasets` names them."""

import re
from collections.abc import Mapping
from pathlib import PurePath

_WORDS: Mapping[str, frozenset[str]] = {
    "train": frozenset({"train", "training"}),
    "validation": frozenset({"validation", "valid", "dev", "val"}),
    "test": frozenset({"test", "testing", "eval", "evaluation"}),
}
"""Words that name a split (datasets 5.2, data_files.py:43-47)."""
DEFAULT_SPLITS: Mapping[str, tuple[str, ...]] = {"train": ("train",), "eval": ("validation", "test")}
"""Splits that are taken where none is named, the first that is there, by what the data is for."""


def splits_of(name: str) -> set[str]:
    """Splits that the words of a name name: `test` of `test-00000-of-00001.parquet`, none of `contest.json`."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return {split for split, own in _WORDS.items() if own & words}


def split_of_file(place: PurePath) -> str:
    """The split of a file by its path within its folder: its name's, else that of the nearest folder; empty for
    none.
    """
    for part in reversed(place.parts):
        found = splits_of(part)
        if found:
            return found.pop() if len(found) == 1 else ""
    return ""
