"""Finds the names and the number of classes of labelled texts, and the training target of a label."""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from ds_finetune.config.sections import DataConfig
from ds_finetune.data.cache import lock_folder, remove_damaged, write_folder
from ds_finetune.data.files import ClassNumber
from ds_finetune.data.messages import shown_value
from ds_finetune.data.record_layouts import LABELLED_LAYOUTS, Record, default_columns, view_columns
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.sample_tokens import RULES_VERSION
from ds_finetune.data.sources import find_sources, read_records
from ds_finetune.errors import ConfigError, DataError

_SHOWN_CLASSES = 10


def find_classes(config: DataConfig, kind: RowKind) -> RowKind:
    """Add to `kind` the names and the number of classes, from the labels of all training rows or from the run file.

    Every process of a host calls this function; one reads the rows and caches their labels. Text labels are sorted,
    names of a `ClassLabel` column keep its order, and whole numbers are class indices from 0. A stream is not read:
    without names in the run file, its classes are numbers. DataError names the row of a label that does not fit.
    """
    if kind.name != "labelled" or kind.has_known_classes:
        return kind
    if kind.labels or kind.num_labels == 1:
        return replace(kind, num_labels=len(kind.labels) or 1, has_known_classes=True)
    if config.streaming and kind.num_labels is None:
        raise ConfigError(
            f"data.streaming reads no row before the run, so it cannot count the classes, and "
            f"objective.num_labels is {kind.num_labels}",
            hint="set objective.num_labels for numbered classes, name them in objective.labels, or set data.streaming "
            "to false",
        )
    if config.streaming:
        return replace(kind, has_known_classes=True)
    sources = find_sources(config.paths("train"))
    parts = [RULES_VERSION, [source.fingerprint for source in sources], dict(config.columns), config.rows]
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
    folder = Path(config.cache_dir) / f"labels-{name}" / "labels"
    began = time.time()
    with lock_folder(folder.parent):
        remove_damaged([folder], since=began)
        if not folder.is_dir():
            records = islice((record for source in sources for record in read_records(source)), config.rows)
            write_folder(folder, {}, {"labels.json": json.dumps(asdict(_read_labels(records, config.columns)))})
        labels = _Labels(**json.loads((folder / "labels.json").read_text(encoding="utf-8")))
    return _by_name(labels, kind) if labels.names else _by_number(labels, kind)


@dataclass(frozen=True)
class _Labels:
    """Distinct labels of all training rows, either `names` or `numbers`, each with the location of its first row."""

    column: str
    names: Mapping[str, str]
    numbers: Mapping[str, str]
    """Labels that are whole numbers, written as text."""
    order: Sequence[str] = ()
    """Names of all classes in the order of the data set's `ClassLabel` column; empty without such a column."""


def _read_labels(records: Iterable[tuple[str, Record]], columns: Mapping[str, str]) -> _Labels:
    names: dict[str, str] = {}
    numbers: dict[str, str] = {}
    orders: set[tuple[str, ...]] = set()
    column = "label"
    for where, record in records:
        named_columns = default_columns(record, columns)
        column = named_columns.get("label", "label")
        label = view_columns(record, LABELLED_LAYOUTS["labelled"], named_columns, where)["label"]
        number = _whole_number(label)
        orders.add(label.names if isinstance(label, ClassNumber) else ())
        if isinstance(label, ClassNumber):
            names.setdefault(label.name, where)
        elif number is not None:
            numbers.setdefault(str(number), where)
        elif isinstance(label, str):
            names.setdefault(label, where)
        else:
            raise _bad_label(label, column, where, "give a whole number or a name")
    if names and numbers:
        number_text, where = next(iter(numbers.items()))
        name, other_row = next(iter(names.items()))
        raise DataError(
            f"{where}: column `{column}` is the number {number_text}, and {other_row} has the name {name!r}",
            hint="give all classes by number, or all by name",
        )
    return _Labels(column, names, numbers, orders.pop() if len(orders) == 1 else ())


