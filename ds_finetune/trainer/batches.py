"""This rank's batches of a run: from prepared rows or from a stream, from the beginning or from where it resumes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.schedule import Duration
from ds_finetune.config.units import share_text
from ds_finetune.data.batches import Batch, BatchPlan, Position, prefetched, training_batches
from ds_finetune.data.prepared_rows import PreparedRows, Row
from ds_finetune.data.scores import NumberedRows, with_scores
from ds_finetune.data.stream import START, StreamedRows, streaming_batches
from ds_finetune.engine.engine import Engine
from ds_finetune.model.build.encoder import encoder_of
from ds_finetune.plan.model_shape import RowCost
from ds_finetune.trainer.loop import BEGINNING, Progress
from ds_finetune.trainer.prepare import PreparedRun, mismatched_answers


def batches_ahead(
    run: PreparedRun, engine: Engine, *, after: Progress, stream_position: Position
) -> AbstractContextManager[Iterator[Batch]]:
    """The batches after the steps that are done, made ahead of them by a thread and prepared for `engine`."""
    return prefetched(run_batches(run, after=after, stream_position=stream_position), engine.prepare)


def run_batches(run: PreparedRun, *, after: Progress = BEGINNING, stream_position: Position = START) -> Iterator[Batch]:
    """The batches after the steps that are done; a run given in epochs sees each row exactly that often."""
    rows, plan = run.inputs.train, batch_plan(run)
    if isinstance(rows, StreamedRows):
        return streaming_batches(rows, plan, steps=run.schedule.steps, start_step=after.step, start=stream_position)
    scores, total = run.inputs.scores, total_rows(run, rows)
    if scores is not None:
        numbered = training_batches(NumberedRows(rows), plan, start_step=after.step, total_rows=total)
        return with_scores(numbered, scores)
    mismatched = mismatched_answers(run.plan, run.inputs.model.objective, rows)
    return training_batches(rows, plan, start_step=after.step, total_rows=total, mismatched=mismatched)


def total_rows(run: PreparedRun, rows: PreparedRows) -> int:
    """Rows of the whole run; a run given in epochs has no row more than its epochs have."""
    length = Duration.parse(run.config.train.duration)
    if length.unit == "epochs":
        return length.in_rows(rows.rows_per_epoch)
    return run.schedule.steps * run.plan.batch.global_batch_size


def mixture_lines(run: PreparedRun) -> list[str]:
    """For each source of a mixture: its share of rows and tokens, and how often the run passes over it."""
    rows = run.inputs.train
    if isinstance(rows, StreamedRows) or rows.mixture is None:
        return []
    mixture, total = rows.mixture, total_rows(run, rows)
    drawn = mixture.count_rows(total, seed=run.plan.seed, shuffle=run.config.data.shuffle)
    passes = [number / size for number, size in zip(drawn, mixture.sizes, strict=True)]
    tokens = [number * times for number, times in zip(rows.tokens_of_sources, passes, strict=True)]
    return [
        f"{name}: {share_text(number / total)} of the rows and {share_text(of_source / sum(tokens))} of the tokens of "
        f"the run, {times:.2f} passes over {size:,} rows"
        for name, number, of_source, times, size in zip(
            mixture.names, drawn, tokens, passes, mixture.sizes, strict=True
        )
    ]


def batch_plan(run: PreparedRun) -> BatchPlan:
    """How rows are divided over ranks and micro-batches."""
    plan, rows = run.plan, run.inputs.train
    return BatchPlan(
        global_batch_size=plan.batch.global_batch_size,
        micro_batch_size=plan.batch.micro_batch_size,
        rank=plan.mesh.place("dp"),
        dp=plan.dp,
        seed=plan.seed,
        shuffle=run.config.data.shuffle,
        pad_token_id=run.inputs.pad_token_id,
        row_len=plan.batch.max_seq_len if plan.batch.is_packed else None,
        multiple=plan.mesh.sp,
        documents_per_unit=run.inputs.model.objective.documents_per_unit,
        reference=run.reference.get("train"),
        mixture=rows.mixture if isinstance(rows, PreparedRows) else None,
        looks_ahead=run.inputs.model.mtp is not None,
        separates_padding=encoder_of(run.inputs.hf_config) is not None,
        row_cost=_row_cost(run),
        streamed_row_cost=_streamed_row_cost(run),
        meets_each_forward=plan.meets_each_forward,
    )


def eval_plan(run: PreparedRun, name: str) -> BatchPlan:
    """The same for the held-out set `name`."""
    return replace(batch_plan(run), reference=run.reference.get(name))


def _row_cost(run: PreparedRun) -> Callable[[int], float] | None:
    """What a prepared row costs, by its number; None where rows stay in order.

    On one rank only padding can be saved, by rows of similar length in a forward, and packed rows have the same length.
    """
    rows, cost = run.inputs.train, _cost_of_sizes(run)
    if isinstance(rows, StreamedRows) or cost is None:
        return None
    return lambda number: cost(*rows.sizes(number))


def _streamed_row_cost(run: PreparedRun) -> Callable[[Row], float] | None:
    """What a streamed row costs; None where the order of a rank's rows makes no difference, or has to stay."""
    cost = _cost_of_sizes(run)
    is_order_free = run.plan.batch.is_packed and not run.plan.meets_each_forward
    if not isinstance(run.inputs.train, StreamedRows) or cost is None or is_order_free:
        return None
    return lambda row: cost(row.document_lengths, row.supervised)


def _cost_of_sizes(run: PreparedRun) -> Callable[[NDArray[np.int64], int], float] | None:
    """What a row costs by the lengths of its documents and its supervised tokens."""
    batch = run.plan.batch
    if not run.config.data.balance or (run.plan.dp == 1 and batch.is_packed):
        return None
    cost = RowCost.of(run.inputs.shape, recomputes=run.plan.activation_checkpointing)
    return partial(cost.of_row, row_len=batch.max_seq_len if batch.is_packed else None)
