"""Checks of `ds-finetune doctor` that compare hosts: shared folders and the speed of the network."""

import json
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from ds_finetune.cluster.host_checks import Check, State
from ds_finetune.config.units import MIB

Ended = tuple[int | None, str]
"""Exit code of a program on a host (None: killed after its time limit), and the end of what the program printed."""
_SLOW_FACTOR, _BROKEN_FACTOR = 3, 10
"""`doctor` compares the speed of all-reduces inside a host with the median speed of the other hosts. It warns if the
median is more than _SLOW_FACTOR times as fast. The host fails if it is more than _BROKEN_FACTOR times as fast.
"""
_UNREACHED = "check the firewalls between hosts (all ports must be open), GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
_SLOW_HINT = "compare topology (nvidia-smi topo -m), driver and load of this host with those of the others"


def folder_checks(folder: str, by_host: Mapping[str, tuple[bool, bool]], node_local: bool | None) -> Iterator[Check]:
    """Check a folder on all hosts: whether each host may write there, and whether the hosts share the folder.

    `by_host` maps each host to two facts: whether it may write to the folder, and whether it sees the marker file that
    the first host has created there. `node_local` is checkpoint.node_local, or None for a folder without checkpoints.
    """
    for host in (host for host, (is_writable, _) in by_host.items() if not is_writable):
        hint = "change the permissions, or name another folder"
        yield Check("folders", host, "fail", f"no permission to write to {folder}", hint)
    first, *others = by_host
    separate = [host for host in others if not by_host[host][1]]
    if not others or not by_host[first][1]:
        return
    if not separate:
        text, hint = f"{folder} is shared by all hosts", "set checkpoint.node_local: false" if node_local else ""
        text += ", but checkpoint.node_local is true" if node_local else ""
        yield Check("folders", "", "warn" if hint else "ok", text, hint)
    elif separate == others and node_local is not False:
        yield Check("folders", "", "ok", f"each host has its own {folder}")
    else:
        hint = f"mount the folder of {first} there; if no hosts can share it, set checkpoint.node_local: true"
        state: State = "ok" if node_local is None else "fail"
        yield from (Check("folders", host, state, f"{folder} is not shared with {first}", hint) for host in separate)


def network_checks(ended: Mapping[str, Ended], endpoint: str) -> Iterator[Check]:
    """Check the network between hosts. `ended` has what measure.py printed on each host: speeds, or a problem."""
    outcomes = {host: _outcome(code, output, endpoint) for host, (code, output) in ended.items()}
    problems = {host: outcome for host, outcome in outcomes.items() if "problem" in outcome}
    # The problem of one host makes the measurement fail on other hosts too.
    causes = {host: problem for host, problem in problems.items() if problem["is_cause"]}
    for host, problem in (causes or problems).items():
        yield Check("network", host, "fail", problem["problem"], _UNREACHED)
    if not problems:
        yield from rate_checks(outcomes)


def _outcome(code: int | None, output: str, endpoint: str) -> dict[str, Any]:
    if printed := [json.loads(line) for line in output.splitlines() if line.startswith("{")]:
        return dict(next((line for line in printed if "problem" in line), printed[-1]))
    if "RendezvousConnectionError" in output:
        return {"problem": f"cannot reach the first host at {endpoint}", "is_cause": True}
    if "RendezvousTimeoutError" in output or code is None:
        return {"problem": f"waited in vain for the other hosts at {endpoint}", "is_cause": False}
    last = next((line for line in reversed(output.splitlines()) if line.strip(" =-")), "no output")
    return {"problem": f"ended with exit code {code}: {last}", "is_cause": True}


def rate_checks(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """Check the measured speed of all-reduces. The speed inside each host is compared with that inside the other hosts.
    The speed over all ranks is only reported.
    """
    inside = {host: result["inside"] for host, result in results.items() if result["inside"]}
    for host, rate in inside.items():
        usual = median([other for name, other in inside.items() if name != host] or [rate])
        state: State = "fail" if rate * _BROKEN_FACTOR < usual else "warn" if rate * _SLOW_FACTOR < usual else "ok"
        text = f"{_speed(rate)} inside the host" + ("" if state == "ok" else f", {_speed(usual)} inside other hosts")
        yield Check("links", host, state, text, "" if state == "ok" else _SLOW_HINT)
    first = next(iter(results.values()))
    if first["ranks"] > 1:
        values = {"bytes_per_second": first["all"], "ranks": first["ranks"], "hosts": len(results)}
        text = f"{_speed(first['all'])} bus bandwidth, {first['bytes'] / MIB:,.3g} MiB over {first['ranks']} ranks"
        yield Check("all-reduce", "", "ok", text, values=values)


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
