"""The largest micro-batch that fits into memory, by the estimate."""

from dataclasses import replace

from ds_finetune.families.parameters import ModelConfig
from ds_finetune.plan.batch import legal_micro_batches
from ds_finetune.plan.estimate.memory import estimate_memory
from ds_finetune.plan.pipeline import forwards_together
from ds_finetune.plan.plan import Plan

SPARE = 0.07
"""Share of the memory that a choice leaves free: for what fragments, and for steps that need more than others."""


def largest_micro_batch(plan: Plan, model: ModelConfig, *, budget: int) -> int:
    """The most rows of a forward that divide the global batch and leave `SPARE` of `budget` bytes of the device free;
    0 where not even one row does.

    `model` is the config.json of the model. Nothing of `plan` but its batch depends on the rows.
    """
    sizes = reversed(legal_sizes(plan))
    return next((rows for rows in sizes if fits(bytes_of(plan, model, rows), budget)), 0)


def legal_sizes(plan: Plan) -> tuple[int, ...]:
    """The sizes of a micro-batch that go with the global batch, the ranks and the pipeline of a run, ascending."""
    group = forwards_together(plan.parallel)
    return legal_micro_batches(global_batch_size=plan.batch.global_batch_size, dp=plan.dp, group=group)


def fits(num_bytes: int, budget: int) -> bool:
    """Whether `num_bytes` leave `SPARE` of `budget` free."""
    return num_bytes <= (1 - SPARE) * budget


def bytes_of(plan: Plan, model: ModelConfig, rows: int) -> int:
    """Bytes on the device at most with forwards of `rows` rows."""
    return estimate_memory(plan_with_rows(plan, rows), model).device_bytes


def plan_with_rows(plan: Plan, rows: int) -> Plan:
    """The numbers of `plan` with forwards of `rows` rows; the texts of its decisions stay."""
    accumulation = plan.batch.global_batch_size // (rows * plan.dp)
    return replace(
        plan,
        batch=replace(plan.batch, micro_batch_size=rows, gradient_accumulation_steps=accumulation),
        deepspeed=plan.deepspeed
        | {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation},
    )
