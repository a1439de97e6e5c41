"""This rank's batches of a run: from prepared rows or from a stream, from the beginning or from where it resumes."""

from collections.abc import Iterator

from ds_finetune.data.batches import Batch, BatchPlan, Position, training_batches
from ds_finetune.data.stream import START, StreamedRows, streaming_batches
from ds_finetune.model.encoder import encoder_of
from ds_finetune.schedule import Duration
from ds_finetune.trainer.loop import BEGINNING, Progress
from ds_finetune.trainer.prepare import PreparedRun


def run_batches(run: PreparedRun, *, after: Progress = BEGINNING, stream_position: Position = START) -> Iterator[Batch]:
    """The batches after the steps that are done; a run given in epochs sees each row exactly that often."""
    rows, plan = run.inputs.train, batch_plan(run)
    if isinstance(rows, StreamedRows):
        return streaming_batches(rows, plan, steps=run.schedule.steps, start_step=after.step, start=stream_position)
    length = Duration.parse(run.config.train.duration)
    is_epochs = length.unit == "epochs"
    total_rows = length.in_rows(len(rows)) if is_epochs else run.schedule.steps * plan.global_batch_size
    return training_batches(rows, plan, start_step=after.step, total_rows=total_rows)


def batch_plan(run: PreparedRun) -> BatchPlan:
    """How rows are divided over ranks and micro-batches."""
    plan = run.plan
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
        separates_padding=encoder_of(run.inputs.hf_config) is not None,
    )
