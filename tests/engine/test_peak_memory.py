"""The peak memory of a process, and of the records of a run with profiled steps."""

import sys
from pathlib import Path

import pytest

from ds_finetune.engine.devices import peak_bytes, restart_peak
from ds_finetune.observers.record import StepRecord
from ds_finetune.trainer.profiling import without_peak_of_profile

SIZE = 400 * 2**20
NAME = "memory/peak_gib"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can restart the peak of a process")
def test_a_peak_can_be_restarted() -> None:
    held = b"1" * SIZE
    high = peak_bytes("cpu")
    del held
    restart_peak()
    assert peak_bytes("cpu") < high - SIZE // 2
    assert Path("/proc/self/clear_refs").exists()


def _peaks(gib: list[float], *, first: int, last: int) -> list[float | None]:
    """The peaks of the records of steps, of which those from `first` to `last` are profiled."""
    records = [StepRecord(number, {NAME: value, "train/loss": 1.0}) for number, value in enumerate(gib, start=1)]
    found = list(without_peak_of_profile(iter(records), first, last))
    assert [record.step for record in found] == [record.step for record in records]
    return [record.values.get(NAME) for record in found]


def test_profiled_steps_do_not_count_for_the_peak() -> None:
    assert _peaks([1.0, 1.2, 5.0, 5.0, 1.1, 1.4], first=3, last=4) == [1.0, 1.2, 1.2, 1.2, 1.2, 1.4]
    assert _peaks([5.0, 1.1], first=1, last=1) == [None, 1.1]
