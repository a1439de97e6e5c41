"""What multi-token prediction reads and predicts: the next token and the label after the next, inside each document."""

import numpy as np
import pytest

from ds_finetune.data.batches import BatchPlan, Position, make_batch
from ds_finetune.data.prepared_rows import Row
from ds_finetune.objectives.labels import IGNORE_INDEX

NONE = IGNORE_INDEX
DOCUMENTS = ([11, 12, 13, 14], [21], [31, 32], [41, 42, 43])


def _row(documents: tuple[list[int], ...]) -> Row:
    """All tokens but the first of each document are supervised."""
    labels = [[*ids[1:], NONE] for ids in documents]
    return Row(
        input_ids=np.concatenate(documents).astype(np.int32),
        position_ids=np.concatenate([np.arange(len(ids)) for ids in documents]).astype(np.int32),
        labels=np.concatenate(labels).astype(np.int32),
        supervised=sum(len(ids) - 1 for ids in documents),
    )


def _plan(row_len: int | None, *, looks_ahead: bool = True) -> BatchPlan:
    return BatchPlan(2, 2, 0, 1, 0, shuffle=False, pad_token_id=0, row_len=row_len, looks_ahead=looks_ahead)


def test_a_packed_row_looks_ahead_inside_each_document() -> None:
    (micro,) = make_batch([_row(DOCUMENTS), None], _plan(12), Position(0, 0), ()).micro
    assert micro.ahead is not None
    row, empty = micro.ahead.labels.tolist()
    assert row == [13, 14, NONE, NONE, NONE, NONE, NONE, 43, NONE, NONE, NONE, NONE]
    assert empty == [NONE] * 12
    counts = [place for place, label in enumerate(row) if label != NONE]
    assert micro.ahead.input_ids[0, counts].tolist() == [12, 13, 42]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_padded_row_ends_with_its_document(number: int) -> None:
    (micro,) = make_batch([_row(DOCUMENTS[number : number + 1]), None], _plan(None), Position(0, 0), ()).micro
    assert micro.ahead is not None
    ids = DOCUMENTS[number]
    assert micro.ahead.labels[0].tolist() == [*ids[2:], *[NONE] * (8 - len(ids[2:]))]
    assert micro.ahead.input_ids[0, : len(ids) - 1].tolist() == ids[1:]


def test_nothing_is_made_where_nothing_looks_ahead() -> None:
    (micro,) = make_batch([_row(DOCUMENTS), None], _plan(12, looks_ahead=False), Position(0, 0), ()).micro
    assert micro.ahead is None
