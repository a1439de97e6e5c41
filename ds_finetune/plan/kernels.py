"""Resolves `model.kernels: auto`: which kernels compute RMSNorm, rotary embedding and SwiGLU, and why."""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ds_finetune.errors import ConfigError
from ds_finetune.families.family import Family
from ds_finetune.system.versions import check_versions, installed_version

_HINT = "set model.kernels: auto"
_EXTRA = "pip install 'ds_finetune[gpu]'"


@dataclass(frozen=True)
class ChosenKernels:
    """Chosen kernels: `liger`, `compile`, or `torch`, which runs transformers' operations one by one."""

    name: str
    reason: str

    @property
    def has_others(self) -> bool:
        """Whether FlashAttention 3 and Triton's product of experts may be used; false if the run file says `torch`."""
        return self != SINGLE

    def of(self, family: Family) -> str:
        """Kernels used for models of this family; `torch` where no operation of the family has another kernel."""
        return self.name if family.fused else "torch"

    def lines(self, family: Family) -> Iterator[tuple[str, str]]:
        """Plan line about the kernels of RMSNorm, rotary embedding and SwiGLU."""
        if self.of(family) != self.name:
            yield "kernels", f"torch: fused kernels {_NOTHING[family.is_generic]} {family.model_type}"
        elif self.name == "torch":
            yield "kernels", f"torch: {self.reason}"
        else:
            yield "kernels", f"{self.name}: {family.fused} ({self.reason})"


SINGLE = ChosenKernels("torch", "as the run file says")
_NOTHING = {True: "are not tested with", False: "compute nothing of"}


def choose_kernels(name: str, *, device: str, stage: int) -> ChosenKernels:
    """Kernels for `model.kernels` on a `device` (`cpu` or `cuda`) at a ZeRO stage.

    On a GPU, `auto` chooses `liger`, else `compile`, else `torch`: the first that can run. On a CPU it chooses `torch`.
    ConfigError where the requested kernels cannot run.
    """
    if name == "torch":
        return SINGLE
    if name != "auto":
        if (problem := kernels_problem(name, device, stage)) is not None:
            raise ConfigError(f"model.kernels {name}: {problem[0]}", hint=problem[1])
        if name == "liger":
            check_versions("gpu")
        return ChosenKernels(name, "as the run file says")
    if device == "cpu":
        return ChosenKernels("torch", "a CPU has no fused kernels (auto)")
    if (of_liger := kernels_problem("liger", device, stage)) is None:
        check_versions("gpu")
        return ChosenKernels("liger", f"auto: liger-kernel {installed_version('liger-kernel')} is installed")
    if (of_compile := kernels_problem("compile", device, stage)) is None:
        return ChosenKernels("compile", f"auto: {of_liger[0]}")
    hints = " or ".join(dict.fromkeys([of_liger[1], *([of_compile[1]] if stage < 3 else [])]))
    return ChosenKernels("torch", f"{of_liger[0]}, and {of_compile[0]} (auto); {hints} makes steps faster")


def kernels_problem(name: str, device: str, stage: int) -> tuple[str, str] | None:
    """Why the kernels `name` (`liger` or `compile`) cannot run on the device at this ZeRO stage, and a hint; None where
    they can.
    """
    is_cpu, is_interpreted = device == "cpu", os.environ.get("TRITON_INTERPRET") == "1"
    compilers = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    no_triton, install = triton_problem()
    if name == "liger":
        problems = (
            (not installed_version("liger-kernel"), "liger-kernel is not installed", _EXTRA),
            (is_cpu and not is_interpreted, "its kernels need a GPU, and the device is cpu", _HINT),
            (bool(no_triton), f"Liger's kernels need Triton: {no_triton}", install),
        )
    else:
        needs = f"torch.compile needs a C++ compiler on a CPU, and there is no {' or '.join(compilers)}"
        problems = (
            (stage == 3, "torch.compile is not tested with ZeRO stage 3", "use stage 2, or model.kernels liger"),
            (not is_cpu and bool(no_triton), f"torch.compile needs Triton on a GPU: {no_triton}", install),
            (is_cpu and not any(map(shutil.which, compilers)), needs, _HINT),
        )
    return next(((text, hint) for applies, text, hint in problems if applies), None)


def triton_problem() -> tuple[str, str]:
    """Why Triton cannot compile a kernel on this machine, and what to install; empty where it can.

    Triton compiles C code that includes Python.h when a process first runs a kernel (triton 3.7.1,
    runtime/build.py:19).
    """
    if find_spec("triton") is None:
        return "there is no triton", "install torch's build for CUDA, which brings the triton that belongs to it"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "", ""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    scheme = sysconfig.get_default_scheme()
    headers = Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])
    packages: dict[str, str] = {}
    if not any(map(shutil.which, compilers)):
        packages[f"C compiler ({' or '.join(compilers)})"] = "gcc"
    if not (headers / "Python.h").is_file():
        packages[str(headers / "Python.h")] = "python3-dev"
    if not packages:
        return "", ""
    return f"there is no {' and no '.join(packages)}", f"install {' and '.join(packages.values())} (Debian)"
