"""Reads one row of dialogue as a run reads it."""

from collections.abc import Mapping
from typing import Any

from ds_finetune.data.row_kind import DIALOGUE
from ds_finetune.data.samples import RowSample, read_row


def sample_of(
    record: Mapping[str, Any], layout: str = "auto", columns: Mapping[str, str] | None = None, where: str = "row 1"
) -> RowSample:
    """The sample of a record in `layout`."""
    return read_row(record, DIALOGUE, layout=layout, columns=columns or {}, where=where)[0]
