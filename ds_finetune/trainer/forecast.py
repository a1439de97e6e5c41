"""Forecast of a run with prepared data: memory, model FLOPs, and hints when memory runs out."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from ds_finetune.config.units import GIB
from ds_finetune.console.phase_line import Say
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.engine.devices import DeviceMemory, allocator_settings, is_out_of_memory
from ds_finetune.engine.groups.collectives import all_reduce_max
from ds_finetune.errors import FinetuneError, RunError
from ds_finetune.observers.performance import MemoryCheck, Utilisation
from ds_finetune.plan.estimate.memory import MemoryEstimate
from ds_finetune.plan.estimate.zero_rows import bucket_bytes
from ds_finetune.plan.search.fitting import fitting_changes
from ds_finetune.plan.search.machines import gpu_of_device
from ds_finetune.system.whole_file import replace_file
from ds_finetune.trainer.prepare import PreparedRun

_MOST_CHANGES = 5


def forecast_lines(run: PreparedRun) -> list[tuple[str, str]]:
    """Plan lines about the memory that the run will need."""
    free = "" if run.memory is None else f" of {run.memory.free_bytes / GIB:.3f} GiB that are free"
    try:
        memory = _estimate(run)
        stage = f" (stage {memory.stage})" if run.plan.mesh.pp > 1 else ""
        text = f"{memory.device_bytes / GIB:.3f} GiB at most{stage}{free}, predicted"
    except FinetuneError as unknown:
        text = f"not known: {unknown.message}"
    lines = [("memory of a rank", text)]
    if run.plan.device == "cuda" and allocator_settings():
        lines.append(("allocator", allocator_settings()))
    return lines


def trace_utilisation(run: PreparedRun, say: Say) -> Utilisation | None:
    """Observer that computes MFU. It uses the FLOPs per token of a document whose tokens attend to as many tokens as in
    the training data on average. None on CPUs, on a GPU of unknown peak, and for a model that cannot be traced; then
    `say` gets the reason.
    """
    plan, objective, rows = run.plan, run.model.objective, run.inputs.train
    gpu = gpu_of_device(torch.cuda.get_device_name()) if plan.device == "cuda" else None
    if gpu is None:
        return None
    tokens = plan.train.max_seq_len
    # Lengths are known of documents that are read before the run, but not of streamed ones and of sampled answers.
    if isinstance(rows, PreparedRows) and objective.head != "answers":
        # On average, a token attends to half of its document.
        tokens = round(2 * rows.mean_attended) * max(1, objective.documents_per_unit)
    try:
        flops = run.traces.flops_per_token(plan, tokens)
    except FinetuneError as unknown:
        say(f"perf/mfu is not measured: {unknown.message}")
        return None
    return Utilisation(flops, gpu.peak(plan.precision), plan.world.world_size)


def forecast_check(run: PreparedRun, *, say: Say, log: Say) -> MemoryCheck:
    """Observer that compares the measured memory of the first steps with the estimate. This function logs all items of
    the estimate. On CPUs the comparison is only logged, since the memory of a process is not only tensors.
    """
    memory = estimate_of(run)
    if memory is not None:
        log("\n".join(["predicted memory of a rank:", *memory_table(memory)]))
    predicted = None if memory is None else memory.device_bytes
    assert run.peak is not None
    peak, is_host = run.peak.num_bytes, run.plan.device == "cpu"
    return MemoryCheck(
        predicted, peak, lambda value: all_reduce_max(value)[0], log if is_host else say, is_host=is_host
    )


class OutOfMemoryError(RunError):
    """A rank's device or the host ran out of memory after the run had started."""


def memory_table(estimate: MemoryEstimate) -> list[str]:
    """Lines of a table of device memory at its peak, largest item first, each with the option that reduces it."""
    fullest = [row for row in estimate.rows if row.place == estimate.device and estimate.moment in row.when]
    rows = sorted(fullest, key=lambda row: -row.num_bytes)
    return [
        f"  {row.num_bytes / GIB:10.3f} GiB  {row.name}{f' (lowered by {row.option})' if row.option else ''}"
        for row in rows
        if row.num_bytes
    ]


