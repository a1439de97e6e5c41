"""The progress line of training: one line that stays in place on a terminal, a line every so many steps elsewhere."""

import sys
from collections.abc import Callable
from typing import TextIO

from ds_finetune.console.phase_line import CLEAR_LINE, time_text, write_now
from ds_finetune.observers.record import StepRecord
from ds_finetune.observers.time_left import TimeLeft


class ProgressLine:
    """Writes a line every `every` steps to `out` and `log`; on a terminal the line stays in place."""

    def __init__(
        self,
        *,
        steps: int,
        every: int,
        left: TimeLeft,
        out: TextIO | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self._steps, self._every, self._left, self._log = steps, every, left, log
        self._out = out or sys.stdout
        self._live = self._out.isatty()

    def after_step(self, record: StepRecord) -> StepRecord:
        """Write the line when it is due, and always for a notice, an evaluation or the end of the run."""
        self._left.count_step(record.values["perf/step_seconds"])
        must_print = record.slow or record.notice or record.stop or record.is_last or "eval/loss" in record.values
        is_due = must_print or record.step % self._every == 0
        if not is_due and not self._live:
            return record
        line = self._line(record)
        if is_due and self._log is not None:
            self._log(line)
        write_now(self._out, CLEAR_LINE + line + ("\n" if must_print else "") if self._live else line + "\n")
        return record

    def close(self) -> None:
        """End the live line."""
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
        parts += [f"eta {time_text(self._left.seconds(record.step))}"]
        parts += [f"skipped {v['train/skipped_steps']:.0f}"] if v["train/skipped_steps"] else []
        parts += [f"{name} {v[name]:.4f}" for name in v if _is_shown(name)]
        parts += [f"SKIPPED: {record.notice}"] if record.notice else []
        parts += [f"SLOW: {record.slow}"] if record.slow else []
        parts += [f"STOP: {record.stop}"] if record.stop else []
        return "  ".join(parts)


def _is_shown(name: str) -> bool:
    """Whether the line has this metric: those of all held-out rows, and the loss of each set that has a name."""
    part, *of_set, metric = name.split("/")
    return part == "eval" and (metric == "loss" if of_set else metric != "perplexity")
