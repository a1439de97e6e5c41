"""Finds the ranks at fault in a run that hangs, from the status of every rank, and writes the lines of the report."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_finetune.cluster.watchdog.collectives import POINT_TO_POINT
from ds_finetune.cluster.watchdog.heartbeats import RankProcess
from ds_finetune.cluster.watchdog.progress import CollectiveCall, RankStatus

_MAX_NAMED_RANKS, _MAX_LISTED_RANKS = 8, 16
_LONGEST_PATTERN = 16
SILENT = "does not answer: it is stopped or dead, or native code holds Python's lock"


@dataclass(frozen=True)
class Diagnosis:
    """The ranks at fault and why; empty `at_fault` where no rank differs from the others."""

    at_fault: tuple[int, ...]
    why: str


def diagnose(statuses: Mapping[int, RankStatus | None], *, network: str = "", why_silent: str = SILENT) -> Diagnosis:
    """Which ranks keep the others of a hanging run waiting, from the last heartbeat of each.

    The status of a rank whose heartbeats have stopped is None, and `why_silent` says what that means. Where heartbeats
    came late no rank is named, but the `network`, because they tell of different times. Otherwise the first of these
    rules that finds a rank decides:
    1. ranks without heartbeats;
    2. ranks that have entered fewer collectives than other ranks of the same group; of these, only the ones in no
       collective if there are any, because the rest may wait for them;
    3. ranks in another collective than most ranks;
    4. ranks in no collective while others are in one.
    """
    silent = tuple(rank for rank, status in statuses.items() if status is None)
    if network or silent:
        return Diagnosis((), network) if network else Diagnosis(silent, why_silent)
    heard = {rank: status for rank, status in statuses.items() if status is not None}
    behind = {rank: text for rank, status in heard.items() if (text := _lag(status, heard))}
    idle = tuple(rank for rank in heard if heard[rank].inside is None)
    if behind:
        roots = tuple(rank for rank in behind if rank in idle) or tuple(behind)
        return Diagnosis(roots, behind[roots[0]])
    mismatch = _first_mismatch(heard)
    if mismatch is not None:
        return mismatch
    if idle and len(idle) < len(heard):
        return Diagnosis(idle, "is in no collective while others wait in one")
    return Diagnosis((), "every rank waits at the same place")


def _lag(status: RankStatus, heard: Mapping[int, RankStatus]) -> str:
    """How many collectives a rank is behind others of a group, as text; empty where it is not behind."""
    for ranks, count in status.counts.items():
        most = max(other.counts.get(ranks, 0) for other in heard.values())
        if ranks != POINT_TO_POINT and count < most:
            return f"has entered {count:,} collectives of {ranks}, others {most:,}"
    return ""


def _first_mismatch(heard: Mapping[int, RankStatus]) -> Diagnosis | None:
    """Ranks whose collective differs from that of most ranks, at the first collective where ranks differ."""
    calls: dict[tuple[str, int], dict[int, CollectiveCall]] = {}
    recent = ((rank, call) for rank, status in heard.items() for call in status.recent)
    for rank, call in recent:
        if call.ranks != POINT_TO_POINT:
            calls.setdefault((call.ranks, call.number), {})[rank] = call
    for (ranks, number), by_rank in sorted(calls.items(), key=lambda item: item[0][1]):
        votes = Counter(call.signature for call in by_rank.values())
        if len(votes) < 2:
            continue
        (common, num_votes), (_, next_votes) = votes.most_common(2)
        expected = common if num_votes > next_votes else _expected(heard[next(iter(by_rank))], ranks, number)
        # If the expected collective is unknown, all ranks of the group are at fault.
        at_fault = tuple(rank for rank, call in by_rank.items() if expected not in votes or call.signature != expected)
        calls_text = "; ".join(
            f"rank {rank} {by_rank[rank].name} of {by_rank[rank].size:,}" for rank in list(by_rank)[:_MAX_NAMED_RANKS]
        )
        return Diagnosis(
            at_fault, f"differs at collective number {number:,} of {ranks}: {calls_text}; one was skipped or is another"
        )
    return None


def _expected(status: RankStatus, ranks: str, number: int) -> tuple[str, int] | None:
    """The signature of collective `number`, predicted from earlier ones: every step repeats the same collectives.

    Finds the longest series of collectives just before `number` that also occurred earlier, and returns the signature
    that followed it then.
    """
    before = [call.signature for call in status.recent if call.ranks == ranks and call.number < number]
    for length in range(min(len(before) - 1, _LONGEST_PATTERN), 0, -1):
        for end in range(len(before) - 1, length - 1, -1):
            if before[end - length : end] == before[-length:]:
                return before[end]
    return None


def hosts_text(processes: Sequence[RankProcess]) -> str:
    """`rank 3 (host b, process 17)`, or `4 ranks of hosts b, c`."""
    if len(processes) == 1:
        return str(processes[0])
    hosts = list(dict.fromkeys(process.host for process in processes))
    return f"{len(processes)} ranks of host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:_MAX_LISTED_RANKS])}"


def status_lines(
    processes: Sequence[RankProcess], statuses: Mapping[int, RankStatus | None], diagnosis: Diagnosis
) -> list[str]:
    """The status of each rank as lines, ranks at fault first; ranks with the same status share a line."""
    names = {rank: str(processes[rank]) for rank in statuses}
    texts = {rank: str(status or "no heartbeat") for rank, status in statuses.items()}
    lines = [f"  {names[rank]}: {texts[rank]}" for rank in diagnosis.at_fault[:_MAX_LISTED_RANKS]]
    others: dict[str, list[int]] = {}
    for rank in statuses.keys() - set(diagnosis.at_fault):
        others.setdefault(texts[rank], []).append(rank)
    for text, ranks in list(others.items())[:_MAX_LISTED_RANKS]:
        more = f" and {len(ranks) - 1:,} more" if len(ranks) > 1 else ""
        lines.append(f"  {names[ranks[0]]}{more}: {text}")
    return lines
