"""Which rank is named, from what ranks say."""

import pytest
from pydantic import TypeAdapter

from ds_finetune.cluster.watchdog.collectives import POINT_TO_POINT
from ds_finetune.cluster.watchdog.diagnosis import diagnose
from ds_finetune.cluster.watchdog.progress import CollectiveCall, RankStatus


def _status(rank: int, calls: list[CollectiveCall], *, inside: bool = True) -> RankStatus:
    counts = {call.ranks: call.number for call in calls}
    last = calls[-1] if calls else None
    return RankStatus(rank, "step", 3, 60.0, last if inside else None, last, counts, tuple(calls))


def _calls(*names: str, ranks: str = "all", first: int = 1) -> list[CollectiveCall]:
    return [CollectiveCall(name, 8, ranks, number) for number, name in enumerate(names, start=first)]


STEP = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def test_a_rank_that_does_not_answer_comes_first() -> None:
    found = diagnose({0: _status(0, _calls("all_reduce")), 1: None, 2: _status(2, [], inside=False)})
    assert found.at_fault == (1,)
    assert "does not answer" in found.why


def test_where_heartbeats_come_late_the_network_is_named_and_no_rank() -> None:
    """What ranks do was sent at different times."""
    waiting = _calls("all_reduce", "all_gather")
    for other in (_status(1, waiting), None):
        found = diagnose({0: _status(0, waiting[:1]), 1: other}, network="heartbeats came late")
        assert (found.at_fault, found.why) == ((), "heartbeats came late")


def test_a_rank_that_has_not_entered_is_behind() -> None:
    waiting = _calls("all_reduce", "all_gather")
    found = diagnose({0: _status(0, waiting), 1: _status(1, waiting[:1], inside=False), 2: _status(2, waiting)})
    assert found.at_fault == (1,)
    assert found.why == "has entered 1 collectives of all, others 2"


def test_a_rank_behind_because_it_waits_in_another_group_is_not_the_root() -> None:
    """Rank 0 waits for 1 among all; 1 waits for 2 in a group of two, which has gone to sleep."""
    pair = "ranks 1,2"
    statuses = {
        0: _status(0, _calls("all_reduce")),
        1: _status(1, _calls("all_gather", ranks=pair)),
        2: _status(2, [], inside=False),
    }
    assert diagnose(statuses).at_fault == (2,)


@pytest.mark.parametrize("at_fault", [0, 1, 2])
def test_another_collective_than_that_of_most(at_fault: int) -> None:
    statuses = {
        rank: _status(rank, _calls(*STEP[:3], "barrier" if rank == at_fault else "broadcast")) for rank in range(3)
    }
    found = diagnose(statuses)
    assert found.at_fault == (at_fault,)
    assert "number 4 of all" in found.why
    assert f"rank {at_fault} barrier" in found.why


@pytest.mark.parametrize("at_fault", [0, 1])
def test_of_two_ranks_the_one_that_leaves_the_pattern_is_odd(at_fault: int) -> None:
    """The third step goes on as the first two did, on the rank that skipped nothing."""
    right = _calls(*STEP, *STEP, *STEP[:2])
    skipped = _calls(*STEP, *STEP, STEP[0], STEP[2])
    assert diagnose({at_fault: _status(at_fault, skipped), 1 - at_fault: _status(1 - at_fault, right)}).at_fault == (
        at_fault,
    )


def test_without_a_pattern_both_are_named() -> None:
    assert diagnose({0: _status(0, _calls("all_reduce")), 1: _status(1, _calls("barrier"))}).at_fault == (0, 1)


def test_sizes_differ_too() -> None:
    calls = [CollectiveCall("all_reduce", size, "all", 1) for size in (8, 8, 9)]
    assert diagnose({rank: _status(rank, [call]) for rank, call in enumerate(calls)}).at_fault == (2,)


def test_what_goes_between_two_ranks_is_not_compared() -> None:
    statuses = {
        0: _status(0, _calls("send", ranks=POINT_TO_POINT), inside=False),
        1: _status(1, _calls("recv", "recv", ranks=POINT_TO_POINT)),
    }
    found = diagnose(statuses)
    assert found.at_fault == (0,)
    assert "in no collective" in found.why


def test_where_all_wait_at_one_place_none_is_named() -> None:
    statuses = {rank: _status(rank, _calls(*STEP)) for rank in range(4)}
    assert diagnose(statuses).at_fault == ()


def test_a_status_is_the_same_after_it_was_sent() -> None:
    status = _status(3, _calls(*STEP))
    adapter = TypeAdapter(RankStatus)
    assert adapter.validate_json(adapter.dump_json(status)) == status
