"""The doctor's procedure: ask every host for its facts, build the run's operators, measure the network, and check."""

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_finetune.cluster.doctor import messages
from ds_finetune.cluster.doctor.checks import (
    clock_checks,
    disk_checks,
    file_checks,
    folder_checks,
    gpu_checks,
    infiniband_checks,
    limit_checks,
    memory_checks,
    name_checks,
    network_checks,
    triton_checks,
)
from ds_finetune.cluster.doctor.needs import CheckedRun, Need, need_of
from ds_finetune.cluster.doctor.probe import gather_details
from ds_finetune.cluster.doctor.session import Cluster
from ds_finetune.cluster.host_checks import Check, host_checks, meeting_address, port_check, rank_device
from ds_finetune.cluster.launch.environment import carried_variables, environment_files
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.console.phase_line import Say

_START_SECONDS = 45.0
_QUICK_SECONDS = 20.0
_BUILD_SECONDS = 1200.0
_NETWORK_SECONDS = float(messages.JOIN_SECONDS + 2 * messages.EXCHANGE_SECONDS)
_MARGIN = 10.0
_NEEDED_BY_NETWORK = ("address", "interface", "devices")
"""Checks that must pass before the network can be measured."""
_SIGILL_EXIT_CODE = -4
"""Exit code of a process that an illegal instruction ended (SIGILL)."""
_AGAIN = "correct that and run doctor again"


