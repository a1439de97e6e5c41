"""Which rank is named, from what ranks say."""

from dataclasses import replace

import pytest
from pydantic import TypeAdapter

from ds_finetune.cluster.watchdog.endings import diagnose
from ds_finetune.cluster.watchdog.progress import FAILING, RankStatus
from ds_finetune.engine.groups.collective_log import POINT_TO_POINT, CollectiveCall


def _status(calls: list[CollectiveCall], *, inside: bool = True) -> RankStatus:
    counts = {call.ranks: call.number for call in calls}
    last = calls[-1] if calls else None
    return RankStatus(last if inside else None, last, counts, phase="step", step=3, seconds=60.0)


def _calls(*names: str, ranks: str = "all", first: int = 1) -> list[CollectiveCall]:
    return [CollectiveCall(name, 8, ranks, number) for number, name in enumerate(names, start=first)]


STEP = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


def test_a_rank_that_has_not_entered_is_behind() -> None:
    waiting = _calls("all_reduce", "all_gather")
    found = diagnose({0: _status(waiting), 1: _status(waiting[:1], inside=False), 2: _status(waiting)})
    assert found[0] == (1,)
    assert found[1] == "has entered 1 collectives of all, others 2"


def test_a_rank_behind_because_it_waits_in_another_group_is_not_the_root() -> None:
    """Rank 0 waits for 1 among all; 1 waits for 2 in a group of two, which has gone to sleep."""
    pair = "ranks 1,2"
    statuses = {
        0: _status(_calls("all_reduce")),
        1: _status(_calls("all_gather", ranks=pair)),
        2: _status([], inside=False),
    }
    assert diagnose(statuses)[0] == (2,)


def test_a_rank_that_waits_where_all_have_entered_is_not_at_fault() -> None:
    """30% of the packets to rank 1 were lost for longer than the limit: gloo waited for data that the others had sent."""
    statuses = {0: _status(_calls(*STEP)), 1: _status(_calls(*STEP[:3])), 2: _status(_calls(*STEP))}
    at_fault, why = diagnose(statuses)
    assert at_fault == ()
    assert why == "rank 1 waits in reduce_scatter of 8 bytes (number 3 of all) for data of ranks that have left it"
    # After an error the last collective counts as the one inside, although the rank has left it.
    failing = replace(statuses[1], state=FAILING)
    assert diagnose(statuses | {1: failing}) == ((1,), "has entered 3 collectives of all, others 4")
    # A member of its group that has not entered is what the others wait for.
    asleep = {0: _status(_calls(*STEP)), 1: _status(_calls(*STEP[:3])), 2: _status(_calls(*STEP[:2]), inside=False)}
    assert diagnose(asleep)[0] == (2,)


@pytest.mark.parametrize("at_fault", [0, 1, 2])
def test_another_collective_than_that_of_most(at_fault: int) -> None:
    statuses = {rank: _status(_calls(*STEP[:3], "barrier" if rank == at_fault else "broadcast")) for rank in range(3)}
    found = diagnose(statuses)
    assert found[0] == (at_fault,)
    assert "number 4 of all" in found[1]
    assert f"rank {at_fault} barrier" in found[1]


def test_of_two_ranks_in_different_collectives_both_are_named() -> None:
    statuses = {0: _status(_calls(*STEP, "all_reduce")), 1: _status(_calls(*STEP, "barrier"))}
    at_fault, why = diagnose(statuses)
    assert at_fault == (0, 1)
    assert why == "differs at collective number 5 of all: rank 0 all_reduce of 8; rank 1 barrier of 8"


def test_sizes_differ_too() -> None:
    calls = [CollectiveCall("all_reduce", size, "all", 1) for size in (8, 8, 9)]
    assert diagnose({rank: _status([call]) for rank, call in enumerate(calls)})[0] == (2,)


def test_what_goes_between_two_ranks_is_not_compared() -> None:
    statuses = {
        0: _status(_calls("send", ranks=POINT_TO_POINT), inside=False),
        1: _status(_calls("recv", "recv", ranks=POINT_TO_POINT)),
    }
    found = diagnose(statuses)
    assert found[0] == (0,)
    assert "in no collective" in found[1]


def test_where_all_wait_at_one_place_none_is_named() -> None:
    statuses = {rank: _status(_calls(*STEP)) for rank in range(4)}
    assert diagnose(statuses)[0] == ()


def test_a_status_is_the_same_after_it_was_sent() -> None:
    status = _status(_calls(*STEP))
    adapter = TypeAdapter(RankStatus)
    assert adapter.validate_json(adapter.dump_json(status)) == status
