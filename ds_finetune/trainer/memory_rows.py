"""Rows that a program hands to `train`, written as files, so that the run can resume and be repeated."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import DataError, OutputError

Rows = Iterable[Mapping[str, object]]
"""A list of dictionaries, a `datasets.Dataset`, or anything else that yields dictionaries."""
ROWS = "rows"
"""The folder of these files, within that of the run."""


def with_rows(config: RunConfig, rows: Mapping[str, Rows]) -> RunConfig:
    """`config` with files of these rows, in `output_dir`, as its `data.train` and `data.eval`; every rank calls it.

    DataError for what cannot be written as JSON, OutputError where the folder cannot be written.
    """
    files = {name: (_write(given, name, Path(config.output_dir) / ROWS),) for name, given in rows.items()}
    return config.model_copy(update={"data": config.data.model_copy(update=files)}) if files else config


def _write(rows: Rows, name: str, folder: Path) -> str:
    """Write a file whose name has a hash of its content, unless it is there.

    Its time of modification is always the same. By that time, size and path the prepared rows are found again, and
    they have to be the same for ranks that write the file at once.
    """
    hint = "give a list of dictionaries or a datasets.Dataset, such as dataset['train']"
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise DataError(f"the rows of data.{name} are a `{type(rows).__name__}`", hint=hint)
    lines = [_line(row, f"row {number} of data.{name}", hint) for number, row in enumerate(rows, start=1)]
    if not lines:
        raise DataError(f"data.{name} has 0 rows", hint=hint)
    content = "".join(lines).encode()
    path = folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            partial.write_bytes(content)
            os.utime(partial, (0, 0))
            partial.replace(path)
    except OSError as refused:
        raise OutputError(f"`{path}` cannot be written: {refused.strerror}", hint="name another output_dir") from None
    return str(path)


def _line(row: object, where: str, hint: str) -> str:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is a `{type(row).__name__}`, not a dictionary", hint=hint)
    try:
        return json.dumps(dict(row), allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as other:
        raise DataError(f"{where} is not JSON: {other}", hint="give texts, numbers, lists and dictionaries") from None
