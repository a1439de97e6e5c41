"""Kernels of fused operations for tests: on a GPU where there is one, else Liger's by Triton's interpreter, and those of
torch.compile by a C++ compiler.
"""

import os
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from packaging.version import Version

from ds_finetune.model.fused import formulas
from ds_finetune.model.fused.operations import Kernels, kernels_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("formulas", pytest.param("compile", marks=pytest.mark.slow), "liger")
"""Those of torch.compile take seconds each to make."""
NEEDS_INTERPRETER = pytest.mark.skipif(
    DEVICE == "cpu"
    and find_spec("triton") is not None
    and Version(version("triton")) < Version("3.7")
    and Version(version("numpy")) >= Version("2.4"),
    reason="the interpreter of Triton 3.6, which torch 2.11 requires, cannot run loops with numpy 2.4 or newer",
)


def fused_kernels(name: str) -> Kernels:
    """The kernels by name; skips the test where they cannot run."""
    if name == "formulas":
        return formulas  # type: ignore[return-value]
    if name == "compile" and DEVICE == "cpu" and not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler")
    if name == "liger":
        if find_spec("liger_kernel") is None or find_spec("triton") is None:
            pytest.skip("liger-kernel is not installed: pip install -e .[test]")
        if DEVICE == "cpu":
            if os.environ.get("TRITON_INTERPRET") != "1":
                pytest.skip("on a CPU Triton has to be interpreted: TRITON_INTERPRET=1")
            interpret_floats()
    return kernels_of(name)


def dtypes(name: str) -> tuple[torch.dtype, ...]:
    """Precisions to compare in. Triton's interpreter (3.9) computes in bf16 with the bits of whole numbers."""
    if name == "liger" and DEVICE == "cpu":
        return torch.float32, torch.float16
    return torch.float32, torch.bfloat16


def interpret_floats() -> None:
    """Let the interpreter pass floats to kernels as the compiler does, in fp32, and compute `rsqrt` of libdevice."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt
    if getattr(convert, "takes_floats", False):
        return

    def converted(value: Any) -> Any:
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32)
        return convert(value)

    converted.takes_floats = True  # type: ignore[attr-defined]
    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda value: tl.math.rsqrt(value)
