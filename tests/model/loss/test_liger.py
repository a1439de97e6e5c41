"""Liger's fused loss equals the chunked one: on a GPU where there is one, by Triton's interpreter elsewhere."""

import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finetune.model.loss.cross_entropy import HeadInputs, NeededGradients, liger_cross_entropy
from tests.conftest import ROOT
from tests.model.fused.fused_kernels import NEEDS_INTERPRETER

CASES = """
import sys
import torch
from ds_finetune.model.loss import cross_entropy as ce

device, worst = sys.argv[1], 0.0
for tokens, width, vocabulary, bias in ((37, 16, 300, False), (5, 24, 1030, True), (1, 8, 17, False), (0, 8, 17, True)):
    torch.manual_seed(tokens)
    make = lambda *shape: torch.randn(*shape, device=device)
    given = make(tokens, width), make(vocabulary, width), make(vocabulary) if bias else None
    head = ce.HeadInputs(*given, torch.randint(0, vocabulary, (tokens,), device=device))
    for needed in (ce.NeededGradients(True, True, bias), ce.NeededGradients(True, False, False), ce.NeededGradients(False, False, False)):
        wanted, found = ce.chunked_cross_entropy(head, needed, chunk=8), ce.liger_cross_entropy(head, needed, chunk=8)
        assert found.sums[1].item() == wanted.sums[1].item()
        assert found.sums[0].item() == found.loss.item()
        assert abs(found.loss - wanted.loss) <= 1e-6 * wanted.loss.abs(), (found.loss, wanted.loss)
        for mine, theirs in zip(found.gradients, wanted.gradients, strict=True):
            assert (mine is None) == (theirs is None)
            if theirs is not None and theirs.numel():
                worst = max(worst, float((mine - theirs).norm() / theirs.norm()))
assert worst < 1e-5, worst
print("worst", worst)
"""


@pytest.mark.parametrize(("hip", "warps"), [(None, 32), ("7.0", 16)])
def test_a_block_has_as_many_threads_as_the_gpu_allows(
    hip: str | None, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 warps of 64 threads, as AMD's GPUs have them, are more than 1,024."""
    launched: list[dict[str, Any]] = []
    kernel = {(2,): lambda **given: launched.append(given)}
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(next_power_of_2=lambda number: number))
    stub = SimpleNamespace(liger_cross_entropy_kernel=kernel)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.cross_entropy", stub)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    targets = torch.zeros(2, dtype=torch.int64)
    head = HeadInputs(torch.zeros(2, 8), torch.zeros(16, 8), None, targets)
    liger_cross_entropy(head, NeededGradients(False, False, False), chunk=4)
    assert [given["num_warps"] for given in launched] == [warps]


@NEEDS_INTERPRETER
def test_liger_equals_the_chunked_loss() -> None:
    if find_spec("liger_kernel") is None:
        pytest.skip("liger-kernel is not installed: pip install -e .[test]")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    environ = os.environ | ({} if device == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        [sys.executable, "-c", CASES, device], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
