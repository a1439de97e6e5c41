"""The progress line of a phase, on a terminal and elsewhere."""

import io
from collections.abc import Callable, Iterator

import pytest

from ds_finetune.console.phase_line import CLEAR_LINE, PhaseLine, count_parts

SetTimes = Callable[[list[float]], None]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetTimes]:
    """Sets what the clock will show, one value after another."""

    def set_times(times: list[float]) -> None:
        values = iter(times)
        monkeypatch.setattr("ds_finetune.console.phase_line.time.monotonic", lambda: next(values))

    yield set_times
    monkeypatch.undo()


def test_a_log_gets_a_line_after_five_seconds_then_one_a_minute_and_one_at_the_end(clock: SetTimes) -> None:
    clock([0.0, 3.0, 10.0, 40.0, 75.0, 80.0, 100.0])
    out = io.StringIO()
    with PhaseLine("loading weights", 8, out=out) as line:
        for _ in range(5):
            line.advance()
    assert out.getvalue() == ("loading weights 2/8  eta 30 s\nloading weights 4/8  eta 1 min\nloading weights: 2 min\n")


def test_a_short_phase_prints_nothing_in_a_log(clock: SetTimes) -> None:
    clock([0.0, 3.0, 4.0])
    out = io.StringIO()
    with PhaseLine("loading weights", 2, out=out) as line:
        line.advance()
        line.advance()
    assert out.getvalue() == ""


def test_a_terminal_keeps_one_line_and_ends_without_it(clock: SetTimes) -> None:
    clock([0.0, 0.6, 0.7, 1.2, 1.3])
    out = Terminal()
    with PhaseLine("exporting tensors", 4, out=out) as line:
        for _ in range(3):
            line.advance()
    states = [f"{CLEAR_LINE}exporting tensors 1/4  eta 2 s", f"{CLEAR_LINE}exporting tensors 3/4  eta 0 s", CLEAR_LINE]
    assert out.getvalue() == "".join(states)


def test_work_that_asks_before_each_part_counts_the_one_before(clock: SetTimes) -> None:
    clock([0.0, 0.0, 10.0, 80.0, 100.0])
    out = io.StringIO()
    with PhaseLine("evaluation", 8, out=out) as line:
        is_over = line.before_each(lambda: False)
        assert [is_over() for _ in range(3)] == [False] * 3
    assert out.getvalue() == "evaluation 1/8  eta 1 min\nevaluation 2/8  eta 4 min\nevaluation: 2 min\n"


def test_without_a_total_the_line_has_the_time_so_far(clock: SetTimes) -> None:
    clock([0.0, 6.0, 70.0, 80.0])
    out = io.StringIO()
    with PhaseLine("tokenising rows", out=out) as line:
        line.advance(0)
        line.advance(10_000)
    assert out.getvalue() == "tokenising rows  6 s\ntokenising rows 10,000  1 min\ntokenising rows: 1 min\n"


def test_past_an_estimated_total_the_line_has_the_time_so_far(clock: SetTimes) -> None:
    clock([0.0, 6.0, 80.0])
    out = io.StringIO()
    with PhaseLine("tokenising rows", 100, out=out) as line:
        line.advance(120)
    assert out.getvalue() == "tokenising rows 120  6 s\ntokenising rows: 1 min\n"


def test_ranks_other_than_the_first_print_nothing(clock: SetTimes, monkeypatch: pytest.MonkeyPatch) -> None:
    clock([0.0, 10.0, 20.0])
    monkeypatch.setenv("RANK", "1")
    out = io.StringIO()
    with PhaseLine("loading weights", 1, out=out) as line:
        line.advance()
    assert out.getvalue() == ""


def test_parts_are_passed_on() -> None:
    assert list(count_parts("loading weights", iter([1, 2]), 2)) == [1, 2]


def test_the_time_left_does_not_count_the_start_of_processes(clock: SetTimes) -> None:
    clock([0.0, 150.0, 156.0, 216.0, 220.0])
    out = io.StringIO()
    with PhaseLine("tokenising rows", 102, warmup=1, out=out) as line:
        line.advance()
        line.advance()
        line.advance(10)
    assert out.getvalue() == "tokenising rows 1/102\ntokenising rows 12/102  eta 9 min\ntokenising rows: 4 min\n"
