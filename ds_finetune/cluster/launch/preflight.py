"""Checks hosts before ranks start on them, and chooses the address of rank 0 for the other ranks."""

import ipaddress
from collections.abc import Mapping, Sequence
from itertools import chain

from ds_finetune.cluster.hosts.check_result import Check, label
from ds_finetune.cluster.hosts.host_checks import host_checks
from ds_finetune.cluster.launch.remote import address_of, is_here
from ds_finetune.config.hostfile import Host
from ds_finetune.system.info import HostInfo

Answer = HostInfo | Check
"""The facts of a host, or the failed check of a host that cannot be reached."""


def preflight_checks(answers: Mapping[Host, Answer], here: HostInfo, env: Mapping[str, str]) -> dict[Host, list[Check]]:
    """The warnings and failures of each host for a run with the variables `env`; `here` are this machine's facts.

    Warnings about all hosts together are listed under the first.
    """
    hosts = {label(host): host for host in answers}
    infos = {label(host): answer for host, answer in answers.items() if isinstance(answer, HostInfo)}
    addresses = {name: address_of(host) for name, host in hosts.items()}
    checks = [answer for answer in answers.values() if isinstance(answer, Check)]
    checks += host_checks(hosts, infos, here=here, environ=env, addresses=addresses)
    found: dict[Host, list[Check]] = {host: [] for host in answers}
    for check in (check for check in checks if check.state != "ok"):
        found[hosts.get(check.host, next(iter(answers)))].append(check)
    return found


def describe(host: Host, check: Check) -> str:
    """The text of a check: the host and its line in the hostfile, what was found, and the hint."""
    return f"{host.target} (line {host.line}): {check.found}\n    hint: {check.hint}"


def meeting_address(hosts: Sequence[Host], infos: Mapping[Host, HostInfo]) -> str:
    """The address of the first host at which the other hosts reach it; empty where it has no such address."""
    first, info = hosts[0], infos[hosts[0]]
    if len(hosts) == 1:
        return "127.0.0.1"
    # Where the first host is this machine, the others know the address that their ssh connection came from.
    clients = [infos[host].ssh_client for host in hosts[1:] if is_here(first)]
    candidates = [address_of(first), info.ssh_server_address, *clients, *chain.from_iterable(info.interfaces.values())]
    return next((address for address in candidates if _is_for_others(address)), "")


def _is_for_others(address: str) -> bool:
    if not address:
        return False
    parsed = ipaddress.ip_address(address.split("%")[0])
    return not parsed.is_loopback and not parsed.is_link_local
