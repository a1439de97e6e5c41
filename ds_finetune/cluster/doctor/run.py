"""The doctor's procedure: ask every host for its facts, build the run's operators, measure the network, and check."""

import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds_finetune.cluster.doctor.cluster import Cluster
from ds_finetune.cluster.doctor.host_details import HostDetails, HostQuery, gather_details
from ds_finetune.cluster.doctor.messages import (
    BuildOp,
    ChildLost,
    ChildReplies,
    ChildReply,
    ChildRequest,
    DetailsReply,
    DetailsRequest,
    FindMarkers,
    FreePortReply,
    FreePortRequest,
    MarkersFound,
    MarkersPlaced,
    MeasureNetwork,
    OpBuilt,
    PlaceMarkers,
    RequestRefused,
    RunInChildren,
)
from ds_finetune.cluster.doctor.need import Need, files_of, folders_of, need_of
from ds_finetune.cluster.doctor.network import EXCHANGE_SECONDS, JOIN_SECONDS, NetworkRank
from ds_finetune.cluster.doctor.network_checks import network_checks
from ds_finetune.cluster.doctor.storage_checks import disk_checks, file_checks, folder_checks
from ds_finetune.cluster.doctor.system_checks import (
    clock_checks,
    gpu_checks,
    infiniband_checks,
    limit_checks,
    memory_checks,
    name_checks,
)
from ds_finetune.cluster.hosts.check_result import Check
from ds_finetune.cluster.hosts.host_checks import host_checks, port_check, rank_device
from ds_finetune.cluster.launch.environment import carried_variables, environment_files
from ds_finetune.cluster.launch.preflight import meeting_address
from ds_finetune.cluster.launch.remote import Remote, address_of
from ds_finetune.config.hostfile import Host
from ds_finetune.config.schema import RunConfig
from ds_finetune.console.phase_line import Say
from ds_finetune.system.info import HostInfo

_START_SECONDS = 45.0
_QUICK_SECONDS = 20.0
_BUILD_SECONDS = 1200.0
_NETWORK_SECONDS = float(JOIN_SECONDS + 2 * EXCHANGE_SECONDS)
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
    config: RunConfig | None
    port: int

    @property
    def environ(self) -> dict[str, str]:
        """The variables of this process that hosts get, as with `launch`."""
        files = environment_files(os.environ, home=Path.home(), directory=Path.cwd())
        return carried_variables(os.environ, files=files).values


def examine(request: DoctorRequest, say: Say) -> list[Check]:
    """All checks of the hosts; `say` prints what takes long."""
    folders = tuple(folders_of(request.config).values())
    query = HostQuery(request.environ, request.hosts[0].name, 0, folders, files_of(request.config))
    with Cluster(request.hosts, request.remote, say) as cluster:
        hosts = _ask_details(cluster, query, request.port)
        if not hosts:
            return cluster.lost
        # Placed long before they are searched: a network file system shows other hosts' files with a delay.
        token = secrets.token_hex(4)
        markers = {name: PlaceMarkers(list(folders), f"{token}-{name}") for name in hosts}
        cluster.ask(markers, MarkersPlaced, seconds=_QUICK_SECONDS)
        checks = [Check("ssh", name, "ok", details.hostname) for name, details in hosts.items()]
        checks += _detail_checks(request, cluster, hosts, gather_details(query))
        checks += _run_checks(request, cluster, hosts)
        checks += _network_checks(cluster, hosts, checks, rank_device(hosts, query.environ))
        checks += _folder_checks(cluster, token, request.config)
        return [*cluster.lost, *checks]


def _ask_details(cluster: Cluster, query: HostQuery, port: int) -> dict[str, HostDetails]:
    """The facts of the hosts that answer; the first host also tries `port`."""
    first = next(iter(cluster.hosts))
    requests = {name: DetailsRequest(replace(query, port=port if name == first else 0)) for name in cluster.hosts}
    replies = cluster.ask(requests, DetailsReply, seconds=_START_SECONDS)
    return {name: reply.details for name, reply in replies.items()}


def _detail_checks(
    request: DoctorRequest, cluster: Cluster, hosts: Mapping[str, HostDetails], here: HostDetails
) -> Iterator[Check]:
    """The checks that need only the facts of the hosts, not the plan of the run."""
    first, name = next(iter(cluster.hosts)), request.hosts[0].name
    yield from clock_checks(cluster.clocks())
    yield from shared_checks(cluster.hosts, hosts, here=here, environ=request.environ)
    if rank_device(hosts, request.environ) == "cuda":
        yield from gpu_checks(hosts)
        yield from infiniband_checks(hosts)
    if first in hosts:
        yield port_check(first, hosts[first], request.port)
    # Hosts that differ in their ports alone are containers, whose names mean nothing to each other.
    if len(cluster.hosts) > 1 and name == first:
        yield from name_checks(name, hosts)
    yield from file_checks(here, hosts)


