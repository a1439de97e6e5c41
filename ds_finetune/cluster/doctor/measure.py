"""The program with which `ds-finetune doctor` measures the speed of all-reduces inside each host and over all ranks.

torch's elastic agent starts a process of this program for each rank. The first rank of each host prints the speeds as a
line of JSON. A rank that fails prints the reason.
"""

import json
import os
import re
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_finetune.engine.devices import device_of_rank
from ds_finetune.errors import FinetuneError
from ds_finetune.system.info import interface_towards
from ds_finetune.system.processes import die_with_parent

_TIMEOUT = timedelta(seconds=30)
"""Time limit of each collective in the measurement of the network."""
_SIZES = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Size of the measured all-reduces in bytes, by device type."""
_NUM_REPEATS = 5


def measure(host: str, device: torch.device) -> dict[str, Any] | None:
    """Measure the bus bandwidths of all-reduces inside this host and over all ranks, in bytes/s. Only the first rank of
    each host returns them; other ranks return None.
    """
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, host)
    by_host = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
    inside, everywhere = (bus_bandwidth(groups, device) for groups in (list(by_host.values()), [[*range(len(names))]]))
    result = {"inside": inside, "all": everywhere, "ranks": len(names), "bytes": _SIZES[device.type]}
    return result if dist.get_rank() == by_host[host][0] else None


def bus_bandwidth(groups: list[list[int]], device: torch.device) -> float:
    """Measure the bus bandwidth of all-reduces in this rank's group, in bytes/s, as nccl-tests defines it
    (doc/PERFORMANCE.md); 0 for a group of one rank. RuntimeError if an all-reduce has wrong sums.

    The `groups` have no rank in common and are measured at the same time. The first all-reduce, which opens
    connections, is not timed.
    """
    group, _ = dist.new_subgroups_by_enumeration(groups, timeout=_TIMEOUT)
    if group is None:
        return 0.0
    count, size, fastest = dist.get_world_size(group), _SIZES[device.type], float("inf")
    for number in range(1 + _NUM_REPEATS):
        values = torch.full((size // 4,), dist.get_rank(group) + 1.0, device=device)
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor([time.perf_counter() - began], device=device)
        if not values.eq(count * (count + 1) / 2).all():
            raise RuntimeError(f"an all-reduce of {size} bytes over {count} ranks has wrong sums")
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group)
        fastest = min(fastest, seconds.item()) if number else fastest
    return size / fastest * 2 * (count - 1) / count


def main(host: str, gpus: str) -> None:
    """Measure the network as one rank on `host`. `gpus` lists the GPU index of each local rank; if it is empty, the
    ranks use CPUs.
    """
    die_with_parent()
    if interface := interface_towards(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    # With TORCH_NCCL_BLOCKING_WAIT, NCCL raises errors in this thread, which reports them. Otherwise NCCL would end the
    # process.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    device, is_cause = torch.device("cpu"), True
    try:
        if gpus:
            number = int(gpus.split(",")[int(os.environ["LOCAL_RANK"])])
            device = torch.device(device_of_rank("cuda", number))
            torch.cuda.set_device(device)
        is_cause = False
        dist.init_process_group("nccl" if gpus else "gloo", timeout=_TIMEOUT)
        result = measure(host, device)
    except (RuntimeError, FinetuneError) as failed:
        # An error message of gloo begins with a source file and a line number, which are removed here.
        text = re.sub(r"^\[\S+\] *", "", str(failed).strip().splitlines()[0])
        sys.stdout.write(f"{json.dumps({'problem': text, 'is_cause': is_cause})}\n")
        raise SystemExit(1) from None
    if result is not None:
        print(json.dumps(result), flush=True)  # noqa: T201 - what the doctor reads
    # Every rank has measured the network by now. An error because another rank has already exited does not matter.
    with suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
