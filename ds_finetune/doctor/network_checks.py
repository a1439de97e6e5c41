"""What the measured network says: which host did not come, which host or link is slow, and how fast all are
together.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ds_finetune.doctor.network import JOIN_SECONDS
from ds_finetune.hosts.check import Check, State
from ds_finetune.units import MIB

_SLOW, _BROKEN = 3, 10
"""A host or link is slow, or broken, where others are faster by these."""
_FEW = 3
_UNREACHED = (
    "look at firewalls between the hosts (all ports are needed), and at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)
_SLOW_HINT = "compare its link speed (ethtool), cable, switch port and driver with the others'"

Answer = Mapping[str, Any]
Links = Mapping[tuple[str, str], float]


def network_checks(seats: Sequence[str], answers: Sequence[Answer]) -> list[Check]:
    """Checks from the answers of all ranks; `seats` has the host of each. An answer is of `probe.apart`."""
    odd = dict(_odd(seats, answers))
    if odd:
        return [Check("network", host, "fail", found, _UNREACHED) for host, found in odd.items()]
    heard = [answer["value"] for answer in answers]
    links = {
        (seats[rank], seats[int(to)]): rate for rank, value in enumerate(heard) for to, rate in value["links"].items()
    }
    checks = list(slow_checks(links))
    if links:
        slowest, fastest = min(links, key=links.__getitem__), max(links, key=links.__getitem__)
        found = (
            f"{_speed(links[slowest])} {slowest[0]} to {slowest[1]}, up to {_speed(links[fastest])} "
            f"{fastest[0]} to {fastest[1]}"
        )
        checks.append(Check("links", "", "ok", found))
    first = heard[0]
    size = f"{first['num_bytes'] / MIB:,.3g} MiB over {len(seats)} ranks"
    for name in ("all_reduce", "all_gather"):
        checks.append(Check(name.replace("_", "-"), "", "ok", f"{_speed(first[name])} bus bandwidth, {size}"))
    return checks


def slow_checks(links: Links) -> Iterator[Check]:
    """Hosts all of whose links are slow one way beside other hosts', then single links; rates in bytes a second by
    (from, to).
    """
    named: set[tuple[int, str]] = set()
    hosts = list(dict.fromkeys(host for pair in links for host in pair))
    for side, verb in enumerate(("sends", "receives")):
        best = {host: max((rate for pair, rate in links.items() if pair[side] == host), default=0.0) for host in hosts}
        for host in hosts if len(hosts) >= _FEW else ():
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
    usual = median(links.values()) if len(hosts) >= _FEW else max(links.values(), default=0.0)
    for (a, b), rate in links.items():
        state = _state(rate, usual)
        if state != "ok" and (0, a) not in named and (1, b) not in named:
            yield Check("links", a, state, f"{_speed(rate)} to {b}, other links {_speed(usual)}", _SLOW_HINT)


def _odd(seats: Sequence[str], answers: Sequence[Answer]) -> Iterator[tuple[str, str]]:
    """Hosts that the failure of a measurement is due to, as far as it can be told: those that others miss or that ended
    by themselves first.
    """
    found: dict[str, str] = {}
    problems: dict[str, str] = {}
    for host, answer in zip(seats, answers, strict=True):
        value = answer.get("value", {})
        for rank in value.get("missing", ()):
            found.setdefault(seats[rank], f"did not come to the meeting place at {seats[0]} within {JOIN_SECONDS} s")
        for rank in value.get("wrong", ()):
            found.setdefault(seats[rank], f"sent other values than it should, seen by {host}")
        if value.get("problem"):
            problems.setdefault(host, value["problem"])
    for host, answer in zip(seats, answers, strict=True):
        if answer.get("lost", 0) is None:
            problems.setdefault(host, "did not answer in time")
        elif "lost" in answer:
            last = (answer["said"].splitlines() or ["it said nothing"])[-1]
            found[host] = f"ended with exit code {answer['lost']}: {last}"
        elif "refused" in answer:
            found[host] = answer["refused"]
    # What the others met with follows from a host that is missing; that host's own words are the better ones.
    named = {host: problems.get(host, text) for host, text in found.items()}
    yield from (named or problems).items()


def _state(rate: float, usual: float) -> State:
    return "fail" if rate * _BROKEN < usual else "warn" if rate * _SLOW < usual else "ok"


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
