"""From what hosts answered to what is right and wrong with them: pure functions, one for each question."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from ds_finetune.doctor.facts import PACKAGES, Facts
from ds_finetune.hostfile import Host
from ds_finetune.units import GIB, MIB

State = Literal["ok", "warn", "fail"]
_CLOCK_SECONDS = 1.0
_CLOCK_WRONG_SECONDS = 60.0
_FEW_FILES, _FILES_OF_A_RANK = 1024, 8
_SHM_BYTES = GIB
_MEMORY_MARGIN = 0.8
_SSH_FAILED = 255
_NO_COMMAND = (126, 127)
_UNLIMITED = -1
_LOOPBACK = ("127.", "::1")


@dataclass(frozen=True)
class Check:
    """What was asked, of which host (empty for all of them together), how it is, what was found, and what mends it."""

    name: str
    host: str
    state: State
    found: str
    hint: str = ""


@dataclass(frozen=True)
class ClockOffset:
    """How far a host's clock is ahead of ours, and how long question and answer took, in seconds."""

    ahead: float
    round_trip: float


def label(host: Host) -> str:
    """How a host is called in a report: its name, and the port where its line has one."""
    return f"{host.name}:{host.port}" if host.port else host.name


def why_lost(host: str, code: int | None, said: str, python: str) -> Check:
    """Why a program on `host` could not be started with `python`, from ssh's own exit code and words (OpenSSH 9, ssh.c
    and sshconnect.c).
    """
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
    if code is None:
        return Check(
            "ssh",
            host,
            "fail",
            f"no answer in time; last words: {last}",
            "look at the host: it may be overloaded, or its disk hang",
        )
    if code != _SSH_FAILED:
        return _why_not_started(host, code, last, python)
    for pattern, what, hint in (
        (
            "IDENTIFICATION HAS CHANGED",
            "its host key is another than before",
            f"if the host was installed anew: ssh-keygen -R {host}; else find out why",
        ),
        (
            "Host key verification failed",
            "its host key is not known here",
            f"connect once by hand and compare: ssh {host}",
        ),
        (
            "Permission denied",
            f"it does not take our key: {last}",
            f"ssh-copy-id {host}, or name key and user in ssh_config or --ssh-args",
        ),
        ("Could not resolve", "its name leads to no address", "correct the hostfile, or the name service"),
        ("refused", "nothing listens for ssh there", "start sshd, or give its port as host:port in the hostfile"),
        (
            "timed out|No route to host|unreachable|not responding",
            f"it does not answer: {last}",
            "switch it on, look at cable and firewall, or leave it out with --exclude",
        ),
    ):
        if re.search(pattern, said):
            return Check("ssh", host, "fail", what, hint)
    return Check("ssh", host, "fail", f"ssh ended: {last}", f"try it by hand: ssh {host} true")


def _why_not_started(host: str, code: int, last: str, python: str) -> Check:
    if code in _NO_COMMAND:
        return Check(
            "python",
            host,
            "fail",
            f"no Python at {python}: {last}",
            "install the same environment at the same path on every host",
        )
    if "can't cd to" in last or "cd:" in last:
        return Check(
            "python",
            host,
            "fail",
            f"the working folder is not there: {last}",
            "start where every host has the program, at the same path",
        )
    if "No module named" in last:
        return Check("python", host, "fail", last, "install the same environment at the same path on every host")
    return Check(
        "python", host, "fail", f"exit code {code}: {last}", f"try `{python} -m ds_finetune --help` on the host"
    )


def version_checks(here: Facts, there: Mapping[str, Facts]) -> Iterator[Check]:
    """Python, packages, this program and CUDA, host by host, beside the machine that asks; drivers beside each
    other.
    """
    for host, facts in there.items():
        other = {
            name: (mine, facts.versions.get(name, ""))
            for name, mine in here.versions.items()
            if facts.versions.get(name, "") != mine
        }
        other.pop("driver", None)
        hard = {name: pair for name, pair in other.items() if name != "python" or _minor(pair[0]) != _minor(pair[1])}
        if not other:
            yield Check(
                "versions",
                host,
                "ok",
                ", ".join(f"{name} {facts.versions[name]}" for name in ("python", *PACKAGES) if facts.versions[name]),
            )
            continue
        found = ", ".join(
            f"{name} {theirs or 'not there'} (here {mine or 'not there'})" for name, (mine, theirs) in other.items()
        )
        yield Check("versions", host, "fail" if hard else "warn", found, "install the same versions on every host")
    drivers = {facts.versions.get("driver", "") for facts in there.values()}
    if len(drivers) > 1:
        yield Check(
            "driver",
            "",
            "warn",
            f"NVIDIA drivers {', '.join(sorted(d or 'none' for d in drivers))}",
            "bring all hosts to one driver",
        )


