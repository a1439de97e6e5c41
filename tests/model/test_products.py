"""Products of fp32 matrices on CPUs equal fp64's whoever computes them, and oneDNN's are used only where they are tested."""

from pathlib import Path

import pytest
import torch

from ds_finetune.model import products
from ds_finetune.patches import torch_onednn
from ds_finetune.patches.torch_onednn import ProductChoice, choose_fp32_products, cpu_vendor, multiply_by_onednn

HAS_OPERATOR = pytest.mark.skipif(bool(torch_onednn._operator_problem()), reason="torch without oneDNN's operator")
WHOSE = pytest.mark.parametrize("is_onednn", [False, pytest.param(True, marks=HAS_OPERATOR)])


def _matrices(rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(rows, inner, generator=generator), torch.randn(inner, columns, generator=generator)


def _use(monkeypatch: pytest.MonkeyPatch, *, is_onednn: bool, block: int) -> None:
    monkeypatch.setattr(products, "choose_fp32_products", lambda: ProductChoice(is_onednn, "a test"))
    monkeypatch.setattr(products, "_BLOCK_NUMBERS", block)
    monkeypatch.setattr(products, "_SMALLEST", 1)


def _deviation(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(torch.linalg.norm(found - exact) / torch.linalg.norm(exact))


@WHOSE
@pytest.mark.parametrize("block", [1, 700, 2**22])
def test_a_product_in_blocks_equals_the_whole(monkeypatch: pytest.MonkeyPatch, *, is_onednn: bool, block: int) -> None:
    _use(monkeypatch, is_onednn=is_onednn, block=block)
    left, right = _matrices(37, 48, 83)
    exact, out = left.double() @ right.double(), torch.full((37, 90), 7.0)
    for each in (right, right.T.contiguous().T, torch.cat([right, right], 1)[:, :83]):
        products.multiplication(left)(left, each, out=out[:, :83])
        assert _deviation(out[:, :83], exact) < 1e-6
        assert (out[:, 83:] == 7).all()


@WHOSE
@pytest.mark.parametrize("block", [1, 700, 2**22])
def test_products_are_added_up(monkeypatch: pytest.MonkeyPatch, *, is_onednn: bool, block: int) -> None:
    """As gradients of a head's weight from chunks of tokens."""
    _use(monkeypatch, is_onednn=is_onednn, block=block)
    d_logits, hidden = _matrices(83, 37, 1)[0].T, _matrices(37, 48, 1)[0]
    total = torch.ones(83, 48)
    for _ in range(2):
        products.add_product(total, d_logits.T, hidden)
    assert _deviation(total, 1 + 2 * d_logits.T.double() @ hidden.double()) < 1e-6


@HAS_OPERATOR
def test_what_is_not_finite_stays_so() -> None:
    left, right = _matrices(16, 24, 32)
    left[3, 5], right[7, 9] = float("nan"), float("inf")
    found = multiply_by_onednn(left, right)
    assert found[3].isnan().all()
    assert not found[:3, 9].isfinite().any()
    assert found[4:, :9].isfinite().all()


@HAS_OPERATOR
def test_a_product_with_less_precision_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = torch.ops.mkldnn._linear_pointwise.default

    class Rounds:
        _schema = rounded._schema

        def __call__(self, left: torch.Tensor, *rest: object) -> torch.Tensor:
            return rounded(left.bfloat16().float(), *rest)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch_onednn, "_operator", lambda: Rounds())
    assert "deviates by" in torch_onednn._operator_problem()


def test_another_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_onednn, "_SCHEMA", "mkldnn::_linear_pointwise(Tensor X) -> Tensor Y")
    assert "_linear_pointwise" in torch_onednn._operator_problem()


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_processors_of_intel_keep_mkl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n\nprocessor\t: 1\n")
    assert cpu_vendor(tmp_path / "cpuinfo") == vendor
    monkeypatch.setattr(torch_onednn, "cpu_vendor", lambda _: cpu_vendor(tmp_path / "cpuinfo"))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    found = torch_onednn._machine_problem()
    assert found if vendor == "GenuineIntel" or not has_both else not found
    assert cpu_vendor(tmp_path / "missing") == ""


def test_a_choice_says_why() -> None:
    choice = choose_fp32_products()
    assert choice.is_onednn == (not choice.reason)
