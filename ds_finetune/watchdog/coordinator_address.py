"""On which address rank zero listens for the other ranks."""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from ds_finetune.world import World

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def coordinator_address(world: World, environ: Mapping[str, str]) -> str:
    """The address at which the other ranks reach rank zero; empty where that cannot be told, and all have to do.

    The loopback where all ranks are on this machine; else that of the interface which GLOO_SOCKET_IFNAME or
    NCCL_SOCKET_IFNAME names; else the one that MASTER_ADDR leads to here, unless that is a name for the loopback,
    as in many files of hosts.
    """
    if world.local_world_size == world.world_size:
        return "127.0.0.1"
    for variable in _INTERFACES:
        # NCCL's may begin with `^` (not these) or `=` (exactly these).
        for name in environ.get(variable, "").removeprefix("=").split(","):
            if found := _address_of_interface(name):
                return found
    return _own_address(world.master_addr)


def _address_of_interface(name: str) -> str:
    found = [
        each.address for each in psutil.net_if_addrs().get(name, []) if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return next((address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_link_local), "")


def _own_address(name: str) -> str:
    """The first address of `name` that is this machine's."""
    try:
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return ""
    for address in addresses:
        # A name that is the loopback here may be this machine's address on the others; a literal address is the same on
        # each.
        is_usable = address == name or not ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if is_usable and _is_ours(address):
            return address
    return ""


def _is_ours(address: str) -> bool:
    """Only a machine's own addresses can be bound to."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True
