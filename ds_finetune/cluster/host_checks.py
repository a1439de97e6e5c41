"""Checks of hosts that `launch` makes before it starts ranks, and that `doctor` reports.

The functions here judge facts that each host has sent (HostInfo). They do not contact hosts.
"""

import ipaddress
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from typing import Literal

from ds_finetune.cluster.launch.remote import Remote, address_of, is_here
from ds_finetune.config.hostfile import Host
from ds_finetune.system.info import PACKAGES, HostInfo
from ds_finetune.system.versions import EXTRAS, UNTESTED, outside_ranges, pip_install
from ds_finetune.system.world import World

State = Literal["ok", "warn", "fail"]
_CLOCK_WARN_SECONDS, _CLOCK_FAIL_SECONDS = 1, 7
"""Errors of a host's clock beyond which its check warns or fails. torch's elastic agent considers a host lost if the
host's heartbeat is 15 s old by the agent's own clock.
"""
_SSH_FAILED = 255
_SAME_ENVIRONMENT = "install the same environment at the same path on every host"


@dataclass(frozen=True)
class Check:
    """The result of one check: its name, the host (empty: all hosts), its state, what was observed, and what to do."""

    name: str
    host: str
    state: State
    found: str
    hint: str = ""
    values: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Measured numbers by name, for programs that read the output of `doctor --json`. The names include the units."""


def label(host: Host) -> str:
    """The name of a host in reports: `HOST` or `HOST:PORT`, as in its line of the hostfile."""
    return f"{host.name}:{host.port}" if host.port else host.name


def host_checks(
    hosts: Mapping[str, Host], infos: Mapping[str, HostInfo], *, here: HostInfo, environ: Mapping[str, str]
) -> list[Check]:
    """Make the checks of `launch` and `doctor`. `infos` has the facts of the hosts that answered, `here` those of this
    machine, and `environ` the environment variables that ranks get.
    """
    return [
        *range_checks(infos, environ),
        *version_checks(here, infos),
        *identity_checks(hosts, infos, addresses={name: address_of(host) for name, host in hosts.items()}),
        *device_checks(hosts, infos, device=rank_device(infos, environ)),
    ]


def world_of(hosts: Sequence[Host], launcher: str) -> World:
    """The `World` of a run with a rank for each slot of `hosts`, as rank 0 sees it. Error messages name `launcher`."""
    slots = [host.slots for host in hosts]
    return World(0, sum(slots), 0, slots[0], launcher)


def rank_device(infos: Mapping[str, HostInfo], environ: Mapping[str, str]) -> str:
    """The device type of ranks: `cuda` if a host has GPUs and DS_ACCELERATOR is cuda or unset, else `cpu`. The same
    rule is in engine/groups/default_group.py.
    """
    has_gpus = any(info.gpus for info in infos.values())
    return "cuda" if has_gpus and environ.get("DS_ACCELERATOR", "cuda") == "cuda" else "cpu"


def range_checks(infos: Mapping[str, HostInfo], environ: Mapping[str, str]) -> Iterator[Check]:
    """Check that the packages of each host are in their tested version ranges. An optional package outside its range is
    only a warning.
    """
    is_refused = environ.get(UNTESTED) != "1"
    for host, info in infos.items():
        if not info.packages:
            text = "tested version ranges are unknown: the host has neither metadata of ds_finetune nor pyproject.toml"
            yield Check("versions", host, "warn", text, _SAME_ENVIRONMENT)
            continue
        for extra in ("", *EXTRAS):
            if wrong := outside_ranges(info.packages, extra):
                state: State = "fail" if is_refused and not extra else "warn"
                yield Check("versions", host, state, ", ".join(wrong), pip_install(*wrong.values()))


def version_checks(here: HostInfo, infos: Mapping[str, HostInfo]) -> Iterator[Check]:
    """Check that the versions of Python, packages, CUDA and this program on each host equal those on this machine
    (`here`), and that all hosts have the same NVIDIA driver.
    """
    for host, info in infos.items():
        pairs = {name: (mine, info.versions.get(name, "")) for name, mine in here.versions.items() if name != "driver"}
        other = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
        hard = [
            name for name, pair in other.items() if name != "python" or len({text.split(".")[1] for text in pair}) > 1
        ]
        if not other:
            same = [
                f"{name} {info.versions[name]}"
                for name in ("python", *PACKAGES, "CUDA of torch")
                if info.versions.get(name)
            ]
            yield Check("versions", host, "ok", ", ".join(same))
            continue
        texts = [f"{name} {theirs or 'missing'} (here {mine or 'missing'})" for name, (mine, theirs) in other.items()]
        hint = "install the same versions on every host"
        yield Check("versions", host, "fail" if hard else "warn", ", ".join(texts), hint)
    drivers = {info.versions.get("driver", "") for info in infos.values()}
    if len(drivers) > 1:
        names = ", ".join(sorted(driver or "none" for driver in drivers))
        yield Check("driver", "", "warn", f"different NVIDIA drivers: {names}", "install one version on all hosts")


def identity_checks(
    hosts: Mapping[str, Host], infos: Mapping[str, HostInfo], *, addresses: Mapping[str, str]
) -> Iterator[Check]:
    """Check that no two lines of the hostfile name the same address and port, or the same machine. Two containers on
    one machine may be two hosts: they share its address, but their SSH servers have different ports.
    """
    for a, b in combinations(hosts, 2):
        hint = "write each host once, with all its slots in one line"
        if addresses[a] and (addresses[a], hosts[a].port) == (addresses[b], hosts[b].port):
            yield Check("address", b, "fail", f"it has the same address as {a}: {addresses[a]}", hint)
        elif {a, b} <= infos.keys() and infos[a].network_identity == infos[b].network_identity != "":
            yield Check("address", b, "fail", f"it is the same machine as {a}: {infos[a].hostname}", hint)


def device_checks(hosts: Mapping[str, Host], infos: Mapping[str, HostInfo], *, device: str) -> Iterator[Check]:
    """Check that each host has a GPU for each of its slots, or a CPU core for each slot if ranks run on CPUs."""
    for name, info in infos.items():
        host = hosts[name]
        count = len(info.gpus) if device == "cuda" else info.cores
        models = ", ".join(sorted(set(info.gpus))) or "GPUs"
        text = f"slots={host.slots}, {count} {models if device == 'cuda' else 'CPU cores'}"
        if max(host.devices, default=host.slots - 1) < count:
            yield Check("devices", name, "ok", text)
        elif device == "cpu":
            yield Check("devices", name, "warn", text, "ranks will share cores")
        else:
            chosen = f", devices {','.join(map(str, host.devices))} chosen" if host.devices else ""
            missing = f"write slots={count}, or find out why GPUs are missing"
            hint = missing if count else "leave the host out with --exclude, or install the NVIDIA driver"
            yield Check("devices", name, "fail", text + chosen, hint)


def clock_check(host: str, ahead: float, error: float) -> Check:
    """Check the clock of a host. It is `ahead` seconds ahead of this machine's clock, give or take `error` seconds."""
    wrong = abs(ahead) - error
    if wrong <= _CLOCK_WARN_SECONDS:
        return Check("clock", host, "ok", f"the clock is at most {_CLOCK_WARN_SECONDS} s off")
    hint = "start a time service (chrony, systemd-timesyncd) on every host"
    state: State = "fail" if wrong > _CLOCK_FAIL_SECONDS else "warn"
    return Check("clock", host, state, f"the clock is {ahead:+.2f} s off, give or take {error * 1000:.0f} ms", hint)


