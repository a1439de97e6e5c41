"""Builds the compiled operators of DeepSpeed that a run needs, on all ranks, and checks disks for NVMe offload."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.engine.ops.build_lock import reported_lock
from ds_finetune.errors import ConfigError
from ds_finetune.plan.plan import Plan
from ds_finetune.system.world import World

_BUILDERS = {
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "cpu_adagrad": "CPUAdagradBuilder",
    "fused_adam": "FusedAdamBuilder",
    "fused_lion": "FusedLionBuilder",
    "fused_lamb": "FusedLambBuilder",
    "async_io": "AsyncIOBuilder",
}
_OFFLOADED = {"adam": "cpu_adam", "adamw": "cpu_adam", "muon": "cpu_adam", "lion": "cpu_lion", "adagrad": "cpu_adagrad"}
"""Names of DeepSpeed's CPU kernels by optimizer, which DeepSpeed 0.19.8 uses when optimizer states are offloaded
(runtime/engine.py, _configure_basic_optimizer).
"""
_CAUSE = re.compile(
    r"error:|cannot find -l|not found|No such file|[Uu]nsupported|does not match|No space left|Killed|Permission denied"
)

_ELEMENTS = 512 * 1024
_AIO_ARGUMENTS = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
"""Keys of DeepSpeed's section `aio`, in the order in which `aio_handle` takes them as arguments."""
_OFFSET = 64
"""Offset, in elements, at which a test reads into a buffer: 256 bytes, not a multiple of a disk's 512-byte sector."""


def needed_ops(plan: Plan) -> list[str]:
    """Names of the DeepSpeed operators that a run of `plan` needs."""
    name = plan.optimizer
    ops: list[str] = []
    if plan.offload_optimizer != "none" and name in _OFFLOADED:
        ops.append(_OFFLOADED[name])
    elif plan.needs_fused_adam:
        ops.append("fused_adam")
    elif plan.device == "cuda" and name in ("lion", "lamb"):
        ops.append(f"fused_{name}")
    return [*ops, "async_io"] if nvme_folders(plan) else ops


def build_op(name: str, say: Say = say_nothing) -> None:
    """Compile and load a DeepSpeed operator, which takes minutes the first time. ConfigError if that fails."""
    import deepspeed.ops.op_builder as builders

    if not (_folder(name) / f"{name}.so").exists():
        # torch 2.13 compiles operators with this C++ compiler (utils/cpp_extension.py, get_cxx_compiler).
        program = shlex.split(os.environ.get("CXX", "c++"))[0]
        if not shutil.which(program):
            raise ConfigError(
                f"DeepSpeed's {name} cannot be built: no compiler `{program}` on this host",
                hint="install a C++ compiler (Debian: g++), or set CXX",
            )
    # Compiler, linker, a full disk, CUDA or DeepSpeed's own checks may make the build fail.
    causes: tuple[type[Exception], ...] = (RuntimeError, OSError, ImportError, AssertionError)
    try:
        _check_toolkit(name)
        with reported_lock(say):
            getattr(builders, _BUILDERS[name])().load(verbose=False)
    except (*causes, builders.builder.CUDAMismatchException, builders.builder.MissingCUDAException) as failed:
        text = "\n".join(filter(None, (str(failed), str(failed.__cause__ or ""))))
        raise ConfigError(f"DeepSpeed's {name} cannot be built: {true_cause(text)}", hint=_hint(text)) from failed


def true_cause(text: str) -> str:
    """The line in the output of a failed compilation that names the cause; the last line if none does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next(
        (line for line in lines if _CAUSE.search(line) and not line.startswith("FAILED")),
        lines[-1] if lines else "the build printed nothing",
    )


def _hint(text: str) -> str:
    for word, hint in (
        (
            "does not match the version torch was compiled with",
            "install the CUDA toolkit of torch's version, or a torch of the toolkit's",
        ),
        ("CUDA_HOME", "install the CUDA toolkit of torch's version and set CUDA_HOME"),
        ("JIT load the async_io op", "install libaio with its headers (Debian: libaio-dev)"),
        ("Python.h", "install Python's headers (Debian: python3-dev)"),
        ("ninja", "install ninja, as `pip install ds_finetune` does"),
        ("No space left", "free some space, or set TORCH_EXTENSIONS_DIR to another disk"),
    ):
        if word in text:
            return hint
    return "correct what the compiler reports and try again; an incomplete build in TORCH_EXTENSIONS_DIR can be removed"


def _folder(name: str) -> Path:
    """Folder in which torch 2.13 stores the compiled operator (utils/cpp_extension.py, _get_build_directory)."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, False))


