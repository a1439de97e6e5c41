"""`ds-finetune doctor`: examines every host, what a run needs there, and the network between the hosts."""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_finetune.cluster.doctor.checks import folder_checks, network_checks
from ds_finetune.cluster.host_checks import (
    Check,
    clock_check,
    host_checks,
    meeting_address,
    port_check,
    rank_device,
    world_of,
)
from ds_finetune.cluster.host_functions import digests
from ds_finetune.cluster.hosts import Cluster
from ds_finetune.cluster.launch.environment import carried_variables, environment_files
from ds_finetune.cluster.launch.remote import Remote
from ds_finetune.config.hostfile import Host
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import FinetuneError
from ds_finetune.system.info import HostInfo, gather_host_info
from ds_finetune.system.versions import check_versions
from ds_finetune.system.world import World

if TYPE_CHECKING:
    from ds_finetune.trainer.resolve import ResolvedRun

_HOST_SECONDS = 45.0
_JOIN_SECONDS = 60
"""Seconds that the elastic agents of torch wait for each other. The slowest one may still import torch."""
_NETWORK_SECONDS = _JOIN_SECONDS + 90.0
_MARGIN = 10.0
_AGAIN = "correct this fault and run doctor again"
_NEEDED_BY_NETWORK = ("address", "devices", "port")
"""Names of the checks that must pass before the network can be measured."""


Resolve = Callable[[World, str], "ResolvedRun"]
"""Type of the function that plans the run for given ranks (`World`) and a device type (`cpu` or `cuda`). The function
raises FinetuneError if the run cannot be planned.
"""


@dataclass(frozen=True)
class DoctorRequest:
    """What `ds-finetune doctor` examines: the hosts, how to reach them, the port of rank 0, and, if a run is given,
    what the run needs on each host.
    """

    hosts: tuple[Host, ...]
    remote: Remote
    port: int
    folders: dict[str, str]
    """Paths of folders that hosts may share. The keys, such as `output_dir`, name the folders in the report."""
    files: tuple[str, ...] = ()
    """Files and folders that every host must have for the run."""
    node_local: bool | None = None
    """The setting checkpoint.node_local: whether each host stores only the checkpoints of its own ranks. None if the
    run saves no checkpoints.
    """
    resolve: Resolve | None = None


def examine(request: DoctorRequest, say: Say) -> list[Check]:
    """Check all hosts and the network between them, and return the checks. `say` prints a line before the network is
    measured, which may take minutes.
    """
    with closing(Cluster(request.hosts, request.remote, name="doctor")) as cluster:
        checks = list(_checks(request, cluster, say))
        return [*cluster.lost.values(), *checks]


def _checks(request: DoctorRequest, cluster: Cluster, say: Say) -> Iterator[Check]:
    files = environment_files(os.environ, home=Path.home(), directory=Path.cwd())
    environ = carried_variables(os.environ, files=files).values
    infos = cluster.infos(environ, request.port, seconds=_HOST_SECONDS)
    if not infos:
        return
    checks = [Check("ssh", name, "ok", info.hostname) for name, info in infos.items()]
    checks += host_checks(cluster.hosts, infos, here=gather_host_info(), environ=environ)
    if (first := next(iter(cluster.hosts))) in infos:
        checks.append(port_check(first, infos[first], request.port))
    yield from checks
    device, resolved = rank_device(infos, environ), None
    if request.resolve is not None:
        resolved, planned = resolve_on(request.resolve, request.hosts, device)
        yield planned
    folders = {"folders": list(request.folders.values()), "marker": f".ds_finetune-doctor-{secrets.token_hex(4)}"}
    cluster.ask({next(iter(infos)): {"create_marker": folders}}, seconds=_HOST_SECONDS)
    yield from _single_host_checks(request, cluster, resolved, device)
    wrong = [check for check in checks if check.state == "fail" and check.name in _NEEDED_BY_NETWORK]
    infos = {name: info for name, info in infos.items() if name not in cluster.lost}
    if wrong:
        text = f"not measured: the check `{wrong[0].name}` of {wrong[0].host} fails"
        yield Check("network", "", "warn", text, _AGAIN)
    elif device == "cuda" or len(infos) > 1:
        say("measuring the network")
        yield from _network_checks(cluster, infos, device)
    # The hosts look for the marker file as late as possible, because a network file system shows new files of other
    # hosts with a delay.
    replies = cluster.ask({name: {"find_marker": folders} for name in infos}, seconds=_HOST_SECONDS)
    yield from (clock_check(name, ahead, error) for name, (_, ahead, error) in replies.items())
    for key, path in request.folders.items():
        by_host = {name: results["find_marker"][path] for name, (results, _, _) in replies.items()}
        yield from folder_checks(f"{key} {path}", by_host, request.node_local if key == "output_dir" else None)