def port_check(first: str, info: HostInfo, port: int) -> Check:
    """Check that `port` of the first host is free, because the other hosts will connect to it."""
    if info.port_holder is None:
        return Check("port", first, "ok", f"port {port} is free")
    text = f"port {port} is taken: {info.port_holder}"
    return Check("port", first, "fail", text, "end that process, or choose another port with --port")


def unreachable_check(host: Host, code: int | None, stderr: str, remote: Remote) -> Check:
    """The failed check of a host on which Python could not be started. `code` is the exit code of the attempt, or None
    if the host did not answer in time.
    """
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "nothing")
    if code is None:
        hint = "check the load and the disks of the host; launch.greeting_seconds gives a slow host more time"
        return Check("ssh", label(host), "fail", f"no answer in time; last output: {last}", hint)
    if code == _SSH_FAILED:
        command = shlex.join([*remote.ssh(host), "true"])
        hint = f"make `{command}` work without a prompt, or leave the host out with --exclude"
        return Check("ssh", label(host), "fail", f"ssh: {last.removeprefix('ssh: ')}", hint)
    hint = f"{_SAME_ENVIRONMENT}, and start in a folder that every host has"
    hint += f"; try `{remote.python} -m ds_finetune --help` on the host"
    return Check("python", label(host), "fail", f"Python ended with exit code {code}: {last}", hint)


def failed_checks(hosts: Mapping[str, Host], checks: Iterable[Check]) -> list[tuple[Host, Check]]:
    """The checks that did not pass, in the order of their hosts. A check that concerns all hosts is listed with the
    first host.
    """
    order = list(hosts.values())
    faults = [(hosts.get(check.host, order[0]), check) for check in checks if check.state != "ok"]
    return sorted(faults, key=lambda fault: order.index(fault[0]))


def describe(host: Host, check: Check) -> str:
    """Format a check as text: the host with its line number in the hostfile, what was observed, and the hint."""
    return f"{host.target} (line {host.line}): {check.found}\n    hint: {check.hint}"


def meeting_address(hosts: Sequence[Host], infos: Mapping[Host, HostInfo]) -> str:
    """The address at which the other hosts reach the first host; empty if the first host has no such address."""
    first, info = hosts[0], infos[hosts[0]]
    if len(hosts) == 1:
        return "127.0.0.1"
    # If the first host is this machine, the other hosts have accepted ssh connections from it. They can reach it at the
    # address of these connections.
    clients = [infos[host].ssh_client for host in hosts[1:] if is_here(first)]
    candidates = [address_of(first), info.ssh_server_address, *clients, *chain.from_iterable(info.interfaces.values())]
    for address in filter(None, candidates):
        parsed = ipaddress.ip_address(address.split("%")[0])
        if not parsed.is_loopback and not parsed.is_link_local:
            return address
    return ""
