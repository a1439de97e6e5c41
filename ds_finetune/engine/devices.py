"""Chooses this process's accelerator, and checks that all ranks use the same kind and no two ranks the same GPU."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ds_finetune.errors import ConfigError, LaunchError, RunError
from ds_finetune.system.world import World

_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that hide every GPU."""


def present_gpus(devices: Path = Path("/dev")) -> int:
    """Number of GPUs in `devices`; 0 where CUDA_VISIBLE_DEVICES hides all of them on purpose."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return 0
    return len(list(devices.glob("nvidia[0-9]*")))


def why_no_gpu() -> str:
    """CUDA's own reason why torch can use no GPU."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as why:
        return str(why).splitlines()[0]
    return "none is visible"


def visible_device(local_rank: int) -> int:
    """Number of a local rank's GPU among those visible to this process; 0 where a scheduler shows each process only its
    own GPU.
    """
    count = torch.cuda.device_count()
    if local_rank >= count > 1:
        raise LaunchError(
            f"local rank {local_rank} sees {count} GPUs",
            hint=f"start {count} ranks on this host, or show each rank its own GPU alone",
        )
    return local_rank if local_rank < count else 0


def device_of_rank(device: str, local_rank: int) -> str:
    """The device `cpu` or `cuda` of a local rank, with the number of its GPU, as torch names it."""
    return device if device == "cpu" else f"cuda:{visible_device(local_rank)}"


def choose_device() -> str:
    """`cuda` where a GPU can be used and `DS_ACCELERATOR` is not `cpu`, else `cpu`; the variable is set to the
    choice for DeepSpeed.

    ConfigError where `DS_ACCELERATOR` names an accelerator that cannot be used, and where it is not set and this
    machine has GPUs that torch cannot use.
    """
    wanted = os.environ.get("DS_ACCELERATOR") or None
    if wanted not in (None, "cpu", "cuda"):
        raise ConfigError(f"DS_ACCELERATOR is `{wanted}`", hint="set it to cuda or cpu, or unset it")
    usable = torch.cuda.is_available()
    if wanted == "cuda" and not usable:
        raise ConfigError(
            f"DS_ACCELERATOR is cuda, and torch {torch.__version__} can use no GPU on {socket.gethostname()}: "
            f"{why_no_gpu()}",
            hint="install a driver and a torch that fit each other (docs/how-to/install.md), or set DS_ACCELERATOR=cpu",
        )
    if wanted is None and not usable and (present := present_gpus()):
        raise ConfigError(
            f"{socket.gethostname()} has {present} NVIDIA GPUs, and torch {torch.__version__} can use none: "
            f"{why_no_gpu()}",
            hint="install a driver and a torch that fit each other (docs/how-to/install.md), or set DS_ACCELERATOR=cpu",
        )
    device = "cuda" if usable and wanted != "cpu" else "cpu"
    os.environ["DS_ACCELERATOR"] = device
    return device


@contextmanager
def deepspeed_local_rank(index: int) -> Iterator[None]:
    """While this is open, the variables that DeepSpeed reads as its local rank are `index`.

    DeepSpeed takes the local rank for the number of its GPU (0.19.8, runtime/engine.py:1941-1966).
    """
    names = [name for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK") if name in os.environ]
    kept = {name: os.environ[name] for name in names}
    os.environ.update(dict.fromkeys(names, str(index)))
    try:
        yield
    finally:
        os.environ.update(kept)


def exchange(store: dist.Store, world: World, topic: str, mine: str, *, timeout: timedelta) -> list[str]:
    """The text of every rank about `topic`, by rank, before there is a process group; RunError after `timeout`."""
    keys = [f"{topic}/{rank}" for rank in range(world.world_size)]
    store.set(keys[world.rank], mine)
    try:
        store.wait(keys, timeout)
    except (dist.DistError, RuntimeError):
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise RunError(
            f"rank {world.rank} has waited {timeout} for the {topic} of ranks {', '.join(missing)}",
            hint="another rank failed before, or is slower than watchdog.collective",
        ) from None
    return [store.get(key).decode() for key in keys]


def own_device(world: World, device: str) -> str:
    """Kind, GPU and host of this process as JSON, for `check_same_devices`."""
    gpu = str(torch.cuda.get_device_properties(visible_device(world.local_rank)).uuid) if device == "cuda" else ""
    return json.dumps({"device": device, "gpu": gpu, "host": socket.gethostname()})


def check_same_devices(found: list[str]) -> None:
    """LaunchError where ranks use different accelerators or two of them one GPU; `found` has their `own_device` by
    rank.
    """
    ranks = [json.loads(text) for text in found]
    first = ranks[0]
    for rank, one in enumerate(ranks):
        if one["device"] != first["device"]:
            raise LaunchError(
                f"rank 0 on {first['host']} uses {first['device']} and rank {rank} on {one['host']} uses "
                f"{one['device']}",
                hint="see nvidia-smi on the host without a GPU, leave that host out, or set DS_ACCELERATOR=cpu on all",
            )
        same = next((other for other in range(rank) if one["gpu"] and ranks[other]["gpu"] == one["gpu"]), None)
        if same is not None:
            raise LaunchError(
                f"ranks {same} and {rank} on {one['host']} use the same GPU {one['gpu']}",
                hint="start as many ranks on a host as it has GPUs, or show each rank a GPU of its own",
            )
