"""Operations that a layer dispatches in forward, and in backward with full recomputation. An operation is about one
launch on a GPU; views and empty tensors are none.

The counts of layers are differences between models of four and three of them, on fake tensors. A fused operation counts
once, and so does each launch of Liger where it is installed, with the copies and sums that it makes beside it.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.torch_nn import fake_tensors
from ds_finetune.model.activation_memory import recompute_layers
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.fused import formulas, install
from ds_finetune.model.loss.cross_entropy import chunked_cross_entropy
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import LossHead, TrainedModel, install_loss_head
from ds_finetune.model.parallel.expert import compute_shared_experts_ahead
from ds_finetune.plan.forward import head_chunk

NOT_LAUNCHED = {"prim::device", "aten::_unsafe_view", "aten::detach"}
DENSE, LITE = "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B", "deepseek-ai--DeepSeek-V2-Lite"
Counts = tuple[int, int]


class Launches(TorchDispatchMode):
    """Counts operations that compute something; a fused one counts itself."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not (is_view or self.is_fused or func.name() in NOT_LAUNCHED or "empty" in func.name()):
            self.counts[func.name()] += 1
        return result

    def count(self, name: str, compute: Callable[[], Any]) -> Any:
        self.is_fused = True
        result = compute()
        self.is_fused = False
        self.counts[name] += 1
        return result


class OneLaunch:
    """The formulas, each as one launch of the pass that is counted now."""

    now: Launches

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.now.count(name, lambda: getattr(formulas, name)(*args))


@contextmanager
def ligers_launches(counted: OneLaunch, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Liger's functions, whose kernels compute nothing on fake tensors."""
    from liger_kernel.ops import rms_norm, rope, swiglu

    class Kernel:
        def __getitem__(self, _: Any) -> Callable[..., Any]:
            return lambda *_, **__: counted.now.count("a kernel", lambda: None)

    for module in (rms_norm, rope, swiglu):
        for name in vars(module):
            if name.endswith(("_kernel", "_kernel_tiled", "_triton_rope")):
                monkeypatch.setattr(module, name, Kernel())
    from ds_finetune.foreign import liger_operations

    yield liger_operations


def launches(tree: dict[str, Any], counted: OneLaunch, fused: Any) -> tuple[Counter[str], Counter[str]]:
    """Of a forward and its backward with the kernels `fused`, or None."""
    hf_config = AutoConfig.for_model(**tree)
    kernel = partial(chunked_cross_entropy, chunk=head_chunk(hf_config.vocab_size, precision="bf16", device="cuda"))
    with fake_tensors(), patch.object(install, "kernels_of", lambda _: fused):
        lm = build_skeleton(hf_config, attention="sdpa", dtype=torch.bfloat16, device="cpu")
        install_loss_head(lm, kernel=kernel, objective=LossHead.objective)
        lm.train()
        install.install_fused(lm, "torch" if fused is None else "a test")
        recompute_layers(lm, is_selective=False)
        compute_shared_experts_ahead(lm)
        model = TrainedModel(lm)
        model.packs_documents = True
        ids = torch.zeros(1, 256, dtype=torch.int64)
        rows = ForwardRows(ids, ids, ids, ((64, 192),), supervised=ids.flatten())
        with Launches() as forward:
            counted.now = forward
            loss = model(rows).loss
        with Launches() as backward:
            counted.now = backward
            loss.backward()
        return forward.counts, backward.counts


def of_a_layer(tree: dict[str, Any], counted: OneLaunch, fused: Any = None) -> Counts:
    more, fewer = (launches(tree | {"num_hidden_layers": n}, counted, fused) for n in (4, 3))
    forward, backward = (sum(a.values()) - sum(b.values()) for a, b in zip(more, fewer, strict=True))
    return forward, backward


def config(shared_data: Path, name: str) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((shared_data / "configs" / name / "config.json").read_text())
    return tree


@pytest.mark.parametrize(
    ("name", "single", "fused"), [(DENSE, (38, 112), (15, 44)), (LITE, (70, 184), (41, 93))], ids=["dense", "v2_lite"]
)
def test_a_layer_dispatches(name: str, single: Counts, fused: Counts, shared_data: Path) -> None:
    counted = OneLaunch()
    assert of_a_layer(config(shared_data, name), counted) == single
    assert of_a_layer(config(shared_data, name), counted, counted) == fused


@pytest.mark.parametrize(("name", "fused"), [(DENSE, (16, 51)), (LITE, (43, 108))], ids=["dense", "v2_lite"])
def test_a_layer_dispatches_with_ligers_kernels(
    name: str, fused: Counts, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("liger_kernel") is None or find_spec("triton") is None:
        pytest.skip("liger-kernel is not installed: pip install -e .[gpu]")
    counted = OneLaunch()
    with ligers_launches(counted, monkeypatch) as liger:
        assert of_a_layer(config(shared_data, name), counted, liger) == fused
