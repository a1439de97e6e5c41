"""The progress line of training, and the metric `perf/eta_seconds`: the time until the end of the run, which the
progress line and pages show as `eta`.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from ds_finetune.config.schedule import Interval
from ds_finetune.config.sections import LogConfig
from ds_finetune.console.phase_line import CLEAR_LINE, time_text, write_now
from ds_finetune.observers.record import Observer, StepRecord

EVALUATION, ANSWERS, SAVE, EXPORT = "evaluation", "answers", "save", "export"
_RECENT_STEPS = 50
_BYTES_PER_SECOND = 200e6
"""Assumed speed of an export, and of its verification, in bytes per second. It is that of a slow disk, and holds until
an export has been measured.
"""
_LOADING_SECONDS = 15.0
"""Assumed seconds that the process which verifies an export needs to import torch and transformers."""


class TimeLeft(Observer):
    """Adds the metric `perf/eta_seconds`: the time that the remaining steps, evaluations, saves and exports will take,
    by their durations so far.

    `intervals` are the intervals of evaluations, answers and saves, each of which also happens at the last step. An
    evaluation is assumed to take as long as `evaluation_steps` steps until one has been measured. `export_bytes` is the
    size of all exports at the end, and `verifies` says whether they are verified.
    """

    def __init__(
        self,
        steps: int,
        intervals: Mapping[str, Interval],
        *,
        evaluation_steps: float = 0.0,
        export_bytes: float = 0.0,
        verifies: bool = False,
    ) -> None:
        self._steps, self._intervals = steps, intervals
        self._evaluation_steps, self._export_bytes, self._verifies = evaluation_steps, export_bytes, verifies
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._measured: dict[str, list[float]] = {}

    def after_step(self, record: StepRecord) -> StepRecord:
        """Add the estimated time to the end of the run."""
        self._step_seconds.append(record.values["perf/step_seconds"])
        return record.with_values({"perf/eta_seconds": self.seconds(record.step)})

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Measure how long `phase`, such as an evaluation or a save, takes. Functions can also be decorated by it."""
        began = time.monotonic()
        yield
        self._measured.setdefault(phase, []).append(time.monotonic() - began)

    def seconds(self, step: int) -> float:
        """Estimated seconds from the end of `step` to the end of the run."""
        step_seconds = _mean(self._step_seconds)
        seconds_left = (self._steps - step) * step_seconds
        for phase, intervals in self._intervals.items() if step < self._steps else ():
            times = intervals.times(self._steps - 1) - intervals.times(step) + 1
            seconds_left += times * self._seconds_of(phase, step_seconds)
        return seconds_left + self._end_seconds()

    def _seconds_of(self, phase: str, step_seconds: float) -> float:
        if phase not in self._measured:
            return self._evaluation_steps * step_seconds if phase == EVALUATION else 0.0
        # After some evaluations the best weights are exported. The mean time of an evaluation includes the time of
        # these exports.
        exports = sum(self._measured.get(EXPORT, [])) / len(self._measured[phase]) if phase == EVALUATION else 0.0
        return _mean(self._measured[phase]) + exports

    def _end_seconds(self) -> float:
        if not self._export_bytes:
            return 0.0
        moved = self._export_bytes / _BYTES_PER_SECOND
        export = _mean(self._measured[EXPORT]) if EXPORT in self._measured else moved
        return export + (moved + _LOADING_SECONDS if self._verifies else 0.0)


def _mean(seconds: "deque[float] | list[float]") -> float:
    return sum(seconds) / len(seconds) if seconds else 0.0


class ProgressLine:
    """Writes the progress line of training to `out`, and to `log`, every `log.every` steps. On a terminal the line is
    updated in place.
    """

    def __init__(
        self,
        *,
        steps: int,
        section: LogConfig,
        out: TextIO | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._steps, self._section, self._log = steps, section, log
        self._printed = -math.inf
        """Monotonic time at which the last progress line was printed."""
        self._out = out or sys.stdout
        self._live = self._out.isatty()

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the progress line if it is due. It is always due after an evaluation, at the last step, and if the
        record has a message.
        """
        must_print = (
            record.slow
            or record.notice
            or record.stop
            or record.is_last
            or any(name in record.values for name in ("eval/loss", "eval/reward"))
        )
        is_due = must_print or record.step % self._section.every == 0
        if not is_due and not self._live:
            return record
        line = self._line(record)
        if is_due and self._log is not None:
            self._log(line)
        if self._live:
            write_now(self._out, CLEAR_LINE + line + ("\n" if must_print else ""))
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
        parts = [
            f"step {record.step}/{self._steps}",
            f"loss {v['train/loss']:.4f}",
            f"grad_norm {v['train/grad_norm']:.3g}",
            f"lr {v['optim/lr']:.3g}",
            f"{v['perf/tokens_per_second']:,.0f} tokens/s",
        ]
        parts += [f"mfu {v['perf/mfu']:.1%}"] if "perf/mfu" in v else []
        parts += [f"mem {v['memory/peak_gib']:.2f} GiB"] if "memory/peak_gib" in v else []
        parts += [f"eta {time_text(v['perf/eta_seconds'])}"] if record.step < self._steps else []
        parts += [f"skipped {v['train/skipped_steps']:.0f}"] if v["train/skipped_steps"] else []
        parts += [f"{name} {v[name]:.4f}" for name in v if _is_shown(name)]
        if "eval/loss" in v and record.best_step:
            parts += ["the best so far" if record.best_step == record.step else f"the best is step {record.best_step}"]
        parts += [f"SKIPPED: {record.notice}"] if record.notice else []
        parts += [f"SLOW: {record.slow}"] if record.slow else []
        parts += [f"STOP: {record.stop}"] if record.stop else []
        return "  ".join(parts)


def _is_shown(name: str) -> bool:
    """Whether the progress line shows the metric `name`. It shows rewards of rollouts and pairs, the losses of named
    held-out sets, and all metrics over all held-out rows except perplexity.
    """
    part, *of_set, metric = name.split("/")
    if name in ("rollout/reward", "rollout/cut", "train/reward_accuracy", "train/reward_margin"):
        return True
    return part == "eval" and (metric == "loss" if of_set else metric != "perplexity")