def _check_toolkit(name: str) -> None:
    """Raise an error if nvcc is missing, or if its CUDA has another major version than torch's. DeepSpeed 0.19.8
    compares them only at installation (op_builder/builder.py:804), and the compilation would fail. async_io needs only
    CUDA's headers, of any version.
    """
    from deepspeed.ops.op_builder import builder

    is_built = (_folder(name) / f"{name}.so").exists() and name != "async_io"
    if name.startswith("cpu_") or is_built or not torch.version.cuda or os.environ.get("DS_ACCELERATOR") != "cuda":
        return
    major, minor = builder.installed_cuda_version()
    if major != int(torch.version.cuda.split(".")[0]) and name != "async_io":
        raise builder.CUDAMismatchException(
            f"nvcc is of CUDA {major}.{minor}, which does not match the version torch was compiled with, "
            f"{torch.version.cuda}"
        )


Agree = Callable[[str], list[str]]
"""Function that sends this rank's text and returns all ranks' texts. Every rank must call it equally often."""


def build_ops(plan: Plan, agree: Agree, say: Say) -> Plan:
    """Compile the operators that the optimizer and NVMe offload of `plan` need. ConfigError on every rank if any rank
    fails. Only FusedAdam may fail: then the returned plan uses torch's fused AdamW on all ranks, with a note, unless
    the user has set `torch_adam` to false.
    """
    problems = {name: _build_problem(name, say) for name in needed_ops(plan)}
    of_ranks = [json.loads(text) for text in agree(json.dumps(problems))]
    for rank, (name, (problem, hint)) in ((r, item) for r, ops in enumerate(of_ranks) for item in ops.items()):
        if problem and name == "fused_adam" and plan.may_take_torch_adam:
            return plan.with_torch_adam(f"On rank {rank}: {problem}")
        if problem:
            raise ConfigError(f"rank {rank}: {problem}", hint=hint)
    return plan


@cache
def _build_problem(name: str, say: Say) -> tuple[str, str]:
    try:
        build_op(name, say)
    except ConfigError as refused:
        return refused.message, refused.hint
    return "", ""


def use_cores(plan: Plan, environ: MutableMapping[str, str]) -> Plan:
    """Let an offloaded optimizer use as many threads as this rank's part of the host's cores. Returns the plan, with a
    note if the number changes. If OMP_NUM_THREADS is not set, torchrun sets it to 1, and other launchers leave all
    cores to every rank. A value set by the user is kept.
    """
    previous = environ.get("OMP_NUM_THREADS")
    is_default = previous is None or (previous == "1" and "TORCHELASTIC_RUN_ID" in environ)
    if plan.offload_optimizer == "none" or not is_default:
        return plan
    threads = cores_of_rank(plan.world, available=len(os.sched_getaffinity(0)), total=os.cpu_count() or 1)
    if str(threads) == previous:
        return plan
    environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    note = (
        f"OMP_NUM_THREADS is {threads} (it was {previous or 'not set'}): the optimizer is offloaded, and this is a "
        "rank's share of the cores"
    )
    return replace(plan, notes=(*plan.notes, note))


def cores_of_rank(world: World, *, available: int, total: int) -> int:
    """Number of a rank's cores: all of `available` if the launcher bound it to fewer than `total`, else its part."""
    is_own = world.launcher in ("srun", "mpirun") and available < total
    return available if is_own else max(1, available // world.local_world_size)


def nvme_folders(plan: Plan) -> list[str]:
    """The NVMe folders to which the plan offloads, without duplicates."""
    zero = plan.zero
    sections = (zero.get("offload_optimizer"), zero.get("offload_param"))
    return sorted({str(section["nvme_path"]) for section in sections if section and section.get("device") == "nvme"})


def check_nvme_folder(folder: Path, name: str) -> None:
    """Write a file `name` to `folder`, and read it back into unaligned memory. ConfigError if the bytes differ.
    DeepSpeed 0.19.8 reads gradients into `buffer.narrow(offset)`. If the disk's direct IO needs aligned addresses, this
    read silently does nothing, and the gradient is stale.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    if not folder.is_dir():
        raise ConfigError(f"nvme_path `{folder}` is not a folder", hint="create the folder, or name another disk")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            f"nvme_path `{folder}` needs DeepSpeed's async_io, which cannot be built",
            hint="install libaio (Debian: libaio-dev)",
        )
    defaults = get_aio_config({})
    handle = AsyncIOBuilder().load().aio_handle(*(defaults[name] for name in _AIO_ARGUMENTS))
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
            f"nvme_path `{folder}` is on a disk that cannot be read into memory that is not aligned to 512 bytes: "
            "DeepSpeed 0.19.8 would train on stale gradients",
            hint="use a disk whose direct IO supports unaligned buffers (tmpfs does), or offload to cpu",
        )
