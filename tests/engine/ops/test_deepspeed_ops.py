"""DeepSpeed's operators: which a plan needs, that they compute what torch does, and why they cannot be built, in the
compiler's own words.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils import cpp_extension

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.ops.deepspeed_ops import _check_toolkit, build_op, needed_ops, true_cause
from ds_finetune.errors import ConfigError
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World

NVME = {"device": "nvme", "nvme_path": "/nvme"}


@pytest.fixture(autouse=True)
def ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ninja, which torch builds with, lies beside Python."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.parametrize(
    ("optimizer", "device", "zero", "ops"),
    [
        ("AdamW", "cpu", {"stage": 2}, set()),
        ("AdamW", "cuda", {"stage": 2}, {"fused_adam"}),
        ("Muon", "cuda", {"stage": 0}, {"fused_adam"}),
        ("Lion", "cuda", {"stage": 0}, {"fused_lion"}),
        ("Lamb", "cuda", {"stage": 0}, {"fused_lamb"}),
        ("SGD", "cuda", {"stage": 0}, set()),
        ("AdamW", "cuda", {"stage": 2, "offload_optimizer": {"device": "cpu"}}, {"cpu_adam"}),
        ("Lion", "cpu", {"stage": 3, "offload_optimizer": {"device": "cpu"}}, {"cpu_lion"}),
        ("AdamW", "cuda", {"stage": 3, "offload_optimizer": NVME}, {"cpu_adam", "async_io"}),
        ("AdamW", "cuda", {"stage": 3, "offload_param": NVME}, {"fused_adam", "async_io"}),
    ],
)
def test_which_operators_a_plan_needs(optimizer: str, device: str, zero: dict[str, Any], ops: set[str]) -> None:
    tree = {
        "model": "m",
        "data": {"train": "t"},
        "output_dir": "o",
        "optim": {"name": optimizer},
        "deepspeed": {"zero_optimization": zero},
    }
    found = needed_ops(
        make_plan(RunSettings.of(RunConfig.model_validate(tree)), world=World(0, 2, 0, 2, "test"), device=device)
    )
    assert set(found) == ops


def _cuda(monkeypatch: pytest.MonkeyPatch, folder: Path, toolkit: str) -> None:
    """A torch for CUDA 13.0, and a toolkit with nvcc of this version; none where it is empty."""
    # DeepSpeed chooses once in a process, and other tests need the CPU.
    assert get_accelerator().device_name() == "cpu"
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "built"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(folder) if toolkit else None)
    (folder / "bin").mkdir()
    nvcc = folder / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {toolkit}, V{toolkit}.1'\n")
    nvcc.chmod(0o755)


@pytest.mark.parametrize("name", ["async_io", "fused_adam"])
def test_a_missing_toolkit_is_said(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch from PyPI brings none; DeepSpeed 0.19.8 joins the missing path (op_builder/async_io.py:42), a TypeError."""
    _cuda(monkeypatch, tmp_path, toolkit="")
    with pytest.raises(ConfigError) as caught:
        build_op(name)
    assert caught.value.message.startswith(f"DeepSpeed's {name} cannot be built: CUDA_HOME does not exist")
    assert caught.value.hint == "install the CUDA toolkit of torch's version and set CUDA_HOME"


def test_nvcc_of_another_cuda_is_said_before_it_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _cuda(monkeypatch, tmp_path, toolkit="12.4")
    with pytest.raises(ConfigError) as caught:
        build_op("fused_adam")
    assert caught.value.message == (
        "DeepSpeed's fused_adam cannot be built: nvcc is of CUDA 12.4, which does not match the version torch was "
        "compiled with, 13.0"
    )
    assert caught.value.hint == "install the CUDA toolkit of torch's version, or a torch of the toolkit's"
    _check_toolkit("async_io")
    _check_toolkit("cpu_adam")


def test_a_later_nvcc_of_the_same_cuda_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _cuda(monkeypatch, tmp_path, toolkit="13.2")
    _check_toolkit("fused_adam")


def test_cpu_adam_is_torchs() -> None:
    """Three steps, to 16 roundings of fp32 relative to the largest weight."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    build_op("cpu_adam")
    start, *gradients = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    kernel, reference = (torch.nn.Parameter(start.clone()) for _ in range(2))
    numbers: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = DeepSpeedCPUAdam([kernel], adamw_mode=True, **numbers), torch.optim.AdamW([reference], **numbers)
    for gradient in gradients:
        for weight, optimizer in zip((kernel, reference), optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    largest = reference.abs().max()
    assert (kernel - reference).abs().max() <= 16 * torch.finfo(torch.float32).eps * largest


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match="DeepSpeed's cpu_adam cannot be built: no compiler `no-such-compiler` on this host"
    ):
        build_op("cpu_adam")


def test_what_the_compiler_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an operator that no other test loads: a process loads each once."""
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler here")
    wrapper = tmp_path / "cxx"
    wrapper.write_text('#!/bin/sh\nexec c++ -include absent_header.h "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    with pytest.raises(
        ConfigError, match=r"cpu_adagrad cannot be built: .*fatal error: absent_header.h: No such file or directory"
    ):
        build_op("cpu_adagrad")


def test_no_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed links a program with it before it compiles the operator."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("LDFLAGS", "-Wl,--option-of-no-linker")
    with pytest.raises(ConfigError, match="async_io cannot be built: Unable to JIT load the async_io op") as caught:
        build_op("async_io")
    assert caught.value.hint == "install libaio with its headers (Debian: libaio-dev)"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Error building extension 'x': [1/2] c++ ...\nFAILED: x.o \nc++ -c x.cpp\nx.cpp:3:10: fatal error: omp.h: No such file or directory\nninja: stopped",
         "x.cpp:3:10: fatal error: omp.h: No such file or directory"),
        ("FAILED: y.so\nc++ y.o\n/usr/bin/ld: cannot find -laio: No such file or directory\ncollect2: error: ld", "/usr/bin/ld: cannot find -laio: No such file or directory"),
        (">- DeepSpeed Op Builder: Installed CUDA version 12.4 does not match the version torch was compiled with 13.0, unable",
         ">- DeepSpeed Op Builder: Installed CUDA version 12.4 does not match the version torch was compiled with 13.0, unable"),
        ("nothing known\nlast words", "last words"),
        ("", "the build printed nothing"),
    ],
)  # fmt: skip
def test_the_true_cause_of_a_failed_build(text: str, cause: str) -> None:
    assert true_cause(text) == cause
