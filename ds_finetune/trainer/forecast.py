"""The forecast of a prepared run: the memory of its fullest rank, and the time of a step where the machine is known."""

import torch

from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import Say
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.groups.collectives import all_reduce_max
from ds_finetune.errors import FinetuneError
from ds_finetune.observers.forecast import ForecastCheck, Predicted
from ds_finetune.plan.estimate.accelerators import Machine, accelerator_of_device, machine_of
from ds_finetune.plan.estimate.cpu_machine import CpuRates, cpu_machine, rates_file
from ds_finetune.plan.estimate.memory import MemoryEstimate
from ds_finetune.plan.estimate.row_shape import RowShape
from ds_finetune.plan.estimate.step_time import TimeEstimate, estimate_time
from ds_finetune.trainer.memory_report import estimate_of, memory_table
from ds_finetune.trainer.prepare import PreparedRun

_SHOWN_ROWS = 3


def forecast_lines(run: PreparedRun) -> list[tuple[str, str]]:
    """Lines of the plan about memory and time, for people; none of what is not known."""
    memory, time = estimate_of(run), time_of(run)
    lines = [("memory of a rank", _memory_text(run, memory))] if memory is not None else []
    if time is not None:
        text = f"{time.seconds:.2f} s, {time.tokens_per_second:,.0f} tokens/s with padding, MFU {time.mfu:.1%}"
        machine = _machine(run)
        assert machine is not None
        lines.append(("predicted step", "; ".join([text, *machine.notes])))
    return lines


def forecast_check(run: PreparedRun, *, say: Say, log: Say) -> ForecastCheck:
    """What compares the forecast with the first steps, on every rank; the whole table goes to the log."""
    memory, time = estimate_of(run), time_of(run)
    if memory is not None:
        log("\n".join(["predicted memory of a rank:", *memory_table(memory)]))
    predicted = Predicted(
        None if memory is None else memory.device_bytes,
        None if time is None else time.seconds,
        is_host=run.plan.device == "cpu",
    )
    assert run.peak is not None
    return ForecastCheck(predicted, run.peak.num_bytes, _largest, say)


def time_of(run: PreparedRun) -> TimeEstimate | None:
    """The time of a step on this machine; None where its rates or the model's arithmetic are not known."""
    try:
        machine, rows = _machine(run), row_shape(run)
        if machine is None or rows is None:
            return None
        return estimate_time(run.plan, run.inputs.config_tree, machine=machine, rows=rows)
    except FinetuneError:
        return None


def row_shape(run: PreparedRun) -> RowShape | None:
    """A typical row of the training data; None for a stream, whose rows are not known.

    Its documents are as long as they have to be for tokens to attend to as many others as in the data.
    """
    rows, batch = run.inputs.train, run.plan.batch
    if not isinstance(rows, PreparedRows) or not rows.num_tokens:
        return None
    tokens = batch.max_seq_len if batch.is_packed else round(rows.num_tokens / len(rows))
    length = max(1, min(tokens, round(2 * rows.mean_attended)))
    whole, rest = divmod(tokens, length)
    return RowShape(tokens, rows.num_supervised_tokens / len(rows), (length,) * whole + ((rest,) if rest else ()))


def _machine(run: PreparedRun) -> Machine | None:
    """This machine: GPUs of the table, or CPU ranks of one host whose rates were measured before."""
    world = run.plan.world
    if run.plan.device == "cuda":
        row = accelerator_of_device(torch.cuda.get_device_name())
        return machine_of(row, gpus_per_node=world.local_world_size)
    ranks = world.world_size
    rates = CpuRates.read(rates_file(ranks, precision=run.plan.precision, threads=torch.get_num_threads()))
    if rates is None or run.memory is None or ranks > world.local_world_size:
        return None
    return cpu_machine(rates, ranks=ranks, memory_bytes=ranks * run.memory.total_bytes)


def _memory_text(run: PreparedRun, memory: MemoryEstimate) -> str:
    """The peak of the device against what is free, and the largest parts."""
    rows = sorted((row for row in memory.rows if row.place == memory.device), key=lambda row: -row.num_bytes)
    parts = ", ".join(f"{row.name} {row.num_bytes / GIB:.3f}" for row in rows[:_SHOWN_ROWS])
    free = "" if run.memory is None else f" of {run.memory.free_bytes / GIB:.3f} GiB that are free"
    stage = f" (stage {memory.stage})" if run.plan.mesh.pp > 1 else ""
    return f"{memory.device_bytes / GIB:.3f} GiB at most{stage}{free}, predicted; {parts}"


def _largest(value: float) -> float:
    """Of all ranks."""
    return all_reduce_max(value)[0]
