"""The address at which rank zero listens for the other ranks."""

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from ds_finetune.system.world import World

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def coordinator_address(world: World, environ: Mapping[str, str]) -> str:
    """The address at which the other ranks reach rank zero; empty where it is unknown, to listen on all addresses.

    It is the loopback where all ranks are on this machine, else the address of the interface that
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, else the address of MASTER_ADDR. A name that resolves to the
    loopback, as in many /etc/hosts files, is not used.
    """
    if world.local_world_size == world.world_size:
        return "127.0.0.1"
    for variable in _INTERFACES:
        # NCCL's variable may begin with `^` (all but these interfaces) or `=` (exactly these names).
        for name in environ.get(variable, "").removeprefix("=").split(","):
            if address := _address_of_interface(name):
                return address
    return _own_address(world.master_addr)


def _address_of_interface(name: str) -> str:
    addresses = [
        each.address for each in psutil.net_if_addrs().get(name, []) if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    return next(
        (address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_link_local), ""
    )


def _own_address(name: str) -> str:
    """The first address of `name` that belongs to this machine."""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)]
    except OSError:
        return ""
    for address in addresses:
        # On other machines a name that resolves to the loopback here may resolve to this machine. A literal address is
        # the same everywhere.
        is_usable = address == name or not ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if is_usable and _is_local(address):
            return address
    return ""


def _is_local(address: str) -> bool:
    """Whether `address` belongs to this machine: only those can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
