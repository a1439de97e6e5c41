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
"""The splits to read where none is named, by purpose; the first that exists is read."""


def splits_of(name: str) -> set[str]:
    """The splits that words of `name` denote: `test` for `test-00000-of-00001.parquet`, none for `contest.json`."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    return {split for split, own in _WORDS.items() if own & words}


def split_of_file(path: PurePath) -> str:
    """The split of a file by its name, else by that of the nearest folder of its path; empty for none."""
    for part in reversed(path.parts):
        splits = splits_of(part)
        if splits:
            return splits.pop() if len(splits) == 1 else ""
    return ""
