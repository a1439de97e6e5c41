"""Results of a slice: a line for each record as soon as it ends, and one JSON file, written after each of them."""

import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

Record = dict[str, Any]
"""`part`, `name`, `result` (ok, failed or skipped), `seconds`, `values`, `limits`, and `error` or `reason`."""


class LimitExceededError(Exception):
    """A measured value is beyond its limit."""


class SkippedError(Exception):
    """A record cannot be measured on this machine."""


class Values(dict[str, Any]):
    """The measured values of a record by name, and the limits of those that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[str, float] = {}

    def check(self, name: str, value: float, *, limit: float) -> None:
        """Put `value` under `name`; LimitExceededError where it is above `limit`, or NaN."""
        self[name], self.limits[name] = value, limit
        if not value <= limit:
            raise LimitExceededError(f"{name} is {value:.3g}, above its limit {limit:.3g}")


@dataclass(frozen=True)
class ResultFile:
    """The JSON file of a slice: `slice`, `machine`, `running` (what has begun and not ended) and `records`."""

    path: Path

    def read(self) -> dict[str, Any]:
        """The whole file; an empty one where there is none."""
        if not self.path.exists():
            return {"slice": self.path.stem, "machine": {}, "running": None, "records": []}
        return json.loads(self.path.read_text())  # type: ignore[no-any-return]

    def update(self, **values: Any) -> None:  # noqa: ANN401 - JSON
        """Replace entries of the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.read() | values, indent=1) + "\n")
        partial.replace(self.path)


@dataclass(frozen=True)
class Recorder:
    """Writes the records of one part of a slice, a line of each to `out`."""

    file: ResultFile
    part: str
    out: TextIO = field(default_factory=lambda: sys.stdout)
    """Where lines go."""

    def add(self, name: str, result: str, *, seconds: float, values: Mapping[str, Any], **others: Any) -> None:  # noqa: ANN401
        """Append a record, of which `others` are further entries, and print its line; nothing is running then."""
        entry = {"part": self.part, "name": name, "result": result, "seconds": round(seconds, 2)}
        entry |= {"values": plain(values), "limits": getattr(values, "limits", {}), **others}
        self.file.update(records=[*self.file.read()["records"], entry], running=None)
        self.out.write(f"{line_of(entry)}\n")
        self.out.flush()

    @contextmanager
    def record(self, name: str) -> Iterator[Values]:
        """Measure something under `name`: the values put into the dict are its result. An error ends only this record
        and is written down.
        """
        self.file.update(running={"part": self.part, "name": name})
        values, began = Values(), time.perf_counter()
        others, result = {}, "ok"
        try:
            yield values
            _finish_device()
        except SkippedError as reason:
            result, others = "skipped", {"reason": str(reason)}
        except Exception as error:  # noqa: BLE001 - an error is a result, and other records follow
            traceback.print_exc()
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            result, others = "failed", {"error": text}
        finally:
            _free_device()
        self.add(name, result, seconds=time.perf_counter() - began, values=values, **others)


def line_of(record: Record) -> str:
    """Verdict, name, values with their limits, why not ok, and seconds."""
    limits = record["limits"]
    values = [f"{name} {_text(value)}{_limit(limits.get(name))}" for name, value in record["values"].items()]
    why = record.get("error") or record.get("reason") or ""
    said = "; ".join(filter(None, [", ".join(values), why.replace("\n", " ")]))
    return f"{record['result']:8}{record['part']}: {record['name']}: {said} [{record['seconds']:.1f} s]"


def _limit(limit: float | None) -> str:
    return "" if limit is None else f" (limit {limit:.3g})"


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them, numbers with four digits."""
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}


def _finish_device() -> None:
    """Wait for the GPU, so that an error of a kernel belongs to the record that started it."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _free_device() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
