"""The batches on which a micro-batch is tried: forwards of the longest rows of the training data."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ds_finetune.data.batches import Batch, training_batches
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.scores import NumberedRows, with_scores
from ds_finetune.data.stream import START, StreamedRows, streaming_batches
from ds_finetune.trainer.batches import batch_plan
from ds_finetune.trainer.prepare import PreparedRun, mismatched_answers

STREAM_BATCHES = 32
"""Batches of a stream, whose rows are not known before they are read, among which the longest is looked for."""
_COMPARED = 4096
"""Longest rows whose supervised tokens are counted."""


def longest_rows(rows: PreparedRows, number: int) -> NDArray[np.int64]:
    """The rows with the most tokens, int64 [number] or fewer where there are no more, longest first; of rows of the
    same length those with the most supervised tokens.
    """
    size = max(rows.kind.documents_per_unit, 1)
    units = np.diff(rows.documents.offsets).reshape(-1, size).sum(axis=1)
    ends = np.concatenate([[0], np.cumsum(units[rows.order])])
    tokens = ends[rows.offsets[1:]] - ends[rows.offsets[:-1]]
    most = np.argsort(-tokens, kind="stable")[: max(number, _COMPARED)]
    supervised = np.array([rows.sizes(int(row))[1] for row in most])
    chosen: NDArray[np.int64] = most[np.lexsort((most, -supervised, -tokens[most]))][:number]
    return chosen


def rows_again(rows: PreparedRows, numbers: NDArray[np.int64]) -> PreparedRows:
    """A collection of the rows `numbers`, each as often as it is named."""
    units = [rows.order[rows.offsets[number] : rows.offsets[number + 1]] for number in numbers]
    offsets = np.cumsum([0, *map(len, units)])
    return replace(rows, order=np.concatenate(units), offsets=offsets, mixture=None)


def trial_batches(run: PreparedRun, *, steps: int) -> Iterator[Batch]:
    """Batches of `steps` steps for this rank; every forward has the longest rows of all data."""
    rows, plan = run.inputs.train, replace(batch_plan(run), shuffle=False, row_cost=None, mixture=None)
    if isinstance(rows, StreamedRows):
        read = streaming_batches(rows, plan, steps=STREAM_BATCHES, start_step=0, start=START)
        longest = max(islice(read, STREAM_BATCHES), key=lambda batch: max(m.input_ids.numel() for m in batch.micro))
        yield from [longest] * steps
        return
    chosen = longest_rows(rows, plan.micro_batch_size)
    view = rows_again(rows, np.resize(chosen, plan.global_batch_size))
    total, scores = steps * plan.global_batch_size, run.inputs.scores
    if scores is not None:
        yield from with_scores(training_batches(NumberedRows(view), plan, start_step=0, total_rows=total), scores)
        return
    mismatched = mismatched_answers(run.plan, run.inputs.model.objective, rows)
    yield from training_batches(view, plan, start_step=0, total_rows=total, mismatched=mismatched)
