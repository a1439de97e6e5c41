"""Progress line of training, and the metric `perf/eta_seconds`: the time until the end of training, which the progress
line and pages show as `eta`.
"""

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import TextIO

from ds_finetune.config.schedule import Interval
from ds_finetune.config.sections import LogConfig
from ds_finetune.console.phase_line import CLEAR_LINE, time_text, write_now
from ds_finetune.observers.record import Observer, StepRecord

EVALUATION, ANSWERS, SAVE, EXPORT = "evaluation", "answers", "save", "export"
_RECENT_STEPS = 50
_OF_OBJECTIVES = ("rollout/reward", "rollout/cut", "train/reward_accuracy", "train/reward_margin")
"""Metrics of rollouts and of pairs of answers that the progress line shows."""


class TimeLeft(Observer):
    """Adds the metric `perf/eta_seconds`: the time of the remaining steps, evaluations and saves, estimated from their
    durations so far. The export after the last step is not included.

    `intervals` are those of evaluations, of generated answers and of saves, which also happen at the last step. Until
    an evaluation has been measured, it is assumed to take as long as `evaluation_steps` steps.
    """

    def __init__(self, steps: int, intervals: Mapping[str, Interval], *, evaluation_steps: float = 0.0) -> None:
        self._steps, self._intervals, self._evaluation_steps = steps, intervals, evaluation_steps
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._measured: dict[str, list[float]] = {}

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add to the record how many seconds of training are left, by estimate."""
        self._step_seconds.append(record.values["perf/step_seconds"])
        return record.with_values({"perf/eta_seconds": self.seconds(record.step)})

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Measure how long `phase`, such as an evaluation or a save, takes. Functions can also be decorated with it."""
        began = time.monotonic()
        yield
        self._measured.setdefault(phase, []).append(time.monotonic() - began)

    def seconds(self, step: int) -> float:
        """Estimated seconds from the end of `step` to the end of training."""
        step_seconds = fmean(self._step_seconds or [0.0])
        seconds_left = (self._steps - step) * step_seconds
        for phase, intervals in self._intervals.items() if step < self._steps else ():
            times = intervals.times(self._steps - 1) - intervals.times(step) + 1
            if phase in self._measured:
                # After some evaluations the best weights are exported; the mean export time per evaluation is added.
                exports = self._measured.get(EXPORT, []) if phase == EVALUATION else []
                seconds_left += times * (fmean(self._measured[phase]) + sum(exports) / len(self._measured[phase]))
            elif phase == EVALUATION:
                seconds_left += times * (self._evaluation_steps * step_seconds)
        return seconds_left


class ProgressLine:
    """Writes the progress line of training every `log.every` steps, and a line after each evaluation, to `log` and
    `out`. `out` skips a plain progress line within `log.seconds` of the last line. A terminal shows each step in place.

    `steps` are the steps of the run, and `steps_per_epoch` those of an epoch (infinite for a stream).
    """

    def __init__(
        self,
        *,
        steps: int,
        section: LogConfig,
        steps_per_epoch: float = math.inf,
        out: TextIO | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._steps, self._steps_per_epoch, self._section, self._log = steps, steps_per_epoch, section, log
        self._printed = -math.inf
        self._out = out or sys.stdout
        self._live = self._out.isatty()

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the progress line if due: by its interval, after an evaluation, at the last step, or with a message."""
        evaluation = _evaluation_line(record)
        must_print = bool(record.slow or record.notice or record.stop or record.is_last or evaluation)
        is_due = must_print or record.step % self._section.every == 0
        if not is_due and not self._live:
            return record
        line = f"{self._line(record)}\n{evaluation}".rstrip("\n")
        if is_due and self._log is not None:
            self._log(line)
        if self._live:
            # The line is cut to the width of the terminal: the next line could not replace one that is wrapped.
            shown = f"{line}\n" if must_print else line[: shutil.get_terminal_size().columns - 1]
            write_now(self._out, CLEAR_LINE + shown)
        elif must_print or time.monotonic() - self._printed >= self._section.seconds:
            write_now(self._out, line + "\n")
            self._printed = time.monotonic()
        return record

    def close(self) -> None:
        """End the progress line on a terminal with a line break."""
        if self._live:
            write_now(self._out, "\n")

    def _line(self, record: StepRecord) -> str:
        v = record.values
        waiting = v["perf/data_wait_seconds"] / v["perf/step_seconds"]
        parts = [
            f"step {record.step}/{self._steps}",
            *([f"epoch {record.step / self._steps_per_epoch:.2f}"] if self._steps_per_epoch < math.inf else []),
            *([f"eta {time_text(v['perf/eta_seconds'])}"] if record.step < self._steps else []),
            f"loss {v['train/loss']:.4f}",
            f"grad_norm {v['train/grad_norm']:.3g}",
            f"lr {v['optim/lr']:.3g}",
            f"{v['perf/step_seconds']:.3g} s/step{f' ({waiting:.0%} waiting for a batch)' if waiting > 0.25 else ''}",
            f"{v['perf/tokens_per_second']:,.0f} tokens/s",
        ]
        parts += [f"mfu {v['perf/mfu']:.1%}"] if "perf/mfu" in v else []
        parts += [f"mem {v['memory/peak_gib']:.2f} GiB"] if "memory/peak_gib" in v else []
        parts += [f"skipped {v['train/skipped_steps']:.0f}"] if v["train/skipped_steps"] else []
        parts += [f"{name} {v[name]:.4f}" for name in v if name in _OF_OBJECTIVES]
        parts += [f"SKIPPED: {record.notice}"] if record.notice else []
        is_zero = not (v["train/grad_norm"] or record.notice)
        parts += ["NOTHING LEARNED: the gradient of every parameter is 0"] if is_zero else []
        parts += [f"SLOW: {record.slow}"] if record.slow else []
        parts += [f"STOP: {record.stop}"] if record.stop else []
        return "  ".join(parts)


def _evaluation_line(record: StepRecord) -> str:
    """Line on an evaluation: all metrics but perplexity over all held-out rows, the losses of named held-out sets, and
    the best step so far. Empty after a step without an evaluation.
    """
    metrics = [(name, name.removeprefix("eval/")) for name in record.values if name.startswith("eval/")]
    parts = [
        f"{short} {record.values[name]:.4f}"
        for name, short in metrics
        if (short.endswith("/loss") if "/" in short else short != "perplexity")
    ]
    if parts and record.best_step:
        parts.append("best so far" if record.best_step == record.step else f"best is step {record.best_step}")
    return "  ".join([f"evaluation after step {record.step}", *parts]) if parts else ""
