"""Signals that end a command while exported folders wait to be verified: none is lost, and what is unverified is
named.
"""

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ds_finetune.errors import VerificationError


class Interruption:
    """While it is open each of `signals` raises KeyboardInterrupt, and the name of the first is kept in `name`.

    Python prints an exception that a handler raises within a destructor and continues. DeepSpeed 0.19.8 has one
    (runtime/engine.py:1236) that runs for most of a second at the end of a run. A signal that was lost there is
    raised where the context closes, or by `check`. Signals that are ignored, e.g. under nohup, stay ignored.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.name = ""
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        wanted = [number for number in self._signals if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._take) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None and self.name:
            raise KeyboardInterrupt

    def check(self, unverified: Sequence[Path]) -> None:
        """VerificationError names the folders that are `unverified`, where there are some and a signal has come."""
        if self.name and unverified:
            raise VerificationError(
                f"{self.name} ended the verification; written but not verified: {', '.join(map(str, unverified))}",
                hint="; ".join(f"ds-finetune export --check {folder}" for folder in unverified),
            )

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        raise KeyboardInterrupt