def estimate_of(run: PreparedRun) -> MemoryEstimate | None:
    """Memory estimate of the run. None if the memory cannot be estimated; `forecast_lines` then gives the reason."""
    with suppress(FinetuneError):
        return _estimate(run)
    return None


def _estimate(run: PreparedRun) -> MemoryEstimate:
    budget = None if run.memory is None else run.memory.free_bytes
    return replace(run.needs, budget=budget).estimate()


def what_fits(run: PreparedRun, *, budget: int) -> str:
    """Hint on changes of the run file that make the run fit into `budget` bytes, those that cost least time first."""
    changes = fitting_changes(run.needs, budget=budget)
    if not changes:
        return "by the estimate no single change of the run file fits; `ds-finetune plan --search` lists what fits"
    texts = (f"{change.text} ({change.device_bytes / GIB:,.2f} GiB)" for change in changes[:_MOST_CHANGES])
    return f"by the estimate these fit, each with its need: {'; '.join(texts)}"


@contextmanager
def explain_out_of_memory(run: PreparedRun) -> Iterator[None]:
    """Context that turns an out-of-memory error into an OutOfMemoryError with the needed and available device memory,
    and settings that would fit.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FinetuneError) or not is_out_of_memory(error):
            raise
        explained = _out_of_memory(run, error, run.memory)
        explained.hint = "; ".join(filter(None, [_remember(run), explained.hint]))
        raise explained from error


def _remember(run: PreparedRun) -> str:
    """Record that the run's `auto` micro-batch ran out of memory, so that the next start uses at most half of it.
    Returns a sentence for the user.
    """
    rows = run.plan.micro_batch_size
    if run.failed_size is None or rows == 1:
        return ""
    try:
        run.failed_size.parent.mkdir(parents=True, exist_ok=True)
        replace_file(run.failed_size, f"{rows}\n")
    except OSError as error:
        return f"set train.micro_batch_size to at most {rows // 2} ({rows} could not be remembered: {error})"
    return f"the same command takes at most {rows // 2} for train.micro_batch_size auto, since {rows} failed"


def _out_of_memory(run: PreparedRun, error: Exception, device: DeviceMemory | None) -> OutOfMemoryError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    message = f"rank {run.plan.world.rank} ran out of memory: {first}"
    estimate = estimate_of(run)
    if estimate is None or device is None:
        unknown = "its free memory" if device is None else f"the memory of model_type {run.model.hf_config.model_type}"
        return OutOfMemoryError(
            f"{message}; {unknown} is not known",
            hint="lower train.micro_batch_size, or take a higher zero_optimization.stage or more ranks",
        )
    need = f"by the estimate a rank needs {estimate.device_bytes / GIB:.3f} GiB at most"
    available = f"the {device.name} had {device.free_bytes / GIB:.3f} GiB free for it when the run was prepared"
    table = "\n".join(memory_table(estimate))
    bucket, fits = _bucket_hint(run, device), what_fits(run, budget=min(device.free_bytes, estimate.device_bytes))
    remedy = f"{bucket}; then {fits}" if bucket else fits
    if estimate.device_bytes < device.free_bytes:
        unexpected = "less was needed than was free: find what else uses or limits the memory"
        remedy = bucket or f"{unexpected}; {fits}"
    return OutOfMemoryError(f"{message}\n{need}, and {available}:\n{table}", hint=remedy)


def _bucket_hint(run: PreparedRun, device: DeviceMemory) -> str:
    """Hint where a limit of the address space is too small for the bucket in which ZeRO reduces gradients; else empty.

    DeepSpeed allocates the bucket in one piece, however small the model is (zero/stage_1_and_2.py and stage3.py of
    0.19.8). The estimate counts only the part that is written.
    """
    is_limited = run.plan.device == "cpu" and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    size = bucket_bytes(run.plan)
    if not is_limited or 2 * size < device.free_bytes:
        return ""
    return (
        f"under `ulimit -v` the bucket of ZeRO-{run.plan.zero_stage} counts in full, {size:,} bytes in one piece: set "
        "deepspeed.zero_optimization.reduce_bucket_size to 10000000, or raise the limit"
    )
