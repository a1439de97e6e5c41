"""Signals during the verification of exports: no signal is lost, and the error names unverified folders."""

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ds_finetune.errors import VerificationError


class SignalInterruption:
    """A context in which each of `signals` raises KeyboardInterrupt; `name` is the name of the first signal.

    Python prints an exception that a signal handler raises within a destructor, and continues. DeepSpeed 0.19.8 has a
    destructor (runtime/engine.py:1236) that takes most of a second at the end of a run. A signal lost there is raised
    at the end of the context, or by `check`. Ignored signals, e.g. under nohup, stay ignored.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.name = ""
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        handled = [number for number in self._signals if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._interrupt) for number in handled}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None and self.name:
            raise KeyboardInterrupt

    def check(self, unverified: Sequence[Path]) -> None:
        """Raise VerificationError if a signal has arrived and `unverified` names folders; the error lists them."""
        if self.name and unverified:
            raise VerificationError(
                f"{self.name} ended the verification; written but not verified: {', '.join(map(str, unverified))}",
                hint="; ".join(f"ds-finetune export --check {folder}" for folder in unverified),
            )

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        raise KeyboardInterrupt
