"""Profiles the steps that the run file names; the steps before and after run as without a profile."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain, islice

from ds_finetune.console.phase_line import Say
from ds_finetune.engine.devices import restart_peak
from ds_finetune.engine.phases import wrapped_phases
from ds_finetune.foreign.guard import replaced
from ds_finetune.observers.record import StepRecord
from ds_finetune.runs.timeline.breakdown import ProfiledRun
from ds_finetune.runs.timeline.clock import HostClock
from ds_finetune.runs.timeline.profiler import StepProfiler
from ds_finetune.runs.timeline.recorder import CHECKPOINT, Recorder
from ds_finetune.trainer.observers import StartedRun

FOLDER = "profile"
"""Folder of the run with the trace and the summary."""
_PEAK = "memory/peak_gib"


@contextmanager
def profiled(records: Iterator[StepRecord], started: StartedRun) -> Iterator[Iterator[StepRecord]]:
    """The same records, whose steps of `profile.steps` are profiled: all of them that the run comes to, unless it
    fails.
    """
    settings, done = started.run.config.profile, started.resume_point.progress.step
    if settings is None:
        yield records
        return
    first, last = settings.first_and_last
    say = started.say
    if done >= last:
        say(f"profile.steps {settings.steps}: not profiled again, since {done} steps are done")
        yield records
        return
    profiling, peak = _Profiling(started, say), _PeakWithoutProfile(started.run.plan.device)
    try:
        yield chain(
            peak.before(islice(records, max(first - 1 - done, 0))),
            peak.during(profiling.steps(records, last=last)),
            peak.after(records),
        )
        if not profiling.finish():
            say(f"profile.steps {settings.steps}: nothing was profiled, since the run ended before step {first}")
    finally:
        profiling.stop()


class _PeakWithoutProfile:
    """The peak memory of records without that of the profile, which a CPU's resident memory has in it.

    Profiled steps have the peak of the steps before them, or none. Those after them count from the end of the profile.
    """

    def __init__(self, device: str) -> None:
        self._is_host = device == "cpu"
        self._known: dict[str, float] = {}

    def before(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """The records before the profile."""
        for record in records:
            self._known = {_PEAK: record.values[_PEAK]}
            yield record

    def during(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """The records of profiled steps."""
        for record in records:
            values = {name: value for name, value in record.values.items() if name != _PEAK} | self._known
            yield replace(record, values=values) if self._is_host else record
        if self._is_host:
            restart_peak()

    def after(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        """The records after the profile."""
        for record in records:
            yield record.with_values({_PEAK: max(record.values[_PEAK], *self._known.values(), 0.0)})


class _Profiling:
    """The profile of one run: no profiler exists before its first step and after its last."""

    def __init__(self, started: StartedRun, say: Say) -> None:
        self._started = started
        self._say = say
        self._profiler: StepProfiler | None = None
        self._has_finished = False

    def steps(self, records: Iterator[StepRecord], *, last: int) -> Iterator[StepRecord]:
        """The records up to step `last`; what follows a record until the next one is asked for belongs to its step."""
        self._profiler = profiler = self._make_profiler()
        with self._started.rank_progress.during(FOLDER):
            profiler.start()
        number = 0
        while number < last:
            profiler.begin_step()
            record = next(records, None)
            if record is None:
                break
            number = record.step
            profiler.number_step(number)
            yield record
            profiler.end_step()
        self.finish()

    def finish(self) -> bool:
        """Write what was profiled, once; returns whether anything was. Collective."""
        profiler = self._profiler
        if profiler is not None:
            self._profiler = None
            with self._started.rank_progress.during(FOLDER):
                self._has_finished = profiler.finish(self._started.run.output_dir / FOLDER, self._say)
        return self._has_finished

    def stop(self) -> None:
        """Stop recording after an error, and write nothing."""
        if self._profiler is not None:
            self._profiler.stop()

    def _make_profiler(self) -> StepProfiler:
        run, settings = self._started.run, self._started.run.config.profile
        assert settings is not None
        size = run.plan.world.world_size
        ranks = tuple(range(size)) if settings.ranks == "all" else settings.ranks
        about = ProfiledRun(run.plan.device, str(run.plan.mesh), size, ranks)
        return StepProfiler(about, self._started.store, clock=HostClock(), wrap_phases=self._wrap_phases)

    @contextmanager
    def _wrap_phases(self, recorder: Recorder) -> Iterator[None]:
        """Record phases of the engine, and saves."""
        saver = self._started.saver
        with ExitStack() as stack:
            stack.enter_context(wrapped_phases(self._started.engine, recorder.during))
            if saver is not None:
                for name in ("save", "settle"):
                    stack.enter_context(replaced(saver, name, recorder.during(CHECKPOINT)(getattr(saver, name))))
            yield