def resolve_on(resolve: Resolve, hosts: Sequence[Host], device: str) -> tuple["ResolvedRun | None", Check]:
    """Plan the run with one rank for each slot of `hosts`. Returns the plan (None if the run was refused) and a check
    with the outcome.
    """
    try:
        check_versions()
        resolved = resolve(world_of(hosts, "the doctor"), device)
    except FinetuneError as refused:
        return None, Check("plan", "", "fail", refused.message, refused.hint)
    plan = resolved.plan
    text = f"{plan.mesh}, ZeRO-{plan.zero_stage}, {plan.world.world_size} ranks on {device}"
    return resolved, Check("plan", "", "ok", text)


def _single_host_checks(
    request: DoctorRequest, cluster: Cluster, resolved: "ResolvedRun | None", device: str
) -> Iterator[Check]:
    here, queries = digests(request.files if len(request.hosts) > 1 else ()), {}
    for number, (name, host) in enumerate(cluster.hosts.items()):
        query: dict[str, Any] = {"digests": {"paths": list(here)}} | ({"gpus": {}} if device == "cuda" else {})
        if resolved is not None:
            from ds_finetune.engine.ops.deepspeed_ops import needed_ops

            states, plan = resolved.states, resolved.plan
            ops = [op for op in needed_ops(plan) if op != "fused_adam" or not plan.may_take_torch_adam]
            query["compiler"] = {"operators": ops}
            need = resolved.needs.files.of_host(plan, ranks=host.slots, is_first_host=number == 0).num_bytes
            query["disk"] = {"folder": request.folders["output_dir"], "num_bytes": need}
            gpu_bytes = states.device_bytes if states.device == "gpu" else 0
            query["memory"] = {"host_bytes": host.slots * states.host_bytes, "gpu_bytes": gpu_bytes}
        queries[name] = query
    for name, (results, _, _) in cluster.ask(queries, seconds=_HOST_SECONDS).items():
        rows = [row for group in ("gpus", "compiler", "disk", "memory") for row in results.get(group, ())]
        for path, there in results["digests"].items():
            text = "is as on this machine" if there == here[path] else "has other names or sizes than on this machine"
            hint = "" if there == here[path] else "copy it to this path on the host, or use a folder that hosts share"
            rows.append(
                ("files", "fail" if hint else "ok", f"{path} {text if there else 'does not exist on the host'}", hint)
            )
        yield from (Check(row[0], name, *row[1:]) for row in rows)


def _network_checks(cluster: Cluster, infos: Mapping[str, HostInfo], device: str) -> list[Check]:
    """Measure the network by the program measure.py under torch's elastic agent, with one rank per GPU, or with up to
    two ranks per host on CPUs.
    """
    hosts = {name: cluster.hosts[name] for name in infos}
    by_host = {hosts[name]: info for name, info in infos.items()}
    addresses = {
        name: meeting_address(sorted(by_host, key=lambda other: other != host), by_host) or "127.0.0.1"
        for name, host in hosts.items()
    }
    first, token = next(iter(hosts)), secrets.token_hex(4)
    port = infos[first].port
    endpoint = f"[{addresses[first]}]:{port}" if ":" in addresses[first] else f"{addresses[first]}:{port}"
    queries = {}
    for name, host in hosts.items():
        gpus = ",".join(map(str, host.devices or range(host.slots))) if device == "cuda" else ""
        settings = f"is_host={int(name == first)},join_timeout={_JOIN_SECONDS},read_timeout={_JOIN_SECONDS}"
        agent = [f"--nnodes={len(hosts)}", f"--nproc-per-node={host.slots if gpus else min(host.slots, 2)}"]
        agent += ["--max-restarts=0", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={token}"]
        agent += [f"--rdzv-conf={settings}", f"--local-addr={addresses[name]}"]
        module = ["torch.distributed.run", *agent, "-m", "ds_finetune.cluster.doctor.measure", name, gpus]
        queries[name] = {"run": {"module": module, "seconds": _NETWORK_SECONDS}}
    replies = cluster.ask(queries, seconds=_NETWORK_SECONDS + _MARGIN)
    if len(replies) < len(hosts):
        return [Check("network", "", "warn", "not measured: a host no longer answers", _AGAIN)]
    return list(network_checks({name: results["run"] for name, (results, _, _) in replies.items()}, endpoint))
