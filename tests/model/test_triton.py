"""Triton's kernels without a GPU, this program's and Liger's: by the interpreter, and compiled for GPUs."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.model.fused.fused_kernels import NEEDS_INTERPRETER

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None or find_spec("liger_kernel") is None,
        reason="triton and liger-kernel are not installed: pip install -e .[test], on Linux",
    ),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU here runs the kernels in their own tests"),
]
INTERPRETED = ("tests/model/experts/test_grouped_kernel.py", "tests/model/fused/test_operations.py")
KERNELS = {"_product_kernel", "_gradient_kernel", "_rms_norm_forward_kernel", "_rms_norm_backward_kernel"}
KERNELS |= {f"_swiglu_{name}_kernel" for name in ("forward", "backward", "fused_gate_up_forward")}
KERNELS |= {"_swiglu_fused_gate_up_backward_kernel", "_triton_rope", "liger_cross_entropy_kernel"}
SHARED_KIB = {75: 64, 80: 163, 89: 99, 90: 227}
"""Shared memory of a block at most, by compute capability (CUDA C++ Programming Guide, technical specifications)."""


@NEEDS_INTERPRETER
def test_values_and_gradients_by_the_interpreter() -> None:
    """In a process of its own, since Triton reads the variable when it is imported."""
    options = ("-q", "-p", "no:cacheprovider", "-k", "liger or grouped_kernel", *INTERPRETED)
    environ = os.environ | {"TRITON_INTERPRET": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout, done.stdout[-500:]


def test_all_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.compile_worker"],
        cwd=ROOT,
        env=environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = re.findall(r"^kernel (\w+) (\d+) True (\d+) (\d+)$", done.stdout, re.MULTILINE)
    for capability, kib in SHARED_KIB.items():
        found = {name: sizes for name, arch, *sizes in compiled if int(arch) == capability}
        assert set(found) == KERNELS, capability
        assert max(int(shared) for shared, _ in found.values()) <= kib * 1024
        assert max(int(threads) for _, threads in found.values()) <= 1024
    assert len(compiled) == len(re.findall(r"^kernel ", done.stdout, re.MULTILINE)), done.stdout
