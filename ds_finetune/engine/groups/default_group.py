"""The default process group: ranks rendezvous, check their devices, and open the group for torch and DeepSpeed."""

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ds_finetune.console.phase_line import write_now
from ds_finetune.engine.devices import deepspeed_local_rank, visible_device
from ds_finetune.engine.patches.deepspeed_init import forget_groups, without_shared_memory_op
from ds_finetune.errors import ConfigError, LaunchError, RunError
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


@dataclass(frozen=True)
class JoinedRanks:
    """The ranks of a run, which exchange texts through a store without a process group. All methods are collective."""

    world: World
    store: dist.Store
    wait: Callable[[], object] = lambda: None
    """Waits, without a limit, until every rank is ready for the same exchange."""

    def exchange(self, topic: str, text: str, *, timeout: timedelta = COLLECTIVE_TIMEOUT) -> list[str]:
        """Give `text` to all ranks. Returns the texts by rank. RunError if a text is missing `timeout` after all ranks
        were ready.
        """
        self.wait()
        keys = [f"{topic}/{rank}" for rank in range(self.world.world_size)]
        self.store.set(keys[self.world.rank], text)
        try:
            self.store.wait(keys, timeout)
        except (dist.DistError, RuntimeError):
            missing = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
            raise RunError(
                f"rank {self.world.rank} has waited {timeout} for the {topic} of ranks {', '.join(missing)}",
                hint="see the logs of these ranks: they have failed, or are slower than this rank",
            ) from None
        return [self.store.get(key).decode() for key in keys]

    def check_same(self, topic: str, own: Mapping[str, tuple[str, str]], *, hint: str) -> None:
        """Raise ConfigError if a value differs between ranks. `own` maps names to this rank's value and its reason."""
        ranks = [json.loads(text) for text in self.exchange(topic, json.dumps([socket.gethostname(), own]))]
        for rank, (_, of_rank) in enumerate(ranks):
            for name in ranks[0][1] | of_rank:
                compared = {number: (ranks[number][0], *ranks[number][1].get(name, ("", ""))) for number in (0, rank)}
                if compared[0][1] != compared[rank][1]:
                    texts = [
                        f"{value or 'absent'}{reason and f' ({reason})'} on rank {number} ({host})"
                        for number, (host, value, reason) in compared.items()
                    ]
                    raise ConfigError(f"ranks differ in {name}: {' and '.join(texts)}", hint=hint)


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
    check_same_devices(JoinedRanks(world, rendezvous).exchange("device", own_device(world, device), timeout=timeout))
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


def own_device(world: World, device: str) -> str:
    """Describe this process's device type, GPU and host as JSON, for `check_same_devices`."""
    gpu = str(torch.cuda.get_device_properties(visible_device(world.local_rank)).uuid) if device == "cuda" else ""
    return json.dumps({"device": device, "gpu": gpu, "host": socket.gethostname()})


def check_same_devices(texts: list[str]) -> None:
    """Raise LaunchError if ranks use different device types or share a GPU, by the `own_device` texts of all ranks."""
    ranks = [json.loads(text) for text in texts]
    first = ranks[0]
    for rank, info in enumerate(ranks):
        if info["device"] != first["device"]:
            raise LaunchError(
                f"rank 0 on {first['host']} uses {first['device']} and rank {rank} on {info['host']} uses "
                f"{info['device']}",
                hint="check nvidia-smi on the host that uses cpu, leave that host out, or set DS_ACCELERATOR=cpu",
            )
        same = next((earlier for earlier in range(rank) if info["gpu"] and ranks[earlier]["gpu"] == info["gpu"]), None)
        if same is not None:
            raise LaunchError(
                f"ranks {same} and {rank} on {info['host']} use the same GPU {info['gpu']}",
                hint="start as many ranks as the host has GPUs, or set CUDA_VISIBLE_DEVICES to another GPU for each",
            )
