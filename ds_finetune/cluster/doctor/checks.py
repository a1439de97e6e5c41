"""The doctor's checks: pure functions of what the hosts answered and measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from ds_finetune.cluster.doctor import messages
from ds_finetune.cluster.host_checks import Check, State
from ds_finetune.config.hostfile import Host
from ds_finetune.config.units import GIB, MIB

_CLOCK_WARN_SECONDS = 1.0
_CLOCK_FAIL_SECONDS = 60.0
_BASE_FILES, _FILES_PER_RANK = 1024, 8
_MEMORY_MARGIN = 0.8
_UNLIMITED = -1
_LOOPBACK = ("127.", "::1")
_SLOW_FACTOR, _BROKEN_FACTOR = 3, 10
"""A host or link is slow, or broken, where others are this many times as fast."""
_MIN_HOSTS_TO_COMPARE = 3
_UNREACHED = (
    "look at firewalls between the hosts (all ports are needed), and at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
)
_SLOW_HINT = "compare its link speed (ethtool), cable, switch port and driver with the others'"

Links = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class ClockOffset:
    """Seconds by which a host's clock is ahead of that of the machine that runs `doctor`, and of the round trip."""

    ahead: float
    round_trip: float


def clock_checks(clocks: Mapping[str, ClockOffset]) -> Iterator[Check]:
    """Compare the clocks of the hosts with that of the machine that runs `doctor`.

    Half the round trip is the error of the measurement.
    """
    for host, clock in clocks.items():
        error = clock.round_trip / 2
        difference = abs(clock.ahead) - error
        state: State = (
            "fail" if difference > _CLOCK_FAIL_SECONDS else "warn" if difference > _CLOCK_WARN_SECONDS else "ok"
        )
        # Adding zero turns minus zero into zero.
        found = f"{round(clock.ahead, 2) + 0.0:+.2f} s"
        if state == "ok":
            yield Check("clock", host, state, found)
            continue
        hint = "start a time service (chrony, systemd-timesyncd) on every host"
        yield Check("clock", host, state, f"{found} +- {error * 1000:.0f} ms", hint)


def limit_checks(hosts: Mapping[str, messages.HostDetails], *, world_size: int, locks_memory: bool) -> Iterator[Check]:
    """Open files, locked memory and /dev/shm of each host; InfiniBand and NVMe offload lock memory."""
    needed_files = _BASE_FILES + _FILES_PER_RANK * world_size
    for host, details in hosts.items():
        wrong = []
        if details.open_files != _UNLIMITED and details.open_files < needed_files:
            hint = f"raise nofile to {needed_files} or more in /etc/security/limits.conf"
            wrong.append((f"open files {details.open_files}", hint))
        if details.locked_bytes != _UNLIMITED and (details.has_infiniband or locks_memory):
            hint = "set memlock to unlimited in /etc/security/limits.conf"
            wrong.append((f"locked memory {details.locked_bytes // 1024} KiB", hint))
        if details.shm_bytes < GIB:
            hint = "give it 1 GiB or more (docker: --shm-size, or --ipc=host)"
            wrong.append((f"/dev/shm {details.shm_bytes // MIB} MiB", hint))
        found = "; ".join(text for text, _ in wrong)
        found = found or f"open files {details.open_files}, /dev/shm {details.shm_bytes / GIB:.1f} GiB"
        yield Check("limits", host, "warn" if wrong else "ok", found, "; ".join(hint for _, hint in wrong))


def infiniband_checks(hosts: Mapping[str, messages.HostDetails]) -> Iterator[Check]:
    """Hosts with InfiniBand and without the library by which NCCL uses it, as in many containers."""
    for host, details in hosts.items():
        if details.has_infiniband and not details.has_ibverbs:
            found = "there are InfiniBand devices, but no libibverbs.so.1: NCCL uses sockets"
            yield Check("network", host, "warn", found, "install libibverbs1 and ibverbs-providers")


def triton_checks(hosts: Mapping[str, messages.HostDetails]) -> Iterator[Check]:
    """Hosts where Triton cannot make the kernels of `model.kernels`, of Liger's loss and of the product of experts."""
    for host, details in hosts.items():
        problem, hint = details.triton_problem
        if problem:
            yield Check("kernels", host, "warn", f"Triton cannot make any: {problem}; auto takes torch's", hint)