def _minor(text: str) -> list[str]:
    return text.split(".")[:2]


def identity_checks(addresses: Mapping[str, str], there: Mapping[str, Facts]) -> Iterator[Check]:
    """Two lines of the hostfile that lead to one address, one machine or one GPU."""
    for a, b in combinations(addresses, 2):
        hint = "write each host once, with all its slots in one line"
        if addresses[a] and addresses[a] == addresses[b]:
            yield Check("address", b, "fail", f"the same address as {a}: {addresses[a]}", hint)
        elif a in there and b in there and there[a].machine == there[b].machine:
            yield Check("address", b, "fail", f"the same machine as {a}: {there[a].hostname}", hint)
        elif a in there and b in there and {g.uuid for g in there[a].gpus} & {g.uuid for g in there[b].gpus}:
            yield Check("address", b, "fail", f"the same GPUs as {a}", "give each container GPUs of its own")


def device_checks(hosts: Mapping[str, Host], there: Mapping[str, Facts], device: str) -> Iterator[Check]:
    """Slots beside GPUs, or beside cores where the run is on CPUs."""
    for name, facts in there.items():
        slots, count = hosts[name].slots, len(facts.gpus) if device == "cuda" else facts.cores
        wanted = max(hosts[name].devices, default=slots - 1) + 1
        kinds = sorted({gpu.name for gpu in facts.gpus}) if device == "cuda" else ["CPU cores"]
        found = f"slots={slots}, {count} {', '.join(kinds) or 'GPUs'}"
        if wanted > count:
            hint = (
                f"write slots={count}, or find the missing GPUs"
                if count
                else "leave the host out, or install the driver"
            )
            state: State = "fail" if device == "cuda" else "warn"
            yield Check("devices", name, state, found, hint if device == "cuda" else "ranks will share cores")
            continue
        busy = [str(n) for n, gpu in enumerate(facts.gpus) if device == "cuda" and gpu.used_bytes > GIB]
        if busy:
            yield Check(
                "devices",
                name,
                "warn",
                f"{found}; GPU {', '.join(busy)} has more than 1 GiB in use",
                "see who uses it: nvidia-smi",
            )
            continue
        yield Check("devices", name, "ok", found)


def limit_checks(there: Mapping[str, Facts], *, world_size: int, locks_memory: bool) -> Iterator[Check]:
    """Open files, locked memory and /dev/shm of each host; memory is locked for InfiniBand and for NVMe offload."""
    wanted = _FEW_FILES + _FILES_OF_A_RANK * world_size
    for host, facts in there.items():
        wrong = []
        if facts.open_files != _UNLIMITED and facts.open_files < wanted:
            wrong.append(
                (f"open files {facts.open_files}", f"raise nofile to {wanted} or more in /etc/security/limits.conf")
            )
        if facts.locked_bytes != _UNLIMITED and (facts.has_infiniband or locks_memory):
            wrong.append(
                (
                    f"locked memory {facts.locked_bytes // 1024} KiB",
                    "set memlock to unlimited in /etc/security/limits.conf",
                )
            )
        if facts.shm_bytes < _SHM_BYTES:
            wrong.append(
                (f"/dev/shm {facts.shm_bytes // MIB} MiB", "give it 1 GiB or more (docker: --shm-size, or --ipc=host)")
            )
        found = (
            "; ".join(text for text, _ in wrong)
            or f"open files {facts.open_files}, /dev/shm {facts.shm_bytes / GIB:.1f} GiB"
        )
        yield Check("limits", host, "warn" if wrong else "ok", found, "; ".join(hint for _, hint in wrong))


