"""Finds the ranks at fault in a run that hangs, from the status of every rank, and writes the lines of the report."""

from collections import Counter
from collections.abc import Mapping, Sequence

from ds_finetune.cluster.watchdog.messages import RankProcess
from ds_finetune.cluster.watchdog.progress import POINT_TO_POINT, CollectiveCall, RankStatus
from ds_finetune.config.units import spans_text

_MAX_LISTED = 16
Diagnosis = tuple[tuple[int, ...], str]
"""The result of diagnosing a hang: the ranks at fault (empty if no rank differs from the others) and the reason."""


def diagnose(statuses: Mapping[int, RankStatus]) -> Diagnosis:
    """Find the ranks for which the other ranks of a hanging run wait, from the status of each rank.

    The first of these rules that finds a rank decides:

    1. Ranks are at fault that have entered fewer collectives than other ranks of the same group. If some of these ranks
    are in no collective, only they are at fault, because the others may wait for them.

    2. Ranks are at fault that called another collective than most ranks. If no collective has a majority, all ranks
    that differ are at fault.

    3. Ranks are at fault that are in no collective while other ranks are in one.
    """
    behind = {rank: text for rank, status in statuses.items() if (text := _lag(status, statuses))}
    idle = tuple(rank for rank, status in statuses.items() if status.inside is None)
    if behind:
        roots = tuple(rank for rank in behind if rank in idle) or tuple(behind)
        return roots, behind[roots[0]]
    if (mismatch := _mismatch(statuses)) is not None:
        return mismatch
    if idle and len(idle) < len(statuses):
        return idle, "is in no collective while others wait in one"
    return (), "every rank waits at the same place"


def _lag(status: RankStatus, statuses: Mapping[int, RankStatus]) -> str:
    """Text that says how many collectives the rank is behind other ranks of a group; empty if it is not behind."""
    for ranks, count in status.counts.items():
        most = max(other.counts.get(ranks, 0) for other in statuses.values())
        if ranks != POINT_TO_POINT and count < most:
            return f"has entered {count:,} collectives of {ranks}, others {most:,}"
    return ""


def _mismatch(statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
    """Compare calls that have the same number in a group: find ranks whose call has another name or size than most."""
    calls: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    for rank, status in statuses.items():
        for call in (status.last, status.inside):
            if call is not None and call.ranks != POINT_TO_POINT:
                calls.setdefault((call.ranks, call.number), {})[rank] = call
    for (ranks, number), by_rank in calls.items():
        votes = Counter((call.name, call.size) for call in by_rank.values()).most_common(2)
        if len(votes) > 1:
            usual = votes[0][0] if votes[0][1] > votes[1][1] else None
            at_fault = tuple(rank for rank, call in by_rank.items() if (call.name, call.size) != usual)
            texts = [f"rank {rank} {call.name} of {call.size:,}" for rank, call in by_rank.items()][:_MAX_LISTED]
            return at_fault, f"differs at collective number {number:,} of {ranks}: {'; '.join(texts)}"
    return None


def names_of(ranks: Sequence[int], processes: Sequence[RankProcess]) -> str:
    """Names of `ranks`, such as `rank 3 (host b, process 17)` or `ranks 4-7 (host b, c)`."""
    if len(ranks) == 1:
        return str(processes[ranks[0]])
    hosts = list(dict.fromkeys(processes[rank].host for rank in ranks))[:_MAX_LISTED]
    return f"ranks {spans_text(ranks)} (host {', '.join(hosts)})"


def status_lines(
    processes: Sequence[RankProcess], statuses: Mapping[int, RankStatus], at_fault: Sequence[int]
) -> list[str]:
    """Lines with the status of each rank, ranks at fault first; ranks with equal status share a line."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank in sorted(statuses, key=lambda rank: rank not in at_fault):
        ranks_by_text.setdefault(str(statuses[rank]), []).append(rank)
    lines = [f"  {names_of(ranks, processes)}: {text}" for text, ranks in ranks_by_text.items()]
    return lines[: 2 * _MAX_LISTED]
