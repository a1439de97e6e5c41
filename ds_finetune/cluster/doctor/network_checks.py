"""Checks of the measured network: hosts that did not join, slow hosts and links, and the bandwidth of collectives."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from ds_finetune.cluster.doctor.messages import ChildLost, ChildReply, NetworkMeasured, RequestRefused
from ds_finetune.cluster.doctor.network import JOIN_SECONDS
from ds_finetune.cluster.hosts.check_result import Check, State
from ds_finetune.config.units import MIB

_SLOW_FACTOR, _BROKEN_FACTOR = 3, 10
"""A host or link is slow, or broken, where others are this many times as fast."""
_MIN_HOSTS_TO_COMPARE = 3
_UNREACHED = (
    "look at firewalls between the hosts (all ports are needed), and at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)
_SLOW_HINT = "compare its link speed (ethtool), cable, switch port and driver with the others'"

Links = Mapping[tuple[str, str], float]


def network_checks(hosts: Sequence[str], replies: Sequence[ChildReply]) -> list[Check]:
    """Checks from the replies of all ranks; `hosts` has the host of each rank."""
    at_fault = _hosts_at_fault(hosts, replies)
    if at_fault:
        return [Check("network", host, "fail", found, _UNREACHED) for host, found in at_fault.items()]
    results = [reply.result for reply in replies if isinstance(reply, NetworkMeasured)]
    links = {
        (hosts[rank], hosts[int(to)]): rate for rank, result in enumerate(results) for to, rate in result.links.items()
    }
    checks = list(slow_checks(links))
    if links:
        slowest, fastest = min(links, key=links.__getitem__), max(links, key=links.__getitem__)
        found = (
            f"{_speed(links[slowest])} {slowest[0]} to {slowest[1]}, up to {_speed(links[fastest])} "
            f"{fastest[0]} to {fastest[1]}"
        )
        checks.append(Check("links", "", "ok", found))
    first = results[0]
    size = f"{first.num_bytes / MIB:,.3g} MiB over {len(hosts)} ranks"
    for name, rate in (("all-reduce", first.all_reduce), ("all-gather", first.all_gather)):
        values = {"bytes_per_second": rate, "ranks": len(hosts), "hosts": len(set(hosts))}
        checks.append(Check(name, "", "ok", f"{_speed(rate)} bus bandwidth, {size}", values=values))
    return checks


def slow_checks(links: Links) -> Iterator[Check]:
    """Hosts that are slow in one direction on all their links, then single slow links.

    `links` has bytes a second by (from, to).
    """
    named: set[tuple[int, str]] = set()
    hosts = list(dict.fromkeys(host for pair in links for host in pair))
    for side, verb in enumerate(("sends", "receives")):
        best = {host: max((rate for pair, rate in links.items() if pair[side] == host), default=0.0) for host in hosts}
        for host in hosts if len(hosts) >= _MIN_HOSTS_TO_COMPARE else ():
            others = median(rate for other, rate in best.items() if other != host)
            state = _state(best[host], others)
            if state != "ok":
                named.add((side, host))
                yield Check(
                    "links",
                    host,
                    state,
                    f"{verb} {_speed(best[host])} at most, other hosts {_speed(others)}",
                    _SLOW_HINT,
                )
    usual = median(links.values()) if len(hosts) >= _MIN_HOSTS_TO_COMPARE else max(links.values(), default=0.0)
    for (a, b), rate in links.items():
        state = _state(rate, usual)
        if state != "ok" and (0, a) not in named and (1, b) not in named:
            yield Check("links", a, state, f"{_speed(rate)} to {b}, other links {_speed(usual)}", _SLOW_HINT)


def _hosts_at_fault(hosts: Sequence[str], replies: Sequence[ChildReply]) -> dict[str, str]:
    """Hosts that caused a failure of the measurement, by name, with the reason."""
    at_fault: dict[str, str] = {}
    problems: dict[str, str] = {}
    for host, reply in zip(hosts, replies, strict=True):
        if not isinstance(reply, NetworkMeasured):
            continue
        for rank in reply.result.missing:
            at_fault.setdefault(hosts[rank], f"did not join the ranks at {hosts[0]} within {JOIN_SECONDS} s")
        for rank in reply.result.wrong:
            at_fault.setdefault(hosts[rank], f"sent wrong values, received by {host}")
        if reply.result.problem:
            problems.setdefault(host, reply.result.problem)
    for host, reply in zip(hosts, replies, strict=True):
        if isinstance(reply, RequestRefused):
            at_fault[host] = reply.message
        elif isinstance(reply, ChildLost) and reply.code is None:
            problems.setdefault(host, "did not answer in time")
        elif isinstance(reply, ChildLost):
            last = (reply.stderr.splitlines() or ["no output"])[-1]
            at_fault[host] = f"ended with exit code {reply.code}: {last}"
    # Other hosts' errors are consequences of a missing host; where that host reported an error, it is the cause.
    named = {host: problems.get(host, text) for host, text in at_fault.items()}
    return named or problems


def _state(rate: float, usual: float) -> State:
    return "fail" if rate * _BROKEN_FACTOR < usual else "warn" if rate * _SLOW_FACTOR < usual else "ok"


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