def clock_checks(clocks: Mapping[str, ClockOffset]) -> Iterator[Check]:
    """How far clocks are apart from ours, as far as the round trip lets us know."""
    for host, clock in clocks.items():
        surely = abs(clock.ahead) - clock.round_trip / 2
        state: State = "fail" if surely > _CLOCK_WRONG_SECONDS else "warn" if surely > _CLOCK_SECONDS else "ok"
        # Adding nothing makes a zero of what was minus zero.
        found = f"{round(clock.ahead, 2) + 0.0:+.2f} s" + (
            "" if state == "ok" else f", to {clock.round_trip / 2 * 1000:.0f} ms"
        )
        yield Check(
            "clock",
            host,
            state,
            found,
            "" if state == "ok" else "start a time service (chrony, systemd-timesyncd) on every host",
        )


def port_checks(first: str, facts: Facts, port: int) -> Iterator[Check]:
    """Whether the first host's port, where all ranks meet, is free."""
    if facts.port_holder is None:
        yield Check("port", first, "ok", f"{port} is free")
    else:
        yield Check(
            "port",
            first,
            "fail",
            f"{port} is taken: {facts.port_holder}",
            "end what holds it, or give another --port (MASTER_PORT)",
        )


def interface_checks(there: Mapping[str, Facts], environ: Mapping[str, str]) -> Iterator[Check]:
    """Interfaces that GLOO_SOCKET_IFNAME (exact names) and NCCL_SOCKET_IFNAME (beginnings, `=` exact, `^` all but)
    name.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environ.get(variable, "")
        for host, facts in there.items() if value else ():
            known = [name for name, addresses in facts.interfaces.items() if addresses]
            absent = (
                [name for name in value.split(",") if name not in known]
                if variable.startswith("GLOO")
                else _unmatched(value, known)
            )
            if absent:
                hint = f"set {variable} to one of {', '.join(known)}, or unset it"
                yield Check(
                    "interface",
                    host,
                    "fail",
                    f"{variable} {value}: no `{', '.join(absent)}` that is up and has an address",
                    hint,
                )
            else:
                yield Check("interface", host, "ok", f"{variable} {value}")


def _unmatched(value: str, known: Sequence[str]) -> list[str]:
    """NCCL 2.27, misc/socket.cc (parseStringList, matchIfList): any one match will do."""
    if value.startswith("^"):
        names = value[1:].removeprefix("=").split(",")
        return (
            []
            if any(not any(k == n if value[1:2] == "=" else k.startswith(n) for n in names) for k in known)
            else [value]
        )
    names = value.removeprefix("=").split(",")
    return [] if any(k == n if value.startswith("=") else k.startswith(n) for n in names for k in known) else names


def name_checks(first: str, there: Mapping[str, Facts]) -> Iterator[Check]:
    """Whether the other hosts find the first one by its name."""
    own = (
        {address for addresses in there[first].interfaces.values() for address in addresses}
        if first in there
        else set()
    )
    for host, facts in there.items():
        if (
            host == first
            and len(there) > 1
            and facts.first
            and all(address.startswith(_LOOPBACK) for address in facts.first)
        ):
            found = f"{first} is {facts.first[0]} for itself"
            yield Check(
                "name",
                host,
                "warn",
                found,
                "take its name off the 127.* line of its /etc/hosts, or write its address into the hostfile",
            )
        if host == first:
            continue
        if not facts.first:
            yield Check(
                "name",
                host,
                "warn",
                f"{first} leads to no address there",
                f"add {first} to /etc/hosts, or write its address into the hostfile",
            )
        elif own and not own & {address for address in facts.first if not address.startswith(_LOOPBACK)}:
            hint = "correct /etc/hosts there, or write its address into the hostfile"
            yield Check(
                "name", host, "fail", f"{first} is {', '.join(facts.first)} there, which is not that host", hint
            )
        else:
            yield Check("name", host, "ok", f"{first} is {facts.first[0]}")


def folder_checks(
    name: str, path: str, seen: Mapping[str, Sequence[str]], *, node_local: bool | None = None
) -> Iterator[Check]:
    """Whether a folder is one for all hosts; `seen` has, for each host, the hosts whose mark it saw there.

    `node_local` is checkpoint.node_local where the folder must agree with it.
    """
    for host in (host for host, others in seen.items() if host not in others):
        yield Check(
            "folders",
            host,
            "fail",
            f"{name} {path} cannot be written there",
            "change the permissions, or name another folder",
        )
    homes = {host: others for host, others in seen.items() if host in others}
    if len(homes) < 2:
        return
    if all(set(others) == set(homes) for others in homes.values()):
        wrong = node_local is True
        found = f"{name} {path} is one for all hosts" + (", and checkpoint.node_local is true" if wrong else "")
        yield Check("folders", "", "warn" if wrong else "ok", found, "set checkpoint.node_local false" if wrong else "")
    elif all(list(others) == [host] for host, others in homes.items()):
        wrong = node_local is False
        found = f"{name} {path} is another on each host" + (", and checkpoint.node_local is false" if wrong else "")
        hint = "set checkpoint.node_local true, or name a folder that all hosts share" if wrong else ""
        yield Check("folders", "", "fail" if wrong else "ok", found, hint)
    else:
        most = max(homes.values(), key=len)
        for host in (host for host in homes if host not in most):
            hint = f"mount on {host} what {most[0]} has there"
            yield Check(
                "folders",
                host,
                "ok" if node_local is None else "fail",
                f"{name} {path} is not the one of {', '.join(most)}",
                hint,
            )


def file_checks(here: Facts, there: Mapping[str, Facts]) -> Iterator[Check]:
    """Model folder and data files beside those of the machine that asks."""
    for path, mine in here.files.items():
        absent = [host for host, facts in there.items() if facts.files.get(path) is None]
        other = [host for host, facts in there.items() if host not in absent and facts.files[path] != mine]
        for host in absent if mine is not None else ():
            yield Check(
                "files",
                host,
                "fail",
                f"{path} is not there",
                "copy it to the same path, or use a folder that all hosts share",
            )
        for host in other if mine is not None else ():
            yield Check(
                "files",
                host,
                "fail",
                f"{path} is another than here (names or sizes)",
                "copy it again, or use a folder that all hosts share",
            )
        if not absent and not other and len(there) > 1:
            yield Check("files", "", "ok", f"{path} is the same on all hosts")


def disk_checks(there: Mapping[str, Facts], output: str, needed: Mapping[str, int]) -> Iterator[Check]:
    """Room on each host for what it will write to `output`, and permission; bytes by host."""
    for host, facts in there.items():
        folder, wanted = facts.folders[output], needed.get(host, 0)
        room = folder.free_bytes + folder.held_bytes
        found = f"{output} needs {wanted / GIB:,.2f} GiB at most, {room / GIB:,.1f} GiB free"
        if not folder.is_writable:
            yield Check(
                "disk",
                host,
                "fail",
                f"{output} cannot be written in {folder.existing}",
                "change the permissions, or name another output_dir",
            )
        elif wanted > room:
            yield Check(
                "disk", host, "fail", found, "free some space, name another output_dir, or lower checkpoint.keep"
            )
        else:
            yield Check("disk", host, "ok", found)


def memory_checks(
    hosts: Mapping[str, Host], there: Mapping[str, Facts], *, rank_bytes: int, gpu_bytes: int
) -> Iterator[Check]:
    """Memory beside the plan: bytes that a rank keeps in its host's memory, and on its GPU; activations come on top."""
    for host, facts in there.items():
        rows = [("host", hosts[host].slots * rank_bytes, facts.memory_bytes)]
        rows += [("GPU", gpu_bytes, min(gpu.total_bytes for gpu in facts.gpus))] if facts.gpus and gpu_bytes else []
        for what, wanted, there_is in rows:
            if there_is is None:
                continue
            state: State = "fail" if wanted > there_is else "warn" if wanted > _MEMORY_MARGIN * there_is else "ok"
            found = f"{what}: state of the run {wanted / GIB:,.2f} GiB, {there_is / GIB:,.1f} GiB available"
            yield Check(
                "memory",
                host,
                state,
                found,
                "" if state == "ok" else "more hosts, a higher ZeRO stage, offload, or a smaller model",
            )
