"""The compiled operators of DeepSpeed that a run needs, built on all ranks."""

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
from ds_finetune.engine.ops.nvme import nvme_folders
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
"""Optimizers for which DeepSpeed 0.19.8 uses a CPU kernel of its own when optimizer states are offloaded
(runtime/engine.py, _configure_basic_optimizer).
"""
_CAUSE = re.compile(
    r"error:|cannot find -l|not found|No such file|[Uu]nsupported|does not match|No space left|Killed|Permission denied"
)


def needed_ops(plan: Plan) -> list[str]:
    """Names of the operators that a run of `plan` will build."""
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
    """Compile and load the operator, which takes minutes the first time. ConfigError has the cause of a failure."""
    import deepspeed.ops.op_builder as builders

    if not (_folder(name) / f"{name}.so").exists():
        # The compiler that torch 2.13 uses (utils/cpp_extension.py, get_cxx_compiler).
        program = shlex.split(os.environ.get("CXX", "c++"))[0]
        if not shutil.which(program):
            raise ConfigError(
                f"DeepSpeed's {name} cannot be built: no compiler `{program}` on this host",
                hint="install one (Debian: g++), or set CXX",
            )
    # Failures come from the compiler, the linker, a full disk, CUDA, or DeepSpeed's own checks.
    causes: tuple[type[Exception], ...] = (RuntimeError, OSError, ImportError, AssertionError)
    try:
        _check_toolkit(name)
        with reported_lock(say):
            getattr(builders, _BUILDERS[name])().load(verbose=False)
    except (*causes, builders.builder.CUDAMismatchException, builders.builder.MissingCUDAException) as failed:
        text = "\n".join(filter(None, (str(failed), str(failed.__cause__ or ""))))
        raise ConfigError(f"DeepSpeed's {name} cannot be built: {true_cause(text)}", hint=_hint(text)) from failed


def true_cause(text: str) -> str:
    """The line of a failed build's output that names the cause; the last line where none does."""
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
    """Folder in which torch 2.13 keeps the compiled operator (utils/cpp_extension.py, _get_build_directory)."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, False))


def _check_toolkit(name: str) -> None:
    """Raise an error where nvcc is missing, or its CUDA has another major version than torch's. DeepSpeed 0.19.8
    compares them only at installation (op_builder/builder.py:804); here the compilation would fail. async_io needs only
    CUDA's headers.
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
"""Sends this rank's text and returns the texts of all ranks by rank; every rank must call it equally often."""
_BINDING_LAUNCHERS = ("srun", "mpirun")
"""Launchers that bind each rank to its own cores."""


def build_ops(plan: Plan, agree: Agree, say: Say) -> Plan:
    """Compile the operators that the optimizer and NVMe offload of `plan` need; ConfigError on every rank where any
    rank fails.

    Only FusedAdam may fail: the returned plan then uses torch's fused AdamW on all ranks, with a note, unless the user
    has set `torch_adam` to false.
    """
    problems = {name: _build_problem(name, say) for name in needed_ops(plan)}
    everywhere = [json.loads(text) for text in agree(json.dumps(problems))]
    for rank, (name, (problem, hint)) in ((r, item) for r, ops in enumerate(everywhere) for item in ops.items()):
        if problem and name == "fused_adam" and plan.may_take_torch_adam:
            return plan.with_torch_adam(f"On rank {rank}: {problem}")
        if problem:
            raise ConfigError(f"rank {rank}: {problem}", hint=hint)
    return plan


@cache
def _build_problem(name: str, say: Say) -> tuple[str, str]:
    """Error and hint of building an operator on this rank, both empty on success. Tried once per process."""
    try:
        build_op(name, say)
    except ConfigError as refused:
        return refused.message, refused.hint
    return "", ""


def use_cores(plan: Plan, environ: MutableMapping[str, str]) -> Plan:
    """Set the threads of an offloaded optimizer to this rank's share of the host's cores, with a note in the returned
    plan.

    torchrun sets OMP_NUM_THREADS to 1 where it is not set; other launchers leave all cores to every rank. Any other
    value was set by the user, and is kept.
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
    """Cores for a rank: its share of the `available` ones, or all of them where it is bound to some of `total`."""
    is_own = world.launcher in _BINDING_LAUNCHERS and available < total
    return available if is_own else max(1, available // world.local_world_size)
