"""One line that says how the run goes, and one within an evaluation: live on a terminal, plain elsewhere."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.time_left import TimeLeft

_MINUTE, _HOUR = 60, 3600
_CLEAR = "\r\x1b[2K"
_LIVE_SECONDS, _PLAIN_SECONDS = 0.5, 30.0
"""Time between two lines of an evaluation, on a terminal and elsewhere."""


class ProgressLine:
    """Writes a line every `every` steps to `out`; on a terminal the line stays in place."""

    def __init__(self, *, steps: int, every: int, left: TimeLeft, out: TextIO | None = None) -> None:
        self._steps, self._every, self._left = steps, every, left
        self._out = out or sys.stdout
        self._live = self._out.isatty()

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the line when it is time, and always for a notice, an evaluation or an end."""
        self._left.count_step(record.values["perf/step_seconds"])
        told = record.slow or record.notice or record.stop or record.is_last or "eval/loss" in record.values
        if not told and record.step % self._every and not self._live:
            return record
        line = self._line(record)
        _write(self._out, _CLEAR + line + ("\n" if told else "") if self._live else line + "\n")
        return record

    def close(self) -> None:
        """End the live line."""
        if self._live:
            _write(self._out, "\n")

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
        parts += [f"mem {v['memory/peak_gib']:.2f} GiB", f"eta {_time_text(self._left.seconds(record.step))}"]
        parts += [f"skipped {v['train/skipped_steps']:.0f}"] if v["train/skipped_steps"] else []
        for name in ("eval/loss", "eval/accuracy", "eval/exact_match"):
            parts += [f"{name} {v[name]:.4f}"] if name in v else []
        parts += [f"SKIPPED: {record.notice}"] if record.notice else []
        parts += [f"SLOW: {record.slow}"] if record.slow else []
        parts += [f"STOP: {record.stop}"] if record.stop else []
        return "  ".join(parts)


class PhaseLine:
    """Says how far an evaluation is, which asks before each batch or answer whether it is over."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._pause = _LIVE_SECONDS if self._live else _PLAIN_SECONDS

    def following(self, is_over: Callable[[], bool], what: str, total: int) -> Callable[[], bool]:
        """`is_over`, which writes a line about `what` when it is time; it is called `total` times, before each part."""
        began = told = time.monotonic()
        done = -1

        def asked() -> bool:
            nonlocal told, done
            done += 1
            now = time.monotonic()
            if done and now - told >= self._pause:
                told = now
                line = f"{what} {done}/{total}  eta {_time_text((now - began) / done * (total - done))}"
                _write(self._out, _CLEAR + line if self._live else line + "\n")
            return is_over()

        return asked


def _write(out: TextIO, text: str) -> None:
    """Write it at once; a full disk behind standard output does not end the run."""
    with suppress(OSError):
        out.write(text)
        out.flush()


def _time_text(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.0f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < _HOUR else f"{seconds / _HOUR:.1f} h"
