"""The norm of gradients on CPUs, of which a part at a time is fp64."""

import ast
import inspect

import pytest
import torch
from deepspeed.runtime.zero import stage3

from ds_finetune.engine.patches import deepspeed_waits
from ds_finetune.engine.patches.deepspeed_waits import _blocks_of, _sum_of_squares
from tests.fake_cuda import fake_cuda


@pytest.mark.parametrize("numbers", [7, 100, 2**18])
def test_the_norm_in_blocks_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(deepspeed_waits, "_NORM_NUMBERS", numbers)
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(shape, generator=generator) for shape in ((10, 10), (33,), (0,), (4, 5, 6))]
    gradients += [gradients[0].T, gradients[1].bfloat16()]
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert _sum_of_squares(gradients).item() == pytest.approx(exact, rel=1e-14)
    gradients[3][1, 2, 3] = float("nan")
    assert _sum_of_squares(gradients).isnan()


def test_a_gpu_copies_no_large_gradient_whole() -> None:
    """To fp64, in which it would take four times the memory of one in bf16."""
    with fake_cuda():
        gradient = torch.empty(3 * 2**25 + 8, device="cuda", dtype=torch.bfloat16)
        blocks = _blocks_of(gradient)
        assert {block.device.type for block in blocks} == {"cuda"}
        assert [len(block) for block in blocks] == [2**25, 2**25, 2**25, 8]
        assert len(_blocks_of(gradient[:8])) == 1


def test_a_backward_at_stage_3_ends_when_gradients_are_reduced() -> None:
    """The step of ZeRO-3 has no other wait for the stream of reductions, since `has_overflow` is replaced."""
    tree = ast.parse(inspect.getsource(stage3))
    name = "independent_gradient_partition_epilogue"
    [epilogue] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    calls = [ast.unparse(node) for node in epilogue.body]
    wait = "if not get_accelerator().resolves_data_dependency():\n    self.reduce_and_partition_stream.synchronize()"
    assert wait in calls
    assert calls.index(wait) > max(number for number, call in enumerate(calls) if "__reduce_and_partition" in call)
