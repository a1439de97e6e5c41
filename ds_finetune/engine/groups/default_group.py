"""The default process group: ranks rendezvous, check their devices, and open the group for torch and DeepSpeed."""

import gc
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ds_finetune.console.phase_line import write_now
from ds_finetune.engine.devices import check_same_devices, deepspeed_local_rank, exchange, own_device, visible_device
from ds_finetune.engine.patches.deepspeed_init import forget_groups, without_shared_memory_op
from ds_finetune.errors import ConfigError, RunError
from ds_finetune.foreign.torch_distributed import abort_groups, default_timeout
from ds_finetune.system.world import World

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Default timeout of collectives, and of the rendezvous before there is a process group."""

REPORT_AFTER, _PAUSE = 20, 0.1
"""Seconds after which a waiting rank reports which ranks are missing, and seconds between two checks for them."""


def meet(world: World, *, timeout: timedelta = COLLECTIVE_TIMEOUT) -> dist.Store:
    """Wait until all ranks of `world` have connected, and return the store that they share. RunError after `timeout`,
    and on rank zero if the port is in use. torch's own rendezvous would use the timeout of collectives (torch 2.13,
    distributed_c10d.py:1893), which may be far shorter. Successive runs of a process share one store, in
    which each run has a prefix.
    """
    world.set_environment(os.environ)
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    wait = _RankWait(world.rank, f"{address}:{port}", time.monotonic(), timeout)
    try:
        store = _store_at(address, port, world.rank, world.world_size, wait)
        store = dist.PrefixStore(f"run {store.add(f'runs of rank {world.rank}', 1)}", store)
        store.set(f"met/{world.rank}", "")
        if store.add("met", 1) == world.world_size:
            store.set("met/all", "")
        while not store.check(["met/all"]):
            wait.pause(partial(_absent, store, world.world_size))
    except (dist.DistError, RuntimeError) as failure:
        if "EADDRINUSE" not in str(failure):
            raise wait.error(str(failure)) from None
        raise RunError(
            f"the ranks cannot connect to port {port} of this host, which is in use",
            hint="another run may use it: choose a free port with `deepspeed --master_port PORT`, or with the option "
            "of your launcher",
        ) from None
    return store


def _absent(store: dist.Store, world_size: int) -> str:
    missing = [str(rank) for rank in range(world_size) if not store.check([f"met/{rank}"])]
    return f"ranks {', '.join(missing)} have not connected"


@dataclass
class _RankWait:
    rank: int
    address: str
    began: float
    timeout: timedelta
    is_reported: bool = False

    def pause(self, reason: Callable[[], str]) -> None:
        seconds = time.monotonic() - self.began
        if seconds > self.timeout.total_seconds():
            raise self.error(reason())
        if seconds > REPORT_AFTER and not self.is_reported:
            write_now(sys.stderr, f"rank {self.rank} waits for the other ranks at {self.address}: {reason()}\n")
            self.is_reported = True
        time.sleep(_PAUSE)

    def error(self, reason: str) -> RunError:
        return RunError(
            f"rank {self.rank} has not reached the other ranks at {self.address} within {self.timeout}: {reason}",
            hint="see the logs of the other ranks for an earlier failure, check that the address is rank 0's, or raise "
            "watchdog.meet if other ranks start later",
        )


_STORES: dict[tuple[str, str, int, int], dist.Store] = {}


def _store_at(address: str, port: str, rank: int, world_size: int, wait: _RankWait) -> dist.Store:
    """The store of all ranks. It is served by torchrun's agent, or by rank 0 until its process ends. A rank may begin
    its next run before rank 0 has ended the previous one. All waiting happens here, because waiting inside torch would
    not react to Ctrl-C.
    """
    key = address, port, rank, world_size
    if key not in _STORES and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _STORES[key], _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=wait.timeout))
    if key not in _STORES:
        while rank and (refused := _refused(address, int(port))):
            wait.pause(partial("rank 0 does not answer: {}".format, refused))
        _STORES[key] = dist.TCPStore(
            address, int(port), world_size, rank == 0, wait.timeout, wait_for_workers=False, multi_tenant=True
        )
    return _STORES[key]


def _refused(address: str, port: int) -> str:
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError as refused:
        return str(refused)
    return ""


@contextmanager
def process_group(
    world: World, device: str, store: dist.Store | None = None, *, timeout: timedelta = COLLECTIVE_TIMEOUT
) -> Iterator[None]:
    """Context with the default process group of `world` (NCCL on GPUs, else gloo), opened with the `store` of the
    rendezvous.

    LaunchError on every rank, before the group opens, if ranks use different accelerators or share a GPU; ConfigError
    if this process has already used another accelerator than `device`. No engine may be referenced when the group
    closes: a reference keeps the group's threads alive, and a thread that releases its last tensor while Python exits
    aborts the process ("terminate called without an active exception", exit code -6).
    """
    import deepspeed

    _check_accelerator(device)
    world.set_environment(os.environ)
    index = visible_device(world.local_rank) if device == "cuda" else world.local_rank
    if device == "cuda":
        torch.cuda.set_device(index)
    backend = "nccl" if device == "cuda" else "gloo"
    # The group is bound to its device, as DeepSpeed 0.19.8 does when it opens the group itself (comm/torch.py:262-276).
    bound = torch.device("cuda", index) if device == "cuda" and world.world_size > 1 else None
    rendezvous = store or meet(world)
    check_same_devices(exchange(rendezvous, world, "device", own_device(world, device), timeout=timeout))
    group_store = dist.PrefixStore("default_pg", rendezvous)
    with default_timeout(timeout):
        dist.init_process_group(
            backend, store=group_store, rank=world.rank, world_size=world.world_size, timeout=timeout, device_id=bound
        )
        with without_shared_memory_op():
            deepspeed.init_distributed(backend, auto_mpi_discovery=False, timeout=timeout, verbose=False)
        try:
            with deepspeed_local_rank(index):
                yield
        except BaseException:
            # After an error, other ranks may never answer, and releasing DeepSpeed's groups may wait for them, so the
            # groups are aborted. A single rank waits for nobody, and its process may start another run.
            if world.world_size > 1 and dist.get_backend() == "nccl":
                abort_groups()
                raise
            dist.destroy_process_group()
            if world.world_size == 1:
                forget_groups()
            raise
    dist.destroy_process_group()
    forget_groups()
    gc.collect()


def _check_accelerator(device: str) -> None:
    """Raise ConfigError if DeepSpeed has chosen another accelerator than `device`. DeepSpeed 0.19.8 chooses one per
    process (accelerator/real_accelerator.py:53).
    """
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    if chosen != device:
        raise ConfigError(
            f"this process uses {device}, but DeepSpeed has already used {chosen} in it (DS_ACCELERATOR has changed)",
            hint="restart the process; in a notebook restart the kernel",
        )
