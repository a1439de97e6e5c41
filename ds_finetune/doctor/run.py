"""The doctor's round: every host is asked what it is, builds what the run needs, and talks to the others; the answers
become checks.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.doctor import checks
from ds_finetune.doctor.checks import Check
from ds_finetune.doctor.cluster import Cluster, Say
from ds_finetune.doctor.facts import Facts, HostQuery, gather
from ds_finetune.doctor.links import network_checks
from ds_finetune.doctor.need import Need, files_of, folders_of, need_of
from ds_finetune.doctor.network import JOIN_SECONDS, TALK_SECONDS, Seat
from ds_finetune.hostfile import Host
from ds_finetune.launch.environment import carried_variables, environment_files
from ds_finetune.launch.remote import Remote, address_of

_START_SECONDS = 45.0
_QUICK_SECONDS = 20.0
_BUILD_SECONDS = 1200.0
_NETWORK_SECONDS = float(JOIN_SECONDS + 2 * TALK_SECONDS)
_MARGIN = 10.0
_STOPS_NETWORK = ("address", "interface", "devices")
_ILLEGAL = -4


@dataclass(frozen=True)
class DoctorRequest:
    """What is examined: hosts, how they are reached, the run if one is given, and the port where ranks will meet."""

    hosts: tuple[Host, ...]
    remote: Remote
    config: RunConfig | None
    port: int

    @property
    def environ(self) -> dict[str, str]:
        """What hosts are given of this process's environment, as `launch` does."""
        return carried_variables(
            os.environ, files=environment_files(os.environ, home=Path.home(), directory=Path.cwd())
        ).values


def examine(request: DoctorRequest, say: Say) -> list[Check]:
    """All checks of the hosts; `say` prints what takes long."""
    asked = HostQuery(
        request.environ, request.hosts[0].name, 0, tuple(folders_of(request.config).values()), files_of(request.config)
    )
    with Cluster(request.hosts, request.remote, say) as cluster:
        first = next(iter(cluster.hosts))
        ports = {name: request.port if name == first else 0 for name in cluster.hosts}
        answers = cluster.ask(
            "facts", {name: asdict(replace(asked, port=port)) for name, port in ports.items()}, seconds=_START_SECONDS
        )
        there = {
            name: Facts.read(tree) for name, tree in answers.items() if tree.keys() == Facts.__dataclass_fields__.keys()
        }
        for name in answers.keys() - there.keys():
            cluster.lost.append(
                Check(
                    "versions",
                    name,
                    "fail",
                    "another ds_finetune than here answers",
                    "install the same source on every host",
                )
            )
        found = [Check("ssh", name, "ok", facts.hostname) for name, facts in there.items()]
        if not there:
            return cluster.lost
        # Long before they are looked for: a network file system shows other hosts' files late.
        token = secrets.token_hex(4)
        cluster.ask(
            "mark",
            {name: {"folders": list(asked.folders), "token": f"{token}-{name}"} for name in there},
            seconds=_QUICK_SECONDS,
        )
        found += _examined(request, cluster, there, gather(asked))
        found += _folders(cluster, token, request.config)
        return [*cluster.lost, *found]


def _examined(request: DoctorRequest, cluster: Cluster, there: Mapping[str, Facts], here: Facts) -> list[Check]:
    is_cuda = os.environ.get("DS_ACCELERATOR", "cuda") == "cuda" and any(facts.gpus for facts in there.values())
    device = "cuda" if is_cuda else "cpu"
    found = [
        *checks.clock_checks(cluster.clocks()),
        *_host_checks(request, cluster.hosts, there, device),
        *checks.version_checks(here, there),
    ]
    found += checks.file_checks(here, there)
    need = None
    if request.config is not None:
        need, planned = need_of(request.config, request.hosts, device)
        found.append(planned)
    found += checks.limit_checks(
        there, world_size=sum(h.slots for h in request.hosts), locks_memory=bool(need and "async_io" in need.ops)
    )
    if need is not None and request.config is not None:
        found += checks.disk_checks(there, request.config.output_dir, need.disk_bytes)
        found += checks.memory_checks(cluster.hosts, there, rank_bytes=need.rank_bytes, gpu_bytes=need.gpu_bytes)
        found += _ops(cluster, need)
    return [*found, *_network(cluster, there, found, device)]


def _host_checks(
    request: DoctorRequest, hosts: Mapping[str, Host], there: Mapping[str, Facts], device: str
) -> Iterator[Check]:
    first, name = next(iter(hosts)), request.hosts[0].name
    yield from checks.identity_checks({label: address_of(host) for label, host in hosts.items()}, there)
    yield from checks.device_checks(hosts, there, device)
    if first in there:
        yield from checks.port_checks(first, there[first], request.port)
    yield from checks.interface_checks(there, request.environ)
    # Hosts that differ in their ports alone are containers, whose names mean nothing to each other.
    if len(hosts) > 1 and name == first:
        yield from checks.name_checks(name, there)


