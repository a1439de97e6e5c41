"""Reads the rows of data sets on the Hugging Face hub."""

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ds_finetune.data.files import Record
from ds_finetune.data.splits import DEFAULT_SPLITS, splits_of
from ds_finetune.errors import DataError
from ds_finetune.foreign.datasets_offline import offline
from ds_finetune.foreign.hub_access import hub_problem

if TYPE_CHECKING:
    from datasets import DatasetDict


def read_hub(path: str, subset: str, split: str, *, purpose: str) -> Iterator[tuple[str, Record]]:
    """Rows of one split of a hub data set; an empty `split` stands for that of `purpose` (`train` or `eval`)."""
    splits = _load(path, subset)
    name = split or default_split(list(splits), path, purpose=purpose)
    if name not in splits:
        raise DataError(f"data set `{path}` has no split `{name}`", hint=f"its splits are {', '.join(splits)}")
    for number, record in enumerate(splits[name], start=1):
        yield f"{path}:{name} row {number}", record


def default_split(names: Collection[str], path: str, *, purpose: str) -> str:
    """The split for `purpose`: the training split, or validation, else test; DataError if none or several match."""
    for split in DEFAULT_SPLITS[purpose]:
        fitting = [name for name in names if name == split] or [name for name in names if splits_of(name) == {split}]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise DataError(
                f"data set `{path}` has the splits {', '.join(fitting)}", hint=f"name one, e.g. `{path}:{fitting[0]}`"
            )
    kind = "training" if purpose == "train" else "held-out"
    raise DataError(
        f"data set `{path}` has no {kind} split: its splits are {', '.join(names)}",
        hint=f"name one, e.g. `{path}:{next(iter(names))}`, or give a file",
    )


def _load(path: str, subset: str) -> "DatasetDict":
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    problem = hub_problem()
    try:
        with offline() if problem else nullcontext():
            return load_dataset(path, subset or None)
    except (DatasetNotFoundError, OSError, ValueError) as missing:
        if problem:
            raise DataError(
                f"data `{path}` is neither a file nor in the cache of `datasets`, and {problem}",
                hint="check the name, give a file, or run where the hub can be reached",
            ) from missing
        raise DataError(
            f"data `{path}` is neither a file nor a data set of the hub: {missing}",
            hint=f"check the name; a subset is named before its split, e.g. `{path}:SUBSET:train`",
        ) from missing
