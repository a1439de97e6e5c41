"""Every family's forward and backward as a GPU computes them: its kernels' shapes, dtypes, strides and devices, without
a GPU and without numbers.
"""

from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import varlen

from ds_finetune.config.sections import LoraConfig
from ds_finetune.families.table import FAMILIES
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.activation_memory import install_tiled_mlps
from ds_finetune.model.adapters.lora import AdapterPlacement, install_lora
from ds_finetune.model.adapters.lora_plan import plan_lora
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.skeleton import build_skeleton, full_fragment
from ds_finetune.model.loss.cross_entropy import chunked_cross_entropy
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import TrainedModel, install_loss_head
from ds_finetune.plan.forward import varlen_problem
from ds_finetune.reference.selftest.cells import TINY_MODELS
from tests.fake_cuda import fake_cuda
from tests.model.attention.test_attention import CONFIGS, LENGTHS, WINDOW, WINDOWS

MODELS = {**{name: {"model_type": name, **config} for name, config in CONFIGS.items()}, **TINY_MODELS}
"""The contents of config.json: a model of every family, and further ones."""
FAMILY_NAMES = sorted({tree["model_type"] for tree in MODELS.values()})
SINKS = {name for name, tree in MODELS.items() if FAMILIES[tree["model_type"]].has_sinks}
EXPERTS = {name for name, tree in MODELS.items() if FAMILIES[tree["model_type"]].expert_keys}
LORA = LoraConfig(rank=8)


def _model(
    tree: dict[str, Any], precision: str, *, lora: LoraConfig | None = None, recomputes: bool = True
) -> TrainedModel:
    config = AutoConfig.for_model(**tree)
    lm = build_skeleton(config, attention="sdpa", dtype=PRECISION_DTYPES[precision], device="cuda:0")
    if lora is not None:
        install_lora(lm, plan_lora(config, lora).targets, lora, seed=0, placement=AdapterPlacement(full_fragment))
    install_loss_head(lm, kernel=partial(chunked_cross_entropy, chunk=16))
    lm.train()
    if recomputes:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    model = TrainedModel(lm)
    model.packs_documents = not varlen_problem(tree, precision=precision)
    return model


def _forward_and_backward(model: TrainedModel) -> None:
    """Gradients are where their weights are, in the same dtype."""
    tokens = sum(LENGTHS[0])
    ids = torch.zeros(len(LENGTHS), tokens, dtype=torch.int64, device="cuda")
    positions = torch.zeros(len(LENGTHS) * tokens, dtype=torch.int64, device="cuda")
    loss = model(ForwardRows(ids, ids, ids, LENGTHS, supervised=positions)).loss
    assert (loss.device.type, loss.dtype) == ("cuda", torch.float32)
    loss.backward()
    assert {buffer.device.type for buffer in model.buffers()} <= {"cuda"}
    grads = [(param, param.grad) for param in model.parameters() if param.grad is not None]
    assert grads
    assert all(grad.device == param.device and grad.dtype == param.dtype for param, grad in grads)


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of torch's kernels of GPUs in the order of their calls."""
    found: list[str] = []
    for owner, name in ((varlen, "varlen_attn"), (nn.functional, "grouped_mm"), (torch, "addmm")):
        function = getattr(owner, name)

        @wraps(function)
        def call(*args: Any, function: Any = function, name: str = name, **options: Any) -> Any:
            found.append(name)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, call)
    return found


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_families_in_bf16(name: str, kernel_calls: list[str]) -> None:
    """One call attends to all documents of a layer, grouped products compute all experts, and products of the head are
    added in fp32."""
    with fake_cuda():
        _forward_and_backward(_model(MODELS[name], "bf16", recomputes=name not in SINKS))
    assert ("varlen_attn" in kernel_calls) == (name not in SINKS)
    assert ("grouped_mm" in kernel_calls) == (name in EXPERTS)
    assert "addmm" in kernel_calls


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tiny_model(name: str, precision: str) -> None:
    """torch's shapes of grouped products are known in bf16 alone."""
    if name in EXPERTS and precision != "bf16":
        pytest.skip("torch's function of shapes for grouped products takes bf16 alone")
    with fake_cuda():
        _forward_and_backward(_model(MODELS[name], precision))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "extra"), WINDOWS, ids=str)
def test_windows(name: str, extra: dict[str, Any]) -> None:
    with fake_cuda():
        _forward_and_backward(_model(MODELS[name] | WINDOW | extra, "bf16"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, tree in MODELS.items() if FAMILIES[tree["model_type"]].has_lora])
def test_adapters_of_every_module(name: str) -> None:
    with fake_cuda():
        model = _model(MODELS[name], "bf16", lora=LORA)
        _forward_and_backward(model)
        assert all(param.grad is not None for param in model.parameters() if param.requires_grad)


def test_adapters_of_experts(kernel_calls: list[str]) -> None:
    with fake_cuda():
        _forward_and_backward(_model(MODELS["deepseek_v3"], "bf16", lora=LORA, recomputes=False))
    assert "grouped_mm" in kernel_calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_tiles(name: str) -> None:
    with fake_cuda():
        model = _model(MODELS[name], "bf16")
        install_tiled_mlps(model.lm, tiles=2)
        _forward_and_backward(model)


def test_what_a_gpu_refuses_is_refused() -> None:
    with fake_cuda():
        weight = nn.Parameter(torch.empty(8, 8, device="cuda", dtype=torch.bfloat16))
        given = torch.empty(4, 8, device="cuda", dtype=torch.bfloat16)
        assert given.is_cuda
        (given @ weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device.type == "cuda"
        with pytest.raises(RuntimeError, match=r"two( different)? devices,? cuda:0(,| and) cpu"):
            given + torch.empty(4, 8)
        ends, experts = torch.empty(2, dtype=torch.int32, device="cuda"), given.new_empty(2, 16, 4).transpose(1, 2)
        with pytest.raises(RuntimeError, match="multiple of 16 bytes, got 4"):
            nn.functional.grouped_mm(given[:, :4], experts, offs=ends)
