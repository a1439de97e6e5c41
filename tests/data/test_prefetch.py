"""Batches are made ahead by a thread, in their order; errors come in their place."""

import threading
import time

import pytest

from ds_finetune.data.batches import prefetched


def test_items_come_in_order_and_the_thread_ends() -> None:
    with prefetched(range(50), lambda number: number * 2) as found:
        assert list(found) == [2 * number for number in range(50)]
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_items_are_made_while_the_reader_works_and_only_a_few_ahead() -> None:
    made: list[int] = []
    with prefetched(range(50), made.append) as found:
        next(found)
        until = time.monotonic() + 60
        while len(made) < 3 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)
        assert made == [0, 1, 2]
    assert len(made) <= 5
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_an_error_is_raised_where_its_item_would_come() -> None:
    def fail_at_three(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    with prefetched(range(5), fail_at_three) as found:
        assert [next(found), next(found), next(found)] == [0, 1, 2]
        with pytest.raises(ValueError, match="three"):
            next(found)
