"""What the time of a step assumes, as sentences."""

from collections.abc import Iterator

from ds_finetune.plan.estimate.accelerators import GB, Machine
from ds_finetune.plan.estimate.operations import Work
from ds_finetune.plan.estimate.teacher_time import teacher_config

AGAINST_PUBLISHED = (0.41, 7.1)
"""Least and most of predicted over published tokens/s of nine runs (docs/explanation/time-model.md)."""
UNCONFIRMED = (
    "No GPU has confirmed these figures. Against nine published runs of other programs, the predicted tokens/s are "
    f"{AGAINST_PUBLISHED[0]:g} to {AGAINST_PUBLISHED[1]:g} times those that they had."
)


def assumptions(work: Work, machine: Machine) -> tuple[str, ...]:
    """Sentences about rates, rows, experts, what is hidden, and what is left out."""
    links = _links(machine) if work.plan.world.world_size > 1 else ()
    return (*_rates(machine), *links, *machine.notes, *_work(work), *_left_out(work))


def _rates(machine: Machine) -> Iterator[str]:
    share, row = machine.efficiency, machine.accelerator
    yield (
        f"Matrix products reach {share.matmul:.0%} of the peak of {row.name}, those of routed experts "
        f"{share.grouped:.0%}, attention {share.attention:.0%}; other operators {share.memory:.0%} of the "
        "memory's bandwidth."
    )


def _links(machine: Machine) -> Iterator[str]:
    share, row = machine.efficiency, machine.accelerator
    yield (
        f"A rank sends {machine.intra_node_bytes_per_s / GB:,.3g} GB/s within a node of {machine.gpus_per_node} ranks "
        f"and {machine.inter_node_bytes_per_s / GB:,.3g} GB/s between nodes ({row.network}); collectives reach "
        f"{share.link:.0%} of it."
    )
    if machine.blocks_host:
        yield "Collectives block the ranks, so that nothing is hidden behind computation."
    else:
        yield (
            f"Traffic that DeepSpeed overlaps is hidden to {share.hidden:.0%}, in at most {share.hidden:.0%} of the "
            "time of computation; that of tp, sp and pp never is."
        )


def _work(work: Work) -> Iterator[str]:
    rows = work.rows
    yield (
        f"A row has {rows.num_tokens:,} tokens in {len(rows.documents)} document{'s' * (len(rows.documents) > 1)}, "
        f"{rows.num_supervised / rows.num_tokens:.0%} of them supervised; all ranks have equal work."
    )
    if work.experts_per_token:
        yield "Tokens are divided evenly over routed experts."
    if work.plan.mesh.ep > 1:
        yield (
            "The row of a token is sent once for each of its experts, also to several on one rank or node; the way to "
            "them is hidden beside shared experts alone, and the way back is not."
        )
    if work.plan.lora is not None:
        yield (
            "The MFU counts 4 FLOPs for each frozen parameter and token: forward and the gradients of inputs. Adapters "
            "are not counted; runs with LoRA report no perf/mfu."
        )


def _left_out(work: Work) -> Iterator[str]:
    teacher = getattr(work.plan.objective, "teacher", None)
    if teacher and teacher_config(work) is None:
        yield f"The teacher's forward is not counted: {teacher} is no folder with a config.json here."
    elif teacher:
        yield "The traffic of a partitioned teacher's weights is not counted."
    zero = work.plan.deepspeed["zero_optimization"]
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if zero.get(key):
            yield f"The smaller messages of zero_optimization.{key} are not counted."
    if work.plan.has_zenflow:
        yield "ZenFlow's deferred updates are not counted."
    yield "Evaluations, checkpoints, the first steps and waits for data are not counted."
