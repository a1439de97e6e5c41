"""Profiles the steps that `profile.steps` in the run file names."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from ds_finetune.engine.devices import restart_peak
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.state.full_tensors import named_parameters
from ds_finetune.foreign.guard import replaced
from ds_finetune.observers.record import StepRecord
from ds_finetune.runs.timeline import annotations as labels
from ds_finetune.runs.timeline.profiler import HostClock, ProfiledRun, StepProfiler
from ds_finetune.trainer.observers import StartedRun

FOLDER = "profile"
"""Name of the folder, in the run folder, with the trace and the summary of a profile."""
_PEAK = "memory/peak_gib"
_ENGINE_PHASES = {
    "step": labels.STEP,
    "_forward": labels.FORWARD,
    "_log_probs": labels.FORWARD,
    "_step_optimizer": labels.OPTIMIZER,
    "evaluate": labels.EVALUATION,
    "generate": labels.EVALUATION,
    "sample": labels.SAMPLING,
}
_DEEPSPEED_PHASES = {"backward": labels.BACKWARD, "step": labels.OPTIMIZER}
_OPTIMIZER_SWAPS = ("swap_in_optimizer_state", "swap_out_optimizer_state", "swap_out_gradients")
_PARAMETER_SWAPS = ("swap_in", "synchronize_reads", "swap_out_and_release", "swap_out_partitioned_params")
"""Methods of DeepSpeed's swappers that move data to and from NVMe (0.19.8, runtime/swap_tensor/)."""


@contextmanager
def profiled(records: Iterator[StepRecord], started: StartedRun) -> Iterator[Iterator[StepRecord]]:
    """Context that yields the records, and profiles the steps of `profile.steps`. If the run ends within these steps,
    the profile covers the completed ones. A failed run has no profile.
    """
    run, settings, done = started.run, started.run.config.profile, started.resume_point.progress.step
    if settings is None or done >= settings.first_and_last[1]:
        if settings is not None:
            started.say(f"profile.steps {settings.steps}: not profiled again, since {done} steps are done")
        yield records
        return
    first, last = settings.first_and_last
    size = run.plan.world.world_size
    ranks = tuple(range(size)) if settings.ranks == "all" else settings.ranks
    info = ProfiledRun(run.plan.device, str(run.plan.mesh), size, ranks)
    profiler = StepProfiler(info, started.store, clock=HostClock(), wrap=partial(_wrap, started))

    try:
        profiled_steps = _steps(profiler, records, max(first, done + 1), started)
        parts = chain(islice(records, max(first - 1 - done, 0)), profiled_steps, records)
        yield without_peak_of_profile(parts, first, last) if run.plan.device == "cpu" else parts
        if not profiler.steps:
            started.say(
                f"profile.steps {settings.steps}: nothing was profiled, since the run ended before step {first}"
            )
        _finish(profiler, started)
    finally:
        profiler.stop()


def _steps(
    profiler: StepProfiler, records: Iterator[StepRecord], first: int, started: StartedRun
) -> Iterator[StepRecord]:
    assert started.run.config.profile is not None
    with started.rank_progress.during(FOLDER):
        profiler.start()
    for number in range(first, started.run.config.profile.first_and_last[1] + 1):
        profiler.begin_step(number)
        record = next(records, None)
        if record is None:
            break
        profiler.steps.append(number)
        yield record
        profiler.end_step()
    _finish(profiler, started)


def _finish(profiler: StepProfiler, started: StartedRun) -> None:
    if profiler.steps and not profiler.is_finished:
        with started.rank_progress.during(FOLDER):
            profiler.finish(started.run.output_dir / FOLDER, started.say)
        if started.run.plan.device == "cpu":
            restart_peak()


def without_peak_of_profile(records: Iterator[StepRecord], first: int, last: int) -> Iterator[StepRecord]:
    """Yield the records of a CPU run, with peak memory that excludes the profiler's. Profiled steps repeat the
    peak of earlier steps, if any. Later steps are measured from the end of the profile.
    """
    peak_before: dict[str, float] = {}
    for record in records:
        if record.step < first:
            peak_before = {_PEAK: record.values[_PEAK]}
            yield record
        elif record.step <= last:
            without_peak = {name: value for name, value in record.values.items() if name != _PEAK}
            yield replace(record, values={**without_peak, **peak_before})
        else:
            yield record.with_values({_PEAK: max(record.values[_PEAK], *peak_before.values(), 0.0)})


@contextmanager
def _wrap(started: StartedRun, annotations: labels.Annotations) -> Iterator[None]:
    """Context in which `annotations` label the phases of a step, by wrapping methods of engine and saver."""
    engine, saver = started.engine, started.saver
    methods = [
        *((engine, name, phase) for name, phase in _ENGINE_PHASES.items()),
        *((engine._ds, name, phase) for name, phase in _DEEPSPEED_PHASES.items()),
        *((swapper, name, labels.OFFLOAD) for swapper, name in _swap_methods(engine)),
        *((saver, name, labels.CHECKPOINT) for name in ("save", "settle") if saver is not None),
    ]
    with ExitStack() as stack:
        for owner, name, phase in methods:
            stack.enter_context(replaced(owner, name, annotations.during(phase)(getattr(owner, name))))
        yield


def _swap_methods(engine: Engine) -> Iterator[tuple[object, str]]:
    """Pairs of an NVMe swapper of DeepSpeed and the name of a method that moves data; none without offload to NVMe."""
    params = (param for _, param in named_parameters(engine._ds.module))
    of_params = next((candidate for param in params if (candidate := getattr(param, "nvme_swapper", None))), None)
    of_optimizer = getattr(engine._ds.optimizer, "optimizer_swapper", None)
    for swapper, names in ((of_optimizer, _OPTIMIZER_SWAPS), (of_params, _PARAMETER_SWAPS)):
        yield from ((swapper, name) for name in names if hasattr(swapper, name))
