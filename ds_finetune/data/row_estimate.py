"""Estimates the number of rows in data files, to show the time left of their tokenisation."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ds_finetune.config.units import MIB
from ds_finetune.data.files import FileFormat
from ds_finetune.data.sources import Source

_BY_LINE = ("jsonl", "csv")
"""Formats with about one row per line."""


def estimate_rows(sources: Sequence[Source]) -> int:
    """Estimated number of rows in `sources`; 0 if one of them is unknown (a hub data set, a compressed file)."""
    numbers = [_estimate(source) for source in sources]
    return sum(numbers) if all(numbers) else 0


def _estimate(source: Source) -> int:
    """Estimate from the lines in the first MiB of a file, or read the number in a Parquet file's footer."""
    path = Path(source.path)
    if source.format == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        # A damaged file is reported when its rows are read.
        with suppress(OSError, pa.ArrowException):
            return int(pq.read_metadata(path).num_rows)
        return 0
    file_format = None if source.format == "hub" else FileFormat.of(path)
    if file_format is None or file_format.compression or source.format not in _BY_LINE:
        return 0
    with path.open("rb") as file:
        start = file.read(MIB)
    return round(max(start.count(b"\n"), 1) / max(len(start), 1) * path.stat().st_size)