def _by_name(read: _Labels, kind: RowKind) -> RowKind:
    labels = tuple(read.order) or tuple(sorted(read.names))
    plain: dict[str, str] = {}
    for name, where in read.names.items():
        other = plain.setdefault(name.strip().casefold(), name)
        if other != name and not read.order:
            raise DataError(
                f"{where}: column `{read.column}` is {name!r}, and {read.names[other]} has {other!r}, which differs "
                "only in white space or case",
                hint="write the class in one way, or name all classes in objective.labels",
            )
    if len(labels) == 1:
        raise DataError(
            f"column `{read.column}` has only the class {labels[0]!r} (first row: {read.names[labels[0]]})",
            hint="give rows of at least two classes, or name all classes in objective.labels",
        )
    if kind.num_labels not in (None, len(labels)):
        locations = ", ".join(f"{label!r} in {read.names.get(label, 'no row')}" for label in labels[:_SHOWN_CLASSES])
        raise DataError(
            f"objective.num_labels is {kind.num_labels}, and column `{read.column}` has {len(labels)} classes: "
            f"{locations}",
            hint="correct one of them, or name all classes in objective.labels",
        )
    return replace(kind, labels=labels, num_labels=len(labels), has_known_classes=True)


def _by_number(read: _Labels, kind: RowKind) -> RowKind:
    numbers = {int(number): where for number, where in read.numbers.items()}
    largest = max(numbers, default=0)
    count = kind.num_labels or largest + 1
    for number, where in numbers.items():
        if not 0 <= number < count:
            raise _outside(number, read.column, where, count)
    absent = sorted(set(range(count)) - set(numbers))
    if absent and kind.num_labels is None:
        raise DataError(
            f"{numbers.get(largest, 'no row')}: column `{read.column}` is {largest}, and no row has the class "
            f"{absent[0]}",
            hint="number the classes from 0 on without gaps, or set objective.num_labels",
        )
    if count == 1:
        raise DataError(
            f"column `{read.column}` is 0 in all rows, the first of which is {numbers[0]}",
            hint="give rows of two classes at least; for regression set objective.num_labels: 1",
        )
    return replace(kind, num_labels=count, has_known_classes=True)


def target_of(label: object, kind: RowKind, column: str, where: str) -> float:
    """Training target of a label: its class index, or the number itself for regression; DataError for other labels."""
    assert kind.has_known_classes
    if kind.is_regression:
        return _read_number(label.name if isinstance(label, ClassNumber) else label, column, where)
    is_named = bool(kind.labels) and isinstance(label, ClassNumber)
    label = label.name if is_named and isinstance(label, ClassNumber) else label
    if str(label) in kind.labels and isinstance(label, str | int):
        return float(kind.labels.index(str(label)))
    number = None if is_named else _whole_number(label)
    if number is None:
        class_names = (
            f"the classes are {', '.join(kind.labels[:_SHOWN_CLASSES])}" if kind.labels else "classes are whole numbers"
        )
        raise _bad_label(label, column, where, class_names)
    count = kind.num_labels or 0
    if not 0 <= number < count:
        raise _outside(number, column, where, count)
    return float(number)


def _whole_number(label: object) -> int | None:
    """Class index from a label that is an integer, a boolean, or an integer as text (CSV); None for other labels."""
    if isinstance(label, int):
        return int(label)
    is_number = isinstance(label, str) and label.removeprefix("-").isdecimal() and str(int(label)) == label
    return int(str(label)) if is_number else None


def _read_number(label: object, column: str, where: str) -> float:
    try:
        number = math.nan if isinstance(label, bool) or not isinstance(label, int | float | str) else float(label)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(
            f"{where}: column `{column}` is {shown_value(label)}, not a finite number",
            hint="objective.num_labels 1 is regression; for classes, leave it out or give their number",
        )
    return number


def _outside(number: int, column: str, where: str, count: int) -> DataError:
    return DataError(
        f"{where}: column `{column}` is {number}, and the classes are 0 to {count - 1}",
        hint="number the classes from 0 on, and correct objective.num_labels or objective.labels",
    )


def _bad_label(label: object, column: str, where: str, hint: str) -> DataError:
    return DataError(
        f"{where}: column `{column}` is {shown_value(label)}, which is no class",
        hint=f"{hint}; for regression set objective.num_labels: 1",
    )
