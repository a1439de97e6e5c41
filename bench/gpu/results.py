"""Results of a slice: one JSON file, written after each record, so that what follows cannot lose it."""

import json
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
"""`part`, `name`, `result` (ok, failed or skipped), `seconds`, `values`, and `error` or `reason`."""


class LimitExceededError(Exception):
    """A measured value is beyond its limit."""


class SkippedError(Exception):
    """A record cannot be measured on this machine."""


def check_limit(values: dict[str, Any], name: str, value: float, *, limit: float) -> None:
    """Put `value` into `values` under `name`; LimitExceededError where it is above `limit`, or NaN."""
    values[name] = value
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

    def add(self, record: Record) -> None:
        """Append a record; nothing is running then."""
        self.update(records=[*self.read()["records"], record], running=None)


@dataclass(frozen=True)
class Recorder:
    """Writes the records of one part of a slice."""

    file: ResultFile
    part: str

    @contextmanager
    def record(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure something under `name`: the values put into the dict are its result. An error ends only this record
        and is written down.
        """
        self.file.update(running={"part": self.part, "name": name})
        values: dict[str, Any] = {}
        began = time.perf_counter()
        entry: Record = {"part": self.part, "name": name, "result": "ok"}
        try:
            yield values
            _finish_device()
        except SkippedError as reason:
            entry |= {"result": "skipped", "reason": str(reason)}
        except Exception as error:  # noqa: BLE001 - an error is a result, and other records follow
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            entry |= {"result": "failed", "error": text}
        finally:
            _free_device()
        entry |= {"seconds": round(time.perf_counter() - began, 2), "values": plain(values)}
        self.file.add(entry)


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