@dataclass(frozen=True)
class DoctorRequest:
    """What `examine` checks: the hosts, how to reach them, the run if one is given, and the port of rank 0."""

    hosts: tuple[Host, ...]
    remote: Remote
    run: CheckedRun | None
    port: int

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables of this process that are passed on to the hosts; `launch` passes on the same."""
        files = environment_files(os.environ, home=Path.home(), directory=Path.cwd())
        return carried_variables(os.environ, files=files).values


def examine(request: DoctorRequest, say: Say) -> list[Check]:
    """All checks of the hosts; `say` prints what takes long."""
    run = request.run
    folders, files = (run.folders, run.files) if run is not None else ({"working folder": "."}, ())
    paths = tuple(folders.values())
    query = messages.HostQuery(request.environ, request.hosts[0].name, 0, paths, files)
    with Cluster(request.hosts, request.remote, say) as cluster:
        first = next(iter(cluster.hosts))
        queries = {name: replace(query, port=request.port if name == first else 0) for name in cluster.hosts}
        hosts = cluster.ask(queries, messages.HostDetails, seconds=_START_SECONDS)
        if not hosts:
            return cluster.lost
        # Placed long before they are searched: a network file system shows other hosts' files with a delay.
        token = secrets.token_hex(4)
        markers = {name: messages.PlaceMarkers(list(paths), f"{token}-{name}") for name in hosts}
        cluster.ask(markers, messages.MarkersPlaced, seconds=_QUICK_SECONDS)
        checks = [Check("ssh", name, "ok", details.hostname) for name, details in hosts.items()]
        checks += _detail_checks(request, cluster, hosts, gather_details(query))
        checks += _run_checks(request, cluster, hosts)
        checks += _network_checks(cluster, hosts, checks, rank_device(hosts, query.environ))
        checks += _folder_checks(cluster, token, folders, node_local=run.node_local if run is not None else None)
        return [*cluster.lost, *checks]


def _detail_checks(
    request: DoctorRequest, cluster: Cluster, hosts: Mapping[str, messages.HostDetails], here: messages.HostDetails
) -> Iterator[Check]:
    """The checks that need only the facts of the hosts, not the plan of the run."""
    first, name = next(iter(cluster.hosts)), request.hosts[0].name
    yield from clock_checks(cluster.clocks())
    yield from host_checks(cluster.hosts, hosts, here=here, environ=request.environ)
    if rank_device(hosts, request.environ) == "cuda":
        yield from gpu_checks(hosts)
        yield from triton_checks(hosts)
        yield from infiniband_checks(hosts)
    if first in hosts:
        yield port_check(first, hosts[first], request.port)
    # Hosts that differ only in their ports are containers, whose names mean nothing to each other.
    if len(cluster.hosts) > 1 and name == first:
        yield from name_checks(name, hosts)
    yield from file_checks(here, hosts)


def _run_checks(request: DoctorRequest, cluster: Cluster, hosts: Mapping[str, messages.HostDetails]) -> Iterator[Check]:
    """The checks that depend on the plan: limits, disk, memory and operators."""
    need = None
    if request.run is not None:
        need, planned = need_of(request.run, request.hosts, rank_device(hosts, request.environ))
        yield planned
    world_size = sum(host.slots for host in request.hosts)
    yield from limit_checks(hosts, world_size=world_size, locks_memory=bool(need and "async_io" in need.ops))
    if need is not None and request.run is not None:
        yield from disk_checks(hosts, request.run.output_dir, need.disk_bytes)
        yield from memory_checks(cluster.hosts, hosts, rank_bytes=need.rank_bytes, gpu_bytes=need.gpu_bytes)
        yield from _op_checks(cluster, need)


def _op_checks(cluster: Cluster, need: Need) -> Iterator[Check]:
    """Build and run the operators on all hosts at once.

    Each has its own process, because an illegal instruction may kill it.
    """
    if not need.ops:
        return
    names = list(need.ops)
    builds: list[messages.ChildRequest] = [messages.BuildOp(name, dict(need.ops[name])) for name in names]
    requests = {host: messages.RunInChildren(builds, _BUILD_SECONDS) for host in cluster.sessions}
    what = f"{' and '.join(names)} of DeepSpeed; a first build takes minutes, {_BUILD_SECONDS / 60:.0f} at most"
    answers = cluster.ask(requests, messages.ChildReplies, seconds=_BUILD_SECONDS + _MARGIN, what=what)
    for host, answer in answers.items():
        for name, reply in zip(names, answer.replies, strict=True):
            yield op_check(host, name, reply, need.ops[name])


def op_check(host: str, name: str, reply: messages.ChildReply, settings: Mapping[str, Any]) -> Check:
    """The result of building and running an operator; a failure of one that has a substitute is a warning."""
    if isinstance(reply, messages.OpBuilt):
        return Check(name, host, "ok", reply.text)
    if isinstance(reply, messages.RequestRefused):
        substitute = f"; the run will use {settings['substitute']}" if "substitute" in settings else ""
        return Check(name, host, "warn" if substitute else "fail", f"{reply.message}{substitute}", reply.hint)
    assert isinstance(reply, messages.ChildLost)
    last = ([line for line in reply.stderr.splitlines() if line.strip()] or ["nothing"])[-1]
    if reply.code is None:
        hint = (
            f"if nothing builds there, remove the file `lock` in {name} below TORCH_EXTENSIONS_DIR "
            "(~/.cache/torch_extensions)"
        )
        return Check(name, host, "fail", f"not built and run in {_BUILD_SECONDS:.0f} s; last output: {last}", hint)
    hint = (
        f"remove {name} below TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions), which another kind of CPU may "
        "have built; do not share it"
    )
    what = "an illegal instruction" if reply.code == _SIGILL_EXIT_CODE else f"exit code {reply.code}: {last}"
    return Check(name, host, "fail", f"ended by {what}", hint)


def _network_checks(
    cluster: Cluster, hosts: Mapping[str, messages.HostDetails], checks: list[Check], device: str
) -> list[Check]:
    """Measure the network between the hosts, one rank for each GPU or for each CPU host."""
    names = [name for name in hosts if name in cluster.sessions]
    counts = {name: cluster.hosts[name].slots if device == "cuda" else 1 for name in names}
    if sum(counts.values()) < 2:
        return []
    wrong = [check for check in checks if check.state == "fail" and check.name in _NEEDED_BY_NETWORK]
    if wrong:
        found = f"not measured: the check `{wrong[0].name}` of {wrong[0].host} fails"
        return [Check("network", "", "warn", found, _AGAIN)]
    ports = cluster.ask({names[0]: messages.FreePortRequest()}, messages.FreePortReply, seconds=_QUICK_SECONDS)
    if names[0] not in ports:
        return []
    infos = {cluster.hosts[name]: hosts[name] for name in names}
    address = meeting_address(list(infos), infos) or "127.0.0.1"
    host_of_rank = [name for name in names for _ in range(counts[name])]
    leaders = tuple(host_of_rank.index(name) for name in names)
    measurements: dict[str, list[messages.ChildRequest]] = {name: [] for name in names}
    meeting = (len(host_of_rank), address, ports[names[0]].port, device)
    for rank, name in enumerate(host_of_rank):
        local_rank = rank - host_of_rank.index(name)
        device_number = (cluster.hosts[name].devices or range(counts[name]))[local_rank]
        measurements[name].append(messages.NetworkRank(rank, *meeting, device_number, leaders))
    requests = {name: messages.RunInChildren(ranks, _NETWORK_SECONDS) for name, ranks in measurements.items()}
    what = "the network between the hosts"
    answers = cluster.ask(requests, messages.ChildReplies, seconds=_NETWORK_SECONDS + _MARGIN, what=what)
    gone = [name for name in names if name not in answers]
    if gone:
        return [Check("network", "", "warn", f"not measured: {', '.join(gone)} no longer answers", _AGAIN)]
    return network_checks(host_of_rank, [reply for name in names for reply in answers[name].replies])


def _folder_checks(
    cluster: Cluster, token: str, folders: Mapping[str, str], *, node_local: bool | None
) -> Iterator[Check]:
    """Look in each folder for the marker files that all hosts have left there."""
    names = list(cluster.sessions)
    request = messages.FindMarkers(list(folders.values()), [f"{token}-{name}" for name in names])
    visible = cluster.ask(dict.fromkeys(names, request), messages.MarkersFound, seconds=_QUICK_SECONDS)
    for name, path in folders.items():
        by_host = {
            host: [other.removeprefix(f"{token}-") for other in answer.tokens[path]] for host, answer in visible.items()
        }
        yield from folder_checks(name, path, by_host, node_local=node_local if name == "output_dir" else None)
