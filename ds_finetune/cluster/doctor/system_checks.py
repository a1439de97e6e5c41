"""Checks of clocks, limits, GPUs, memory and name lookup: pure functions of what the hosts answered."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from ds_finetune.cluster.doctor.host_details import HostDetails
from ds_finetune.cluster.hosts.check_result import Check, State
from ds_finetune.config.hostfile import Host
from ds_finetune.config.units import GIB, MIB

_CLOCK_WARN_SECONDS = 1.0
_CLOCK_FAIL_SECONDS = 60.0
_BASE_FILES, _FILES_PER_RANK = 1024, 8
_MEMORY_MARGIN = 0.8
_UNLIMITED = -1
_LOOPBACK = ("127.", "::1")


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


def limit_checks(hosts: Mapping[str, HostDetails], *, world_size: int, locks_memory: bool) -> Iterator[Check]:
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


def infiniband_checks(hosts: Mapping[str, HostDetails]) -> Iterator[Check]:
    """Hosts with InfiniBand and without the library by which NCCL uses it, as in many containers."""
    for host, details in hosts.items():
        if details.has_infiniband and not details.has_ibverbs:
            found = "there are InfiniBand devices, but no libibverbs.so.1: NCCL uses sockets"
            yield Check("network", host, "warn", found, "install libibverbs1 and ibverbs-providers")


def gpu_checks(hosts: Mapping[str, HostDetails]) -> Iterator[Check]:
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
    for a, b in combinations(hosts, 2):
        shared = {gpu.uuid for gpu in hosts[a].gpu_memory} & {gpu.uuid for gpu in hosts[b].gpu_memory}
        if shared and hosts[a].network_identity != hosts[b].network_identity:
            yield Check("gpus", b, "fail", f"the same GPUs as {a}", "give each container GPUs of its own")


def name_checks(first: str, hosts: Mapping[str, HostDetails]) -> Iterator[Check]:
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
    hostfile_hosts: Mapping[str, Host], hosts: Mapping[str, HostDetails], *, rank_bytes: int, gpu_bytes: int
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
