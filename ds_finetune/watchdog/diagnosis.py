"""Which rank is the at_fault one, from what every rank says of itself."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ds_finetune.watchdog.collectives import POINT_TO_POINT
from ds_finetune.watchdog.progress import CollectiveCall, RankStatus

_NAMED_RANKS = 8
_SERIES = 16
LOSSY = (
    "cannot be asked: packets between its machine and that of rank 0 are lost, so the network is at fault and "
    "perhaps no rank"
)


@dataclass(frozen=True)
class Diagnosis:
    """Ranks that stand out, and why; empty where none does."""

    at_fault: tuple[int, ...]
    why: str


def diagnose(answers: Mapping[int, RankStatus | None], *, cut_off: Collection[int] = ()) -> Diagnosis:
    """The at_fault ranks of a run that stands still; None is the answer of a rank that gave none.

    In this order: ranks that do not answer, those `cut_off` by the network after those that are not; ranks that
    have come to fewer collectives than others they share them with, those in no collective first, because the rest
    may wait for them; ranks in another collective than most; ranks in none while others are.
    """
    silent = tuple(rank for rank, answer in answers.items() if answer is None)
    reached = tuple(rank for rank in silent if rank not in cut_off)
    if reached:
        return Diagnosis(reached, "does not answer: stopped, dead, or held outside Python")
    if silent:
        return Diagnosis(silent, LOSSY)
    heard = {rank: answer for rank, answer in answers.items() if answer is not None}
    behind = {rank: text for rank, answer in heard.items() if (text := _behind(answer, heard))}
    idle = tuple(rank for rank in heard if heard[rank].inside is None)
    if behind:
        roots = tuple(rank for rank in behind if rank in idle) or tuple(behind)
        return Diagnosis(roots, behind[roots[0]])
    different = _different(heard)
    if different is not None:
        return different
    if idle and len(idle) < len(heard):
        return Diagnosis(idle, "is in no collective while others wait in one")
    return Diagnosis((), "every rank stands at the same place")


def _behind(answer: RankStatus, heard: Mapping[int, RankStatus]) -> str:
    for ranks, count in answer.counts.items():
        most = max(other.counts.get(ranks, 0) for other in heard.values())
        if ranks != POINT_TO_POINT and count < most:
            return f"has come to {count:,} collectives of {ranks}, others to {most:,}"
    return ""


def _different(heard: Mapping[int, RankStatus]) -> Diagnosis | None:
    """Ranks whose collective is not that of most, at the first number where they differ."""
    calls: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    for rank, call in _calls(heard):
        calls.setdefault((call.ranks, call.number), {})[rank] = call
    for (ranks, number), by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        kinds = Counter(call.kind for call in by_rank.values())
        if len(kinds) < 2:
            continue
        (common, votes), (_, next_votes) = kinds.most_common(2)
        expected = common if votes > next_votes else _expected(heard[next(iter(by_rank))], ranks, number)
        # Where nothing tells which side is right, both are named.
        at_fault = tuple(rank for rank, call in by_rank.items() if expected not in kinds or call.kind != expected)
        told = "; ".join(
            f"rank {rank} {by_rank[rank].name} of {by_rank[rank].size:,}" for rank in list(by_rank)[:_NAMED_RANKS]
        )
        return Diagnosis(
            at_fault,
            f"differs at collective number {number:,} of {ranks}: {told}; one was skipped or is another",
        )
    return None


def _expected(answer: RankStatus, ranks: str, number: int) -> tuple[str, int] | None:
    """The kind of collective `number`, by what followed the longest like series of collectives before it: steps are
    like each other.
    """
    before = [call.kind for call in answer.recent if call.ranks == ranks and call.number < number]
    for length in range(min(len(before) - 1, _SERIES), 0, -1):
        for end in range(len(before) - 1, length - 1, -1):
            if before[end - length : end] == before[-length:]:
                return before[end]
    return None


def _calls(heard: Mapping[int, RankStatus]) -> Iterator[tuple[int, CollectiveCall]]:
    return ((rank, call) for rank, answer in heard.items() for call in answer.recent if call.ranks != POINT_TO_POINT)
