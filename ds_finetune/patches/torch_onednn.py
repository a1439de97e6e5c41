"""oneDNN's products of fp32 matrices on CPUs, which torch uses in 16 bits alone.

MKL, which torch calls in fp32, runs code for AVX2 on AMD's processors: at 256 x 352, 103 to 113 GFLOP/s of one Zen 5
core where oneDNN has 160 to 240 (torch 2.13). The public ways there copy both sides into oneDNN's layout and back, or
convolve with MKL; the operator that torch's compiler emits for `nn.Linear` takes plain tensors. It is private, so it is
used only while its signature and its results are the expected ones.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch

_OPERATOR = "mkldnn::_linear_pointwise"
_SCHEMA = f"{_OPERATOR}(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, str? algorithm) -> Tensor Y"
"""Its signature in torch 2.11 and 2.13 (aten/src/ATen/native/mkldnn/RegisterMkldnnOpContextClass.cpp)."""
_TOLERANCE = 1e-6
"""Largest norm of the deviation of a trial's product from fp64's, relative; with bf16 inside it is 1e-3."""
_TRIAL = (24, 40, 56)
"""Rows, inner size and columns of a trial."""


class ProductChoice(NamedTuple):
    """Whether products in fp32 on this CPU are oneDNN's."""

    is_onednn: bool
    reason: str
    """Why not; empty where they are."""


@functools.cache
def choose_fp32_products() -> ProductChoice:
    """The choice for this process, from the CPU, the build of torch and a trial of the operator."""
    problem = _machine_problem() or _operator_problem()
    return ProductChoice(not problem, problem)


def multiply_by_onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left` [rows, inner] @ `right` [inner, columns], both fp32 on the CPU, in a new tensor; without autograd."""
    # oneDNN computes with code for reference, 1,500 times slower, where a matrix has gaps between its rows.
    weight = right.T if right.is_contiguous() or right.T.is_contiguous() else right.contiguous().T
    return _operator()(left, weight, None, "none", [], "")  # type: ignore[no-any-return]


@functools.cache
def _operator() -> Any:  # noqa: ANN401 - torch's OpOverload
    return torch.ops.mkldnn._linear_pointwise.default


def _machine_problem() -> str:
    """Why MKL's products are kept on this machine; empty where oneDNN's are faster."""
    capability, vendor = torch.backends.cpu.get_cpu_capability(), cpu_vendor(Path("/proc/cpuinfo"))
    problems = (
        (not torch.backends.mkl.is_available(), "torch is built without MKL"),
        (not torch.backends.mkldnn.is_available(), "torch is built without oneDNN"),
        (capability != "AVX512", f"the processor has {capability}, not AVX512"),
        (vendor != "AuthenticAMD", f"MKL is fast on processors of {vendor or 'an unknown vendor'}"),
    )
    return next((text for is_set, text in problems if is_set), "")


def cpu_vendor(cpuinfo: Path) -> str:
    """The vendor of the processor as Linux reports it; empty where it does not."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def _operator_problem() -> str:
    """Why torch's operator is not used; empty where it has the expected signature and results."""
    try:
        schema = str(_operator()._schema)
    except AttributeError:
        return f"torch {torch.__version__} has no {_OPERATOR}"
    if schema != _SCHEMA:
        return f"torch {torch.__version__} has {schema}"
    deviation = max(_deviation(is_transposed=is_transposed) for is_transposed in (False, True))
    if not deviation <= _TOLERANCE:
        return f"{_OPERATOR} deviates by {deviation:.1e} in a trial"
    return ""


def _deviation(*, is_transposed: bool) -> float:
    """The norm of the deviation of a product from fp64's relative to its norm."""
    rows, inner, columns = _TRIAL
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=generator)
    right = torch.randn(columns, inner, generator=generator).T
    right = right if is_transposed else right.contiguous()
    exact = left.double() @ right.double()
    with torch.no_grad():
        found = multiply_by_onednn(left, right)
    return float(torch.linalg.norm(found - exact) / torch.linalg.norm(exact))
