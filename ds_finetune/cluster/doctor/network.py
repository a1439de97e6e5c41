"""Measurement of the network between hosts: each link by itself, then collectives of all ranks, bounded in time."""

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ds_finetune.cluster.doctor.messages import EXCHANGE_SECONDS, JOIN_SECONDS, NetworkRank, NetworkResult
from ds_finetune.engine.devices import device_of_rank
from ds_finetune.system.info import interface_towards

_ALL_PAIRS = 8
"""Up to this number of hosts every pair is measured; with more, neighbours in a ring."""
_SIZES = (1 << 16, 1 << 19, 1 << 22, 1 << 25, 1 << 28)
"""Bytes of an exchange: the size grows until one takes `_LONG_ENOUGH_SECONDS`; the last size is for GPUs only."""
_LONG_ENOUGH_SECONDS = 0.2
_NUM_REPEATS = 3


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Schedule the measured pairs of `count` hosts in rounds, each host in at most one pair of a round.

    For few hosts these are all pairs, for many hosts the neighbours in a ring.
    """
    if count > _ALL_PAIRS:
        ring = [(place, (place + 1) % count) for place in range(count)]
        last = [ring[-1]] if count % 2 else []
        return [found for found in (ring[0 : count - len(last) : 2], ring[1 : count - len(last) : 2], last) if found]
    order = list(range(count + count % 2))
    found = []
    for _ in range(len(order) - 1):
        pairs = zip(order[: len(order) // 2], reversed(order[len(order) // 2 :]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < count])
        order = [order[0], order[-1], *order[1:-1]]
    return found


def measure(place: NetworkRank) -> NetworkResult:
    """Measure as one rank; runs in a separate process, since only killing it ends a collective that hangs."""
    interface = interface_towards(place.address)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ():
        os.environ.setdefault(name, interface)
    return _join_and_measure(place)


def _join_and_measure(place: NetworkRank) -> NetworkResult:
    join_time, meeting = timedelta(seconds=JOIN_SECONDS), (place.address, place.port)
    try:
        store = dist.TCPStore(*meeting, place.world_size, place.rank == 0, timeout=join_time, wait_for_workers=False)
    except RuntimeError as silent:
        where = f"{place.address} port {place.port}"
        return NetworkResult({}, problem=f"cannot reach the first host at {where}: {_first_line(silent)}")
    join_keys = [f"here/{rank}" for rank in range(place.world_size)]
    store.set(join_keys[place.rank], "1")
    try:
        store.wait(join_keys, join_time)
    except RuntimeError:
        missing = tuple(rank for rank, key in enumerate(join_keys) if not store.check([key]))
        return NetworkResult({}, missing=missing)
    device = torch.device(device_of_rank(place.device, place.local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=EXCHANGE_SECONDS),
        )
        result = _measure_links_and_collectives(place, device)
        # Rank 0 hosts the store, so it must not exit before the others are done.
        dist.barrier()
    except RuntimeError as broken:
        return NetworkResult({}, problem=_first_line(broken))
    return result


def _measure_links_and_collectives(place: NetworkRank, device: torch.device) -> NetworkResult:
    links: dict[str, float] = {}
    for pair in (pair for together in rounds(len(place.leaders)) for pair in together):
        a, b = (place.leaders[index] for index in pair)
        for sender, receiver in ((a, b), (b, a)):
            if place.rank == sender:
                links[str(receiver)] = _send(receiver, device)
            elif place.rank == receiver:
                _receive(sender, device)
    dist.barrier()
    ranks = place.world_size
    values = [torch.zeros(1, device=device) for _ in range(ranks)]
    dist.all_gather(values, torch.full((1,), float(place.rank), device=device))
    wrong = tuple(rank for rank, value in enumerate(values) if value.item() != rank)

    def all_reduce(numel: int) -> None:
        dist.all_reduce(torch.ones(numel, device=device))

    def all_gather(numel: int) -> None:
        part = torch.ones(numel // ranks, device=device)
        dist.all_gather([torch.empty_like(part) for _ in range(ranks)], part)

    # Bus bandwidth as NCCL's tests count it (nccl-tests, doc/PERFORMANCE.md): what each link carries, whatever the
    # number of ranks.
    reduced, num_bytes = _rate(all_reduce, device)
    gathered, _ = _rate(all_gather, device)
    return NetworkResult(
        links, reduced * 2 * (ranks - 1) / ranks, gathered * (ranks - 1) / ranks, num_bytes, wrong=wrong
    )


def _send(receiver: int, device: torch.device) -> float:
    """Bytes a second to `receiver`, measured until its acknowledgement."""
    ack = torch.zeros(1, device=device)

    def exchange(size: int) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        dist.send(torch.tensor([size], device=device), receiver)
        began = time.perf_counter()
        dist.send(payload, receiver)
        dist.recv(ack, receiver)
        ack.item()
        return time.perf_counter() - began

    rate, _ = _best_rate(exchange, device)
    dist.send(torch.tensor([0], device=device), receiver)
    return rate


def _receive(sender: int, device: torch.device) -> None:
    size, ack = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    dist.recv(size, sender)
    while size.item():
        dist.recv(torch.zeros(int(size.item()), dtype=torch.uint8, device=device), sender)
        dist.send(ack, sender)
        dist.recv(size, sender)


def _rate(work: Callable[[int], None], device: torch.device) -> tuple[float, int]:
    """Bytes a second of a collective over fp32 numbers, timed by the slowest rank, and its size in bytes."""

    def exchange(size: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        work(size // 4)
        if device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - began], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.item())

    return _best_rate(exchange, device)


def _best_rate(exchange: Callable[[int], float], device: torch.device) -> tuple[float, int]:
    """The rate of `exchange`, a function from bytes to seconds, in bytes a second, and the size it was measured with.

    That is the first size whose exchange takes long enough to be measured. One exchange before opens the connection,
    for which NCCL may take seconds.
    """
    exchange(_SIZES[0])
    sizes = iter(_SIZES if device.type == "cuda" else _SIZES[:-1])
    size, seconds = next(sizes), exchange(_SIZES[0])
    for larger in sizes:
        if seconds > _LONG_ENOUGH_SECONDS:
            break
        size, seconds = larger, exchange(larger)
    for _ in range(_NUM_REPEATS if seconds < 1 else 0):
        seconds = min(seconds, exchange(size))
    return size / seconds, size


def _first_line(error: BaseException) -> str:
    """The first line of an error, without the source location that gloo's messages begin with."""
    return re.sub(r"^\[\S+\] *", "", str(error).strip().splitlines()[0])
