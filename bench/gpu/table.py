"""Turns the JSON files of slices into Markdown tables."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

_COLUMNS = 120
"""Width of a page of the documentation."""


def tables(folder: Path, order: Sequence[str]) -> str:
    """One section for each slice of `order` that has a file in `folder`."""
    parts = []
    for name in order:
        file = folder / f"{name}.json"
        if file.exists():
            parts.append("\n".join(_section(json.loads(file.read_text()))))
    return "\n\n".join(parts) + "\n"


def _section(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"### {found['slice']}"
    yield ""
    yield from _wrapped(_machine(found["machine"]))
    records = found["records"]
    measured = [record for record in records if record["values"]]
    for _, group in groupby(measured, key=lambda record: tuple(record["values"])):
        rows = list(group)
        parts = {record["part"] for record in rows}
        yield ""
        yield from _table(parts.pop() if len(parts) == 1 else found["slice"], rows)
    failed = [record for record in records if record["result"] == "failed"]
    skipped = [record for record in records if record["result"] == "skipped"]
    if failed or skipped:
        yield ""
    for record in failed:
        yield from _wrapped(f"- failed: {record['part']}, {record['name']}: {record['error']}", indent="  ")
    for reason in dict.fromkeys(record["reason"] for record in skipped):
        names = dict.fromkeys(record["part"] for record in skipped if record["reason"] == reason)
        number = sum(record["reason"] == reason for record in skipped)
        yield from _wrapped(f"- {number} skipped, of {', '.join(names)}: {reason}", indent="  ")


def _machine(machine: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in machine.get("versions", {}).items())
    gpu = f"{machine['gpu']} with {machine['gpu_gib']} GiB" if "gpu" in machine else "no GPU"
    return f"{gpu}, {machine.get('cores')} cores, {machine.get('host_gib')} GiB of memory; {versions}."


def _table(part: str, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table of records that have the same values; a list where it would be too wide."""
    names = list(records[0]["values"])
    rows = [[_mark(record), *(_text(record["values"][name]) for name in names)] for record in records]
    lines = [f"| {' | '.join(cells)} |" for cells in ([part, *names], ["---"] * (len(names) + 1), *rows)]
    if max(map(len, lines)) <= _COLUMNS:
        yield from lines
        return
    yield f"{part}:"
    yield ""
    for record in records:
        values = ", ".join(f"{name} {_text(value)}" for name, value in record["values"].items())
        yield from _wrapped(f"- {_mark(record)}: {values}", indent="  ")


def _mark(record: Mapping[str, Any]) -> str:
    return record["name"] if record["result"] == "ok" else f"{record['name']} ({record['result']})"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _wrapped(text: str, *, indent: str = "") -> Iterable[str]:
    from textwrap import wrap

    return wrap(text.replace("\n", " "), _COLUMNS, subsequent_indent=indent, break_long_words=False)
