"""Recognises splits by the names of files, folders and data sets, as `datasets` does."""

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
"""By purpose, the splits to look for where the run file names none; the first that exists is read."""


def splits_of(name: str) -> set[str]:
    """The splits that words in `name` stand for: `test` for `test-00000-of-00001.parquet`, none for `contest.json`."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return {split for split, own in _WORDS.items() if own & words}


def split_of_file(path: PurePath) -> str:
    """The split that a file's name contains, else the one in the nearest folder's name; empty for none or several."""
    for part in reversed(path.parts):
        splits = splits_of(part)
        if splits:
            return splits.pop() if len(splits) == 1 else ""
    return ""
