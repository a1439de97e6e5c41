"""One line that says how the run goes: live on a terminal, plain elsewhere."""

import sys
import time
from typing import TextIO

from ds_finetune.observers.record import StepRecord

_MINUTE, _HOUR = 60, 3600


class ProgressLine:
    """Writes a line every `every` steps to `out`; on a terminal the line stays in place."""

    def __init__(self, *, steps: int, every: int, out: TextIO | None = None) -> None:
        self._steps, self._every = steps, every
        self._out = out or sys.stdout
        self._live = self._out.isatty()
        self._started = time.monotonic()
        self._first: int | None = None

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the line when it is time, and always for a notice, an evaluation or an end."""
        if self._first is None:
            self._first = record.step - 1
        told = record.slow or record.notice or record.stop or record.is_last or "eval/loss" in record.values
        if not told and record.step % self._every and not self._live:
            return record
        line = self._line(record)
        if not self._live:
            self._out.write(line + "\n")
        else:
            self._out.write("\r\x1b[2K" + line + ("\n" if told else ""))
        self._out.flush()
        return record

    def close(self) -> None:
        """End the live line."""
        if self._live:
            self._out.write("\n")

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
        parts += [f"mem {v['memory/peak_gib']:.2f} GiB", f"eta {self._left(record.step)}"]
        parts += [f"skipped {v['train/skipped_steps']:.0f}"] if v["train/skipped_steps"] else []
        for name in ("eval/loss", "eval/accuracy", "eval/exact_match"):
            parts += [f"{name} {v[name]:.4f}"] if name in v else []
        parts += [f"SKIPPED: {record.notice}"] if record.notice else []
        parts += [f"SLOW: {record.slow}"] if record.slow else []
        parts += [f"STOP: {record.stop}"] if record.stop else []
        return "  ".join(parts)

    def _left(self, step: int) -> str:
        done = max(step - (self._first or 0), 1)
        seconds = (time.monotonic() - self._started) / done * (self._steps - step)
        if seconds < _MINUTE:
            return f"{seconds:.0f} s"
        return f"{seconds / _MINUTE:.0f} min" if seconds < _HOUR else f"{seconds / _HOUR:.1f} h"
