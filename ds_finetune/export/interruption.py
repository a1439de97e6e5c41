"""Handles SIGINT and SIGTERM while exports are verified: no signal is lost, and the error names unverified folders."""

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ds_finetune.errors import VerificationError


class SignalInterruption:
    """Context in which each of `signals` raises KeyboardInterrupt. `name` is the name of the first signal that arrived.

    A KeyboardInterrupt raised within a destructor is lost: Python prints it and continues. DeepSpeed 0.19.8 has a
    destructor (runtime/engine.py:1236) that takes most of a second at the end of a run. A signal that arrives there is
    raised again at the end of the context, or by `check`. Signals that were ignored before, e.g. under nohup, stay
    ignored.
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
        """If a signal has arrived, raise a VerificationError that lists the `unverified` folders, if any."""
        if self.name and unverified:
            raise VerificationError(
                f"{self.name} ended the verification: these folders are complete but not verified: "
                f"{', '.join(map(str, unverified))}",
                hint="verify them: " + "; ".join(f"ds-finetune export --check {folder}" for folder in unverified),
            )

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        raise KeyboardInterrupt
