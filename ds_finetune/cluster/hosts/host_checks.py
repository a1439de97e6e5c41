"""The checks of hosts that `launch` runs before it starts ranks and `doctor` reports: pure functions of host facts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from ds_finetune.cluster.hosts.check_result import Check, State
from ds_finetune.config.hostfile import Host
from ds_finetune.system.info import PACKAGES, HostInfo


def host_checks(
    hosts: Mapping[str, Host],
    infos: Mapping[str, HostInfo],
    *,
    here: HostInfo,
    environ: Mapping[str, str],
    addresses: Mapping[str, str],
) -> list[Check]:
    """Every check that `launch` and `doctor` share.

    `infos` has the facts of the hosts that answered, `here` those of the machine that runs `launch` or `doctor`.
    `environ` has the variables that ranks get, and `addresses` the address that each host's name resolves to here.
    """
    return [
        *version_checks(here, infos),
        *identity_checks(hosts, infos, addresses=addresses),
        *device_checks(hosts, infos, device=rank_device(infos, environ)),
        *interface_checks(infos, environ),
    ]


def rank_device(infos: Mapping[str, HostInfo], environ: Mapping[str, str]) -> str:
    """`cuda` where hosts have GPUs and DS_ACCELERATOR is cuda or unset, else `cpu` (as in
    engine/groups/default_group.py).
    """
    has_gpus = any(info.gpus for info in infos.values())
    return "cuda" if has_gpus and environ.get("DS_ACCELERATOR", "cuda") == "cuda" else "cpu"


def version_checks(here: HostInfo, infos: Mapping[str, HostInfo]) -> Iterator[Check]:
    """Python, packages, this program and CUDA of each host, compared with `here`; drivers compared between hosts."""
    for host, info in infos.items():
        other = {
            name: (mine, info.versions.get(name, ""))
            for name, mine in here.versions.items()
            if info.versions.get(name, "") != mine
        }
        other.pop("driver", None)
        hard = {name: pair for name, pair in other.items() if name != "python" or _minor(pair[0]) != _minor(pair[1])}
        if not other:
            same = [f"{name} {info.versions[name]}" for name in ("python", *PACKAGES) if info.versions.get(name)]
            yield Check("versions", host, "ok", ", ".join(same))
            continue
        differences = ", ".join(
            f"{name} {theirs or 'missing'} (here {mine or 'missing'})" for name, (mine, theirs) in other.items()
        )
        hint = "install the same versions on every host"
        yield Check("versions", host, "fail" if hard else "warn", differences, hint)
    drivers = {info.versions.get("driver", "") for info in infos.values()}
    if len(drivers) > 1:
        names = ", ".join(sorted(driver or "none" for driver in drivers))
        yield Check("driver", "", "warn", f"NVIDIA drivers {names}", "install one driver version on all hosts")


def identity_checks(
    hosts: Mapping[str, Host], infos: Mapping[str, HostInfo], *, addresses: Mapping[str, str]
) -> Iterator[Check]:
    """Report two hostfile lines that name one address or one machine.

    Containers of one machine share its address and differ in the ports of their sshd.
    """
    for a, b in combinations(hosts, 2):
        hint = "write each host once, with all its slots in one line"
        if addresses[a] and (addresses[a], hosts[a].port) == (addresses[b], hosts[b].port):
            yield Check("address", b, "fail", f"the same address as {a}: {addresses[a]}", hint)
        elif a in infos and b in infos and infos[a].network_identity == infos[b].network_identity:
            yield Check("address", b, "fail", f"the same machine as {a}: {infos[a].hostname}", hint)


def device_checks(hosts: Mapping[str, Host], infos: Mapping[str, HostInfo], *, device: str) -> Iterator[Check]:
    """Slots of each host compared with its GPUs, or with its cores where ranks run on CPUs."""
    for name, info in infos.items():
        host = hosts[name]
        count = len(info.gpus) if device == "cuda" else info.cores
        models = ", ".join(sorted(set(info.gpus))) or "GPUs"
        found = f"slots={host.slots}, {count} {models if device == 'cuda' else 'CPU cores'}"
        if max(host.devices, default=host.slots - 1) < count:
            yield Check("devices", name, "ok", found)
        elif device == "cpu":
            yield Check("devices", name, "warn", found, "ranks will share cores")
        else:
            chosen = f", devices {','.join(map(str, host.devices))} chosen" if host.devices else ""
            hint = (
                f"write slots={count}, or find the missing GPUs" if count else "exclude the host, or install the driver"
            )
            yield Check("devices", name, "fail", found + chosen, hint)


def interface_checks(infos: Mapping[str, HostInfo], environ: Mapping[str, str]) -> Iterator[Check]:
    """Check that the interfaces exist that GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name.

    Gloo takes exact names. NCCL takes prefixes, exact names after `=`, and with `^` every interface but those.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        for host, info in infos.items() if value else ():
            known = [name for name, addresses in info.interfaces.items() if addresses]
            absent = (
                [name for name in value.split(",") if name not in known]
                if variable.startswith("GLOO")
                else _unmatched_by_nccl(value, known)
            )
            state: State = "fail" if absent else "ok"
            found = f"{variable} {value}"
            if absent:
                found += f": no interface `{', '.join(absent)}` that is up and has an address"
            hint = f"set {variable} to one of {', '.join(known)}, or unset it" if absent else ""
            yield Check("interface", host, state, found, hint)


def port_check(first: str, info: HostInfo, port: int) -> Check:
    """Check that `port` of the first host, at which rank 0 listens for the other ranks, is free."""
    if info.port_holder is None:
        return Check("port", first, "ok", f"port {port} is free")
    found = f"port {port} is taken: {info.port_holder}"
    return Check("port", first, "fail", found, "end that process, or choose another port with --port")


def _minor(text: str) -> list[str]:
    return text.split(".")[:2]


def _unmatched_by_nccl(value: str, known: Sequence[str]) -> list[str]:
    """NCCL 2.27, misc/socket.cc (parseStringList, matchIfList): one match is enough."""
    is_excluded, names = value.startswith("^"), value.removeprefix("^").removeprefix("=").split(",")
    is_exact = value.removeprefix("^").startswith("=")
    is_named = [any(k == name if is_exact else k.startswith(name) for name in names) for k in known]
    if is_excluded:
        return [] if not all(is_named) else [value]
    return [] if any(is_named) else names
