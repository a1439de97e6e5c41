"""Makes the batches of this rank from prepared or streamed rows, beginning at the step at which the run resumes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ds_finetune.config.objectives import is_grpo
from ds_finetune.config.schedule import Duration
from ds_finetune.config.units import share_text
from ds_finetune.data.batches import Batch, BatchPlan, Position, prefetched, training_batches
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.stream import START, StreamedRows, streaming_batches
from ds_finetune.data.teacher_scores import with_scores
from ds_finetune.engine.engine import Engine
from ds_finetune.model.build.encoder import encoder_of
from ds_finetune.plan.model_shape import RowCost
from ds_finetune.trainer.loop import BEGINNING, Progress
from ds_finetune.trainer.prepare import PreparedRun, mismatched_answers


def batches_ahead(
    run: PreparedRun, engine: Engine, *, after: Progress, stream_position: Position
) -> AbstractContextManager[Iterator[Batch]]:
    """Context with the batches of the remaining steps. A thread prefetches them and prepares them for `engine`."""
    batches = run_batches(run, after=after, stream_position=stream_position)
    return prefetched(batches, engine.prepare, begin=engine.use_device)


def run_batches(run: PreparedRun, *, after: Progress = BEGINNING, stream_position: Position = START) -> Iterator[Batch]:
    """Batches of the remaining steps, with the extra inputs of the objective. These are stored teacher scores, or
    documents for KTO's baseline. A run of N epochs uses each row exactly N times.
    """
    rows, plan = run.inputs.train, batch_plan(run)
    if isinstance(rows, StreamedRows):
        return streaming_batches(rows, plan, steps=run.schedule.steps, start_step=after.step, start=stream_position)
    batches = partial(training_batches, plan=plan, start_step=after.step, total_rows=total_rows(run, rows))
    if run.inputs.scores is not None:
        return with_scores(batches(rows), run.inputs.scores)
    return batches(rows, mismatched=mismatched_answers(run.plan, run.model.objective, rows))


def total_rows(run: PreparedRun, rows: PreparedRows) -> int:
    """Number of rows of the run. For a length in epochs, it is not rounded up to full steps."""
    length = Duration.parse(run.config.train.duration)
    if length.unit == "epochs":
        return length.in_rows(rows.rows_per_epoch)
    return run.schedule.steps * run.plan.train.global_batch_size


def mixture_lines(run: PreparedRun) -> list[str]:
    """Lines on the sources of a mixture: fractions of rows and tokens, and the number of passes in the run."""
    rows = run.inputs.train
    if isinstance(rows, StreamedRows) or rows.mixture is None:
        return []
    mixture, total = rows.mixture, total_rows(run, rows)
    rows_of = mixture.count_rows(total, seed=run.plan.train.seed, shuffle=run.config.data.shuffle)
    passes = [number / size for number, size in zip(rows_of, mixture.sizes, strict=True)]
    tokens = [number * times for number, times in zip(rows.tokens_of_sources, passes, strict=True)]
    return [
        f"{name}: {share_text(number / total)} of the rows and {share_text(of_source / sum(tokens))} of the tokens of "
        f"the run, {times:.2f} passes over {size:,} rows"
        for name, number, of_source, times, size in zip(
            mixture.names, rows_of, tokens, passes, mixture.sizes, strict=True
        )
    ]


def batch_plan(run: PreparedRun) -> BatchPlan:
    """How the run's rows are divided over ranks and micro-batches."""
    plan, rows = run.plan, run.inputs.train
    return BatchPlan(
        global_batch_size=plan.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        rank=plan.mesh.coordinate("dp"),
        dp=plan.dp,
        seed=plan.train.seed,
        shuffle=run.config.data.shuffle,
        pad_token_id=run.inputs.pad_token_id,
        row_len=plan.train.max_seq_len if plan.data.packing else None,
        multiple=plan.mesh.sp,
        documents_per_unit=run.model.objective.documents_per_unit,
        reference=run.reference.get("train"),
        mixture=rows.mixture if isinstance(rows, PreparedRows) else None,
        looks_ahead=run.model.mtp is not None,
        separates_padding=encoder_of(run.model.hf_config) is not None,
        meets_each_forward=plan.meets_each_forward,
        **_row_costs(run),
    )


def _row_costs(run: PreparedRun) -> dict[str, Any]:
    """Arguments of `BatchPlan` that compute the cost of a row; empty if rows stay in order. `row_cost` takes the index
    of a prepared row, `streamed_row_cost` takes a row of a stream or rollout. Costs decide how rows are divided over
    ranks. On one rank, they only group unpacked rows of similar length, which reduces padding.
    """
    rows, is_packed = run.inputs.train, run.plan.data.packing
    if not run.config.data.balance or (run.plan.dp == 1 and is_packed):
        return {}
    cost = partial(
        RowCost.of(run.model.described, run.plan.activation_checkpointing).of_row,
        row_len=run.plan.train.max_seq_len if is_packed else None,
    )
    if is_grpo(run.config.objective):
        return {"streamed_row_cost": lambda row: cost(row.document_lengths, row.supervised)}
    if isinstance(rows, PreparedRows):
        return {"row_cost": lambda number: cost(*rows.sizes(number))}
    # Streamed packed rows are only sorted on their rank. If ranks wait once per step, their order does not matter.
    is_order_free = is_packed and not run.plan.meets_each_forward
    return {} if is_order_free else {"streamed_row_cost": lambda row: cost(row.document_lengths, row.supervised)}
