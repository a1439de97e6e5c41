"""Why a run ends: the processes of the ranks, the messages that they exchange, and the diagnosis of a hang."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import or_

import torch.distributed as dist
from pydantic import TypeAdapter

from ds_finetune.cluster.watchdog.progress import FAILING, RankStatus
from ds_finetune.config.units import spans_text
from ds_finetune.engine.groups.collective_log import POINT_TO_POINT, CollectiveCall
from ds_finetune.engine.groups.default_group import JoinedRanks
from ds_finetune.errors import RUN_ERROR_EXIT_CODE
from ds_finetune.system.world import World

_MAX_LISTED = 16
_ENDING_KEY, _NO_ENDING, _HEARTBEAT_KEY = "ending", "none", "heartbeat/{}"
"""Keys of torch's store: for the reason why the run ends (_NO_ENDING until then), and for the last heartbeat of a rank.
"""


@dataclass(frozen=True)
class RankProcess:
    """The process of a rank. `began` is its start time from the kernel, empty where there is no /proc. `machine`
    identifies the host together with the pid and network namespaces of the process.
    """

    rank: int
    host: str
    pid: int
    began: str
    machine: str
    error_file: str = ""
    """Path at which torch's elastic agent looks for this rank's error; empty without an agent."""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


@dataclass(frozen=True)
class RunEnding:
    """Why a run ends: the ranks at fault, the reason in one line, details for the report, and the exit code. If the
    ranks at fault send no heartbeats (`is_silent`), other ranks of their machine kill them.
    """

    at_fault: tuple[int, ...]
    line: str
    text: str = ""
    code: int = RUN_ERROR_EXIT_CODE
    is_hang: bool = False
    is_silent: bool = False

    @property
    def report(self) -> str:
        """Text of the watchdog's report."""
        return f"{self.line}\n{self.text}".rstrip()


_PROCESS, _ENDING, _STATUS = TypeAdapter(RankProcess), TypeAdapter(RunEnding), TypeAdapter(RankStatus)


def join(store: dist.Store, world: World, own: RankProcess) -> list[RankProcess]:
    """Exchange facts of the processes of all ranks through `store`, and return them in the order of ranks. Afterwards
    the store has a first heartbeat of each rank.
    """
    if own.rank == 0:
        store.set(_ENDING_KEY, _NO_ENDING)
    store.set(_HEARTBEAT_KEY.format(own.rank), _STATUS.dump_json(RankStatus()).decode())
    text, limit = _PROCESS.dump_json(own).decode(), timedelta(minutes=10)
    return [_PROCESS.validate_json(each) for each in JoinedRanks(world, store).exchange("process", text, timeout=limit)]


def beat(
    store: dist.Store, rank: int, status: RankStatus, proposal: RunEnding | None, watched: Iterable[int]
) -> tuple[RunEnding | None, list[RankStatus]]:
    """Write the heartbeat of `rank` and its `proposal` to the store. Only the first proposal of any rank is accepted.
    Returns the accepted one (None while the run continues), and the last heartbeats of the ranks `watched`.
    """
    store.set(_HEARTBEAT_KEY.format(rank), _STATUS.dump_json(status).decode())
    if proposal is not None:
        store.compare_set(_ENDING_KEY, _NO_ENDING, _ENDING.dump_json(proposal).decode())
    ending, *texts = store.multi_get([_ENDING_KEY, *map(_HEARTBEAT_KEY.format, watched)])
    statuses = [_STATUS.validate_json(text) for text in texts]
    return (None if ending == _NO_ENDING.encode() else _ENDING.validate_json(ending)), statuses


def diagnose(statuses: Mapping[int, RankStatus]) -> tuple[tuple[int, ...], str]:
    """Find the ranks for which the other ranks of a hanging run wait, from the status of each rank. Returns these ranks
    (none if no rank differs from the others) and the reason. The first of these rules that finds a rank decides:

    1. ranks that have entered fewer collectives than other ranks of the same group. If some of these ranks are in no
       collective, only those are at fault, because the rest may wait for them. No rank is at fault if each of them is
       in a collective that its whole group has entered: a lossy network keeps it there.
    2. ranks that called another collective than most ranks; all ranks of the group if no collective has a majority.
    3. ranks that are in no collective while other ranks are in one.
    """
    most = reduce(or_, (Counter(status.counts) for status in statuses.values()), Counter[str]())
    behind = {
        rank: f"has entered {count:,} collectives of {ranks}, others {most[ranks]:,}"
        for rank, status in statuses.items()
        for ranks, count in status.counts.items()
        if ranks != POINT_TO_POINT and count < most[ranks]
    }
    idle = tuple(rank for rank, status in statuses.items() if status.inside is None)
    if behind:
        roots = tuple(rank for rank in behind if rank in idle) or tuple(behind)
        for rank in roots:
            call = None if statuses[rank].state == FAILING else statuses[rank].inside
            counts = [] if call is None else [status.counts.get(call.ranks, 0) for status in statuses.values()]
            if call is None or call.ranks == POINT_TO_POINT or any(0 < count < call.number for count in counts):
                return roots, behind[roots[0]]
        return (), f"rank {roots[0]} waits in {statuses[roots[0]].inside} for data of ranks that have left it"
    if (mismatch := _mismatch(statuses)) is not None:
        return mismatch
    if idle and len(idle) < len(statuses):
        return idle, "is in no collective while others wait in one"
    return (), "every rank waits at the same place"


def _mismatch(statuses: Mapping[int, RankStatus]) -> tuple[tuple[int, ...], str] | None:
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
    return [f"  {names_of(ranks, processes)}: {text}" for text, ranks in ranks_by_text.items()][: 2 * _MAX_LISTED]