def gpu_checks(hosts: Mapping[str, messages.HostDetails]) -> Iterator[Check]:
    """GPUs that nvidia-smi does not list, that have memory in use, or that two hosts report."""
    for host, details in hosts.items():
        listed = details.gpu_memory
        if len(listed) < len(details.gpus):
            found = f"nvidia-smi lists {len(listed)} of {len(details.gpus)} GPUs"
            yield Check("gpus", host, "fail", found, "run nvidia-smi on the host; restart it after a driver update")
        busy = [str(number) for number, gpu in enumerate(listed) if (gpu.used_bytes or 0) > GIB]
        if busy:
            found = f"GPU {', '.join(busy)} has more than 1 GiB in use"
            yield Check("gpus", host, "warn", found, "find the process with nvidia-smi")
        exclusive = [str(number) for number, gpu in enumerate(listed) if gpu.compute_mode.startswith("Exclusive")]
        if exclusive:
            found = f"GPU {', '.join(exclusive)} admits one process"
            hint = "nvidia-smi -c 0; train.micro_batch_size auto and export.verify start a second process"
            yield Check("gpus", host, "warn", found, hint)
    for a, b in combinations(hosts, 2):
        shared = {gpu.uuid for gpu in hosts[a].gpu_memory} & {gpu.uuid for gpu in hosts[b].gpu_memory}
        if shared and hosts[a].network_identity != hosts[b].network_identity:
            yield Check("gpus", b, "fail", f"the same GPUs as {a}", "give each container GPUs of its own")


def name_checks(first: str, hosts: Mapping[str, messages.HostDetails]) -> Iterator[Check]:
    """Check that the other hosts resolve the name of the first host to one of its addresses."""
    known = hosts[first].interfaces.values() if first in hosts else ()
    own = {address for addresses in known for address in addresses}
    for host, details in hosts.items():
        is_loopback_alone = bool(details.first_host_addresses) and all(
            address.startswith(_LOOPBACK) for address in details.first_host_addresses
        )
        if host == first:
            if len(hosts) > 1 and is_loopback_alone:
                found = f"{first} resolves to {details.first_host_addresses[0]} on that host itself"
                hint = "take its name off the 127.* line of its /etc/hosts, or write its address into the hostfile"
                yield Check("name", host, "warn", found, hint)
        elif not details.first_host_addresses:
            hint = f"add {first} to /etc/hosts, or write its address into the hostfile"
            yield Check("name", host, "warn", f"{first} does not resolve there", hint)
        elif own and not own & {
            address for address in details.first_host_addresses if not address.startswith(_LOOPBACK)
        }:
            found = f"{first} resolves to {', '.join(details.first_host_addresses)} there, which is not that host"
            hint = "correct /etc/hosts there, or write its address into the hostfile"
            yield Check("name", host, "fail", found, hint)
        else:
            yield Check("name", host, "ok", f"{first} resolves to {details.first_host_addresses[0]}")


def memory_checks(
    hostfile_hosts: Mapping[str, Host], hosts: Mapping[str, messages.HostDetails], *, rank_bytes: int, gpu_bytes: int
) -> Iterator[Check]:
    """Available memory compared with the plan: bytes that a rank keeps in host memory and on its GPU.

    Activations need more memory besides. `hostfile_hosts` has the hostfile entry of each host.
    """
    for host, details in hosts.items():
        rows = [("host", hostfile_hosts[host].slots * rank_bytes, details.memory_bytes)]
        if details.gpu_memory and gpu_bytes:
            totals = [gpu.total_bytes for gpu in details.gpu_memory if gpu.total_bytes is not None]
            rows.append(("GPU", gpu_bytes, min(totals, default=None)))
        for what, needed, available in rows:
            if available is None:
                continue
            state: State = "fail" if needed > available else "warn" if needed > _MEMORY_MARGIN * available else "ok"
            found = f"{what}: state of the run {needed / GIB:,.2f} GiB, {available / GIB:,.1f} GiB available"
            hint = "" if state == "ok" else "more hosts, a higher ZeRO stage, offload, or a smaller model"
            yield Check("memory", host, state, found, hint)


