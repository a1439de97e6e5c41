"""Checks disks for NVMe offload. On some disks, a direct read into unaligned memory silently reads nothing."""

import copy
from pathlib import Path

import torch

from ds_finetune.errors import ConfigError
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.parallel.tensor import local_config
from ds_finetune.plan.plan import Plan, check_largest_slice

_ELEMENTS = 512 * 1024
_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "single_submit": False,
    "overlap_events": True,
    "intra_op_parallelism": 1,
}
"""Defaults of DeepSpeed's section `aio` (0.19.8, swap_tensor/aio_config.py), as arguments of `aio_handle`."""
_OFFSET = 64
"""Offset of the destination in elements: 256 bytes, which is not a multiple of a 512-byte sector."""


def check_offload(plan: Plan, model: ModelPlan) -> None:
    """Raise ConfigError if the plan offloads to an unsuitable disk, or with buffers that are too small."""
    for folder in nvme_folders(plan):
        check_folder(Path(folder), f"probe-rank{plan.world.rank}")
    if plan.offload_param == "nvme":
        local = copy.deepcopy(local_config(model.hf_config, plan.mesh.tp))
        skeleton = build_skeleton(local, attention=model.attention, dtype=torch.bfloat16, device="meta")
        check_largest_slice(plan, ((param.numel(), name) for name, param in skeleton.named_parameters()))


def nvme_folders(plan: Plan) -> list[str]:
    """The NVMe folders to which the plan offloads, without duplicates."""
    zero = plan.zero
    sections = (zero.get("offload_optimizer"), zero.get("offload_param"))
    return sorted({str(section["nvme_path"]) for section in sections if section and section.get("device") == "nvme"})


def check_folder(folder: Path, name: str = "probe") -> None:
    """Write a file `name` to `folder`, and read it back into unaligned memory. ConfigError if the bytes differ.
    DeepSpeed 0.19.8 reads gradients into `buffer.narrow(offset)`. If the disk's direct IO needs aligned addresses, the
    read does nothing without an error, and the gradient is stale.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not folder.is_dir():
        raise ConfigError(f"nvme_path `{folder}` is not a folder", hint="create the folder, or name another disk")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            f"nvme_path `{folder}` needs DeepSpeed's async_io, which cannot be built",
            hint="install libaio (Debian: libaio-dev)",
        )
    handle = AsyncIOBuilder().load().aio_handle(*_AIO.values())
    path = folder / f"{name}.swp"
    written = handle.new_cpu_locked_tensor(_ELEMENTS, torch.empty(0, dtype=torch.float32))
    written.copy_(torch.arange(_ELEMENTS) + 1)
    handle.sync_pwrite(written, str(path), 0)
    buffer = handle.new_cpu_locked_tensor(2 * _ELEMENTS, torch.empty(0, dtype=torch.float32))
    buffer.zero_()
    handle.async_pread(buffer.narrow(0, _OFFSET, _ELEMENTS), str(path), 0)
    handle.wait()
    path.unlink()
    if not torch.equal(buffer[_OFFSET : _OFFSET + _ELEMENTS], written):
        raise ConfigError(
            f"nvme_path `{folder}` is on a disk that cannot be read into memory whose address is no multiple of 512 "
            "bytes: DeepSpeed 0.19.8 would train on stale gradients",
            hint="use a disk whose direct IO supports unaligned buffers (tmpfs does), or offload to cpu",
        )
