"""What is wrong on which host, from what hosts say of themselves, before anything is started on any."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ds_finetune.hostfile import Host
from ds_finetune.launch.messages import Message
from ds_finetune.launch.remote import address_of, is_here

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong on one host."""

    host: Host
    text: str


def problems_of(greetings: Mapping[Host, Message | str], env: Mapping[str, str]) -> list[Problem]:
    """Everything that keeps these hosts from running together with these environment variables."""
    found = [Problem(host, said) for host, said in greetings.items() if isinstance(said, str)]
    answered = {host: said for host, said in greetings.items() if not isinstance(said, str)}
    return found + _versions(answered) + _twice(answered) + _devices(answered, env) + _interfaces(answered, env)


def uses_gpus(answered: Mapping[Host, Message], env: Mapping[str, str]) -> bool:
    """Whether ranks take GPUs, as engine/default_group.py chooses: where they are and DS_ACCELERATOR does not say
    otherwise.
    """
    return env.get("DS_ACCELERATOR", "cuda") == "cuda" and any(said["devices"] for said in answered.values())


def meeting_place(hosts: Sequence[Host], answered: Mapping[Host, Message]) -> str:
    """The address of the first host at which the others find it; empty where it has none that they could."""
    first, said = hosts[0], answered[hosts[0]]
    if len(hosts) == 1:
        return "127.0.0.1"
    # Where the first host is this machine, the others know the address from which they were asked.
    seen = [address for host in hosts[1:] if is_here(first) for address in answered[host]["asked_from"]]
    candidates = [address_of(first), *said["reached_at"], *seen, *chain.from_iterable(said["interfaces"].values())]
    return next((address for address in candidates if _is_for_others(address)), "")


def _is_for_others(address: str) -> bool:
    if not address:
        return False
    found = ipaddress.ip_address(address.split("%")[0])
    return not found.is_loopback and not found.is_link_local


def _versions(answered: Mapping[Host, Message]) -> list[Problem]:
    found = []
    for package in dict.fromkeys(name for said in answered.values() for name in said["versions"]):
        by_host = {host: said["versions"].get(package, "not installed") for host, said in answered.items()}
        usual = max(by_host.values(), key=list(by_host.values()).count)
        others = [host.name for host, version in by_host.items() if version == usual]
        found += [
            Problem(host, f"{package} is {version}, on {others[0]} it is {usual}")
            for host, version in by_host.items()
            if version != usual
        ]
    return found


def _twice(answered: Mapping[Host, Message]) -> list[Problem]:
    seen: dict[str, Host] = {}
    found = []
    for host, said in answered.items():
        same = seen.setdefault(said["machine"], host)
        if same is not host:
            found.append(
                Problem(host, f"is the machine that line {same.line} names `{same.name}` ({said['hostname']})")
            )
    return found


def _devices(answered: Mapping[Host, Message], env: Mapping[str, str]) -> list[Problem]:
    if not uses_gpus(answered, env):
        return []
    wanted = {host: max(host.devices, default=host.slots - 1) + 1 for host in answered}
    return [
        Problem(host, f"has {said['devices']} GPUs, the hostfile wants {wanted[host]}")
        for host, said in answered.items()
        if said["devices"] < wanted[host]
    ]


def _interfaces(answered: Mapping[Host, Message], env: Mapping[str, str]) -> list[Problem]:
    """Names that variables give; NCCL's may begin with `^` (not these) or `=`, and are prefixes else."""
    found = []
    for variable in (name for name in _INTERFACES if env.get(name) and not env[name].startswith("^")):
        names = env[variable].removeprefix("=").split(",")
        for host, said in answered.items():
            if not any(known.startswith(name) for name in names for known in said["interfaces"]):
                found.append(
                    Problem(host, f"{variable} is {env[variable]}; its interfaces are {', '.join(said['interfaces'])}")
                )
    return found