def shared_checks(
    hostfile_hosts: Mapping[str, Host], infos: Mapping[str, HostInfo], *, here: HostInfo, environ: Mapping[str, str]
) -> list[Check]:
    """The checks that `launch` runs as well, before it starts ranks."""
    addresses = {name: address_of(host) for name, host in hostfile_hosts.items()}
    return host_checks(hostfile_hosts, infos, here=here, environ=environ, addresses=addresses)


def _run_checks(request: DoctorRequest, cluster: Cluster, hosts: Mapping[str, HostDetails]) -> Iterator[Check]:
    """The checks that depend on the plan: limits, disk, memory and operators."""
    need = None
    if request.config is not None:
        need, planned = need_of(request.config, request.hosts, rank_device(hosts, request.environ))
        yield planned
    world_size = sum(host.slots for host in request.hosts)
    yield from limit_checks(hosts, world_size=world_size, locks_memory=bool(need and "async_io" in need.ops))
    if need is not None and request.config is not None:
        yield from disk_checks(hosts, request.config.output_dir, need.disk_bytes)
        yield from memory_checks(cluster.hosts, hosts, rank_bytes=need.rank_bytes, gpu_bytes=need.gpu_bytes)
        yield from _op_checks(cluster, need)


def _op_checks(cluster: Cluster, need: Need) -> Iterator[Check]:
    """Build and run the operators on all hosts at once.

    Each has its own process, because an illegal instruction may kill it.
    """
    if not need.ops:
        return
    names = list(need.ops)
    builds: list[ChildRequest] = [BuildOp(name, dict(need.ops[name])) for name in names]
    requests = {host: RunInChildren(builds, _BUILD_SECONDS) for host in cluster.sessions}
    what = f"{' and '.join(names)} of DeepSpeed; a first build takes minutes, {_BUILD_SECONDS / 60:.0f} at most"
    for host, answer in cluster.ask(requests, ChildReplies, seconds=_BUILD_SECONDS + _MARGIN, what=what).items():
        for name, reply in zip(names, answer.replies, strict=True):
            yield op_check(host, name, reply, need.ops[name])


def op_check(host: str, name: str, reply: ChildReply, settings: Mapping[str, Any]) -> Check:
    """The result of building and running an operator; a failure of one that has a substitute is a warning."""
    if isinstance(reply, OpBuilt):
        return Check(name, host, "ok", reply.text)
    if isinstance(reply, RequestRefused) and "substitute" in settings:
        found = f"{reply.message}; the run will use {settings['substitute']}"
        return Check(name, host, "warn", found, reply.hint)
    if isinstance(reply, RequestRefused):
        return Check(name, host, "fail", reply.message, reply.hint)
    assert isinstance(reply, ChildLost)
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
    cluster: Cluster, hosts: Mapping[str, HostDetails], checks: list[Check], device: str
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
    ports = cluster.ask({names[0]: FreePortRequest()}, FreePortReply, seconds=_QUICK_SECONDS)
    if names[0] not in ports:
        return []
    infos = {cluster.hosts[name]: hosts[name] for name in names}
    address = meeting_address(list(infos), infos) or "127.0.0.1"
    host_of_rank = [name for name in names for _ in range(counts[name])]
    leaders = tuple(host_of_rank.index(name) for name in names)
    measurements: dict[str, list[ChildRequest]] = {name: [] for name in names}
    for rank, name in enumerate(host_of_rank):
        local_rank = rank - host_of_rank.index(name)
        device_number = (cluster.hosts[name].devices or range(counts[name]))[local_rank]
        place = NetworkRank(rank, len(host_of_rank), address, ports[names[0]].port, device, device_number, leaders)
        measurements[name].append(MeasureNetwork(place))
    requests = {name: RunInChildren(ranks, _NETWORK_SECONDS) for name, ranks in measurements.items()}
    what = "the network between the hosts"
    answers = cluster.ask(requests, ChildReplies, seconds=_NETWORK_SECONDS + _MARGIN, what=what)
    gone = [name for name in names if name not in answers]
    if gone:
        return [Check("network", "", "warn", f"not measured: {', '.join(gone)} no longer answers", _AGAIN)]
    return network_checks(host_of_rank, [reply for name in names for reply in answers[name].replies])


def _folder_checks(cluster: Cluster, token: str, config: RunConfig | None) -> Iterator[Check]:
    """Look in each folder for the marker files that all hosts have left there."""
    names, folders = list(cluster.sessions), folders_of(config)
    request = FindMarkers(list(folders.values()), [f"{token}-{name}" for name in names])
    visible = cluster.ask(dict.fromkeys(names, request), MarkersFound, seconds=_QUICK_SECONDS)
    for name, path in folders.items():
        by_host = {
            host: [other.removeprefix(f"{token}-") for other in answer.tokens[path]] for host, answer in visible.items()
        }
        is_saved_to = config is not None and name == "output_dir" and config.checkpoint.saves
        node_local = config.checkpoint.node_local if config is not None and is_saved_to else None
        yield from folder_checks(name, path, by_host, node_local=node_local)