def folder_checks(
    name: str, path: str, visible: Mapping[str, Sequence[str]], *, node_local: bool | None = None
) -> Iterator[Check]:
    """Check which hosts share a folder; `visible` has, for each host, the hosts whose marker file it sees there.

    `node_local` is checkpoint.node_local, None for a folder that this key does not concern.
    """
    for host in (host for host, others in visible.items() if host not in others):
        found = f"{name} {path} is not writable there"
        yield Check("folders", host, "fail", found, "change the permissions, or name another folder")
    writable = {host: others for host, others in visible.items() if host in others}
    if len(writable) < 2:
        return
    if all(set(others) == set(writable) for others in writable.values()):
        is_wrong = node_local is True
        found = f"{name} {path} is shared by all hosts" + (", and checkpoint.node_local is true" if is_wrong else "")
        hint = "set checkpoint.node_local false" if is_wrong else ""
        yield Check("folders", "", "warn" if is_wrong else "ok", found, hint)
    elif all(list(others) == [host] for host, others in writable.items()):
        is_wrong = node_local is False
        found = f"{name} {path} is another on each host" + (", and checkpoint.node_local is false" if is_wrong else "")
        hint = "set checkpoint.node_local true, or name a folder that all hosts share" if is_wrong else ""
        yield Check("folders", "", "fail" if is_wrong else "ok", found, hint)
    else:
        most = max(writable.values(), key=len)
        for host in (host for host in writable if host not in most):
            found = f"{name} {path} is not the one of {', '.join(most)}"
            hint = f"mount on {host} what {most[0]} has there"
            yield Check("folders", host, "ok" if node_local is None else "fail", found, hint)


def file_checks(here: messages.HostDetails, hosts: Mapping[str, messages.HostDetails]) -> Iterator[Check]:
    """Model folder and data files of each host, compared with those of the machine that runs `doctor`."""
    for path, mine in here.files.items():
        absent = [host for host, details in hosts.items() if details.files.get(path) is None]
        other = [host for host, details in hosts.items() if host not in absent and details.files[path] != mine]
        for host in absent if mine is not None else ():
            hint = "copy it to the same path, or use a folder that all hosts share"
            yield Check("files", host, "fail", f"{path} does not exist there", hint)
        for host in other if mine is not None else ():
            hint = "copy it again, or use a folder that all hosts share"
            yield Check("files", host, "fail", f"{path} differs from the one here (names or sizes)", hint)
        if not absent and not other and len(hosts) > 1:
            yield Check("files", "", "ok", f"{path} is the same on all hosts")


def disk_checks(hosts: Mapping[str, messages.HostDetails], output: str, needed: Mapping[str, int]) -> Iterator[Check]:
    """Check that each host may write to `output` and has the space; `needed` has bytes by host."""
    for host, details in hosts.items():
        folder, size = details.folders[output], needed.get(host, 0)
        room = folder.free_bytes + folder.held_bytes
        found = f"{output} needs {size / GIB:,.2f} GiB at most, {room / GIB:,.1f} GiB free"
        if not folder.is_writable:
            found = f"{output} cannot be written in {folder.existing}"
            yield Check("disk", host, "fail", found, "change the permissions, or name another output_dir")
        elif size > room:
            hint = "free some space, name another output_dir, or lower checkpoint.keep"
            yield Check("disk", host, "fail", found, hint)
        else:
            yield Check("disk", host, "ok", found)


def network_checks(hosts: Sequence[str], replies: Sequence[messages.ChildReply]) -> list[Check]:
    """Checks from the replies of all ranks; `hosts` has the host of each rank."""
    at_fault = _hosts_at_fault(hosts, replies)
    if at_fault:
        return [Check("network", host, "fail", found, _UNREACHED) for host, found in at_fault.items()]
    results = [reply for reply in replies if isinstance(reply, messages.NetworkResult)]
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


def _hosts_at_fault(hosts: Sequence[str], replies: Sequence[messages.ChildReply]) -> dict[str, str]:
    at_fault: dict[str, str] = {}
    problems: dict[str, str] = {}
    for host, reply in zip(hosts, replies, strict=True):
        if not isinstance(reply, messages.NetworkResult):
            continue
        for rank in reply.missing:
            at_fault.setdefault(hosts[rank], f"did not join the ranks at {hosts[0]} within {messages.JOIN_SECONDS} s")
        for rank in reply.wrong:
            at_fault.setdefault(hosts[rank], f"sent wrong values, received by {host}")
        if reply.problem:
            problems.setdefault(host, reply.problem)
    for host, reply in zip(hosts, replies, strict=True):
        if isinstance(reply, messages.RequestRefused):
            at_fault[host] = reply.message
        elif isinstance(reply, messages.ChildLost) and reply.code is None:
            problems.setdefault(host, "did not answer in time")
        elif isinstance(reply, messages.ChildLost):
            last = (reply.stderr.splitlines() or ["no output"])[-1]
            at_fault[host] = f"ended with exit code {reply.code}: {last}"
    # Other hosts' errors are consequences of a missing host; where that host reported an error, it is the cause.
    named = {host: problems.get(host, text) for host, text in at_fault.items()}
    return named or problems


def _state(rate: float, usual: float) -> State:
    return "fail" if rate * _BROKEN_FACTOR < usual else "warn" if rate * _SLOW_FACTOR < usual else "ok"


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"