def _ops(cluster: Cluster, need: Need) -> Iterator[Check]:
    """Operators are built and run on every host at once, each in a process of its own, which may die of an illegal
    instruction.
    """
    if not need.ops:
        return
    names = list(need.ops)
    requests = [{"do": "op", "name": name, "settings": need.ops[name]} for name in names]
    arguments = {host: {"requests": requests, "seconds": _BUILD_SECONDS} for host in cluster.sessions}
    what = f"{' and '.join(names)} of DeepSpeed; a first build takes minutes, {_BUILD_SECONDS / 60:.0f} at most"
    for host, answers in cluster.ask("apart", arguments, seconds=_BUILD_SECONDS + _MARGIN, what=what).items():
        yield from (op_check(host, name, answer, need.ops[name]) for name, answer in zip(names, answers, strict=True))


def op_check(host: str, name: str, answer: Mapping[str, Any], settings: Mapping[str, Any]) -> Check:
    """What came of building and running an operator; one with a substitute need not be built."""
    if "value" in answer:
        return Check(name, host, "ok", answer["value"])
    if "refused" in answer and "substitute" in settings:
        return Check(
            name, host, "warn", f"{answer['refused']}; the run will use {settings['substitute']}", answer["hint"]
        )
    if "refused" in answer:
        return Check(name, host, "fail", answer["refused"], answer["hint"])
    last = ([line for line in answer["said"].splitlines() if line.strip()] or ["it said nothing"])[-1]
    if answer["lost"] is None:
        hint = (
            f"if nothing builds there, remove the file `lock` in {name} below TORCH_EXTENSIONS_DIR "
            "(~/.cache/torch_extensions)"
        )
        return Check(name, host, "fail", f"not built and run in {_BUILD_SECONDS:.0f} s; last words: {last}", hint)
    hint = (
        f"remove {name} below TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions), which another kind of CPU may "
        "have built; do not share it"
    )
    what = "an illegal instruction" if answer["lost"] == _ILLEGAL else f"exit code {answer['lost']}: {last}"
    return Check(name, host, "fail", f"ended by {what}", hint)


def _network(cluster: Cluster, there: Mapping[str, Facts], found: list[Check], device: str) -> list[Check]:
    hosts = [name for name in there if name in cluster.sessions]
    counts = {name: cluster.hosts[name].slots if device == "cuda" else 1 for name in hosts}
    if sum(counts.values()) < 2:
        return []
    wrong = [check for check in found if check.state == "fail" and check.name in _STOPS_NETWORK]
    if wrong:
        return [
            Check(
                "network",
                "",
                "warn",
                f"not measured: the check `{wrong[0].name}` of {wrong[0].host} fails",
                "correct that and run doctor again",
            )
        ]
    address = meeting_address(cluster.hosts[hosts[0]], hosts, there)
    ports = cluster.ask("free_port", {hosts[0]: {}}, seconds=_QUICK_SECONDS)
    if hosts[0] not in ports:
        return []
    seats = [name for name in hosts for _ in range(counts[name])]
    requests: dict[str, list[dict[str, object]]] = {name: [] for name in hosts}
    leaders = tuple(seats.index(name) for name in hosts)
    for rank, name in enumerate(seats):
        seat = Seat(
            rank,
            len(seats),
            address,
            ports[hosts[0]],
            device,
            _device_of(cluster.hosts[name], rank - seats.index(name)),
            leaders,
        )
        requests[name].append({"do": "measure", **asdict(seat)})
    arguments = {name: {"requests": asked, "seconds": _NETWORK_SECONDS} for name, asked in requests.items()}
    answers = cluster.ask("apart", arguments, seconds=_NETWORK_SECONDS + _MARGIN, what="the network between the hosts")
    gone = [name for name in hosts if name not in answers]
    if gone:
        return [
            Check(
                "network",
                "",
                "warn",
                f"not measured: {', '.join(gone)} went away meanwhile",
                "correct that and run doctor again",
            )
        ]
    return network_checks(seats, [answer for name in hosts for answer in answers[name]])


def _device_of(host: Host, place: int) -> int:
    return host.devices[place] if host.devices else place


def meeting_address(first: Host, names: list[str], there: Mapping[str, Facts]) -> str:
    """The address at which the other hosts reach the first: what its name leads to here, or there, or where ssh came
    in.
    """
    others = [address for name in names[1:] for address in there[name].first]
    own = [address for addresses in there[names[0]].interfaces.values() for address in addresses]
    known = [address_of(first), *others, there[names[0]].ssh_address, *own]
    return next(
        (address for address in known if address and not address.startswith(("127.", "::1", "fe80"))), "127.0.0.1"
    )


def _folders(cluster: Cluster, token: str, config: RunConfig | None) -> Iterator[Check]:
    names, folders = list(cluster.sessions), folders_of(config)
    asked = {"folders": list(folders.values()), "tokens": [f"{token}-{name}" for name in names]}
    seen = cluster.ask("look", dict.fromkeys(names, asked), seconds=_QUICK_SECONDS)
    for name, path in folders.items():
        by_host = {host: [other.removeprefix(f"{token}-") for other in answer[path]] for host, answer in seen.items()}
        node_local = (
            config.checkpoint.node_local
            if config is not None and name == "output_dir" and config.checkpoint.every_steps
            else None
        )
        yield from checks.folder_checks(name, path, by_host, node_local=node_local)
