"""The head's loss, routed experts and four-bit weights on a GPU: whether their kernels agree, and their times."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bench.gpu.machine import count_waits, device, median_seconds
from bench.gpu.models import DEEPSEEK_V2_LITE, tiny
from bench.gpu.results import Recorder, SkippedError, check_limit
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.cross_entropy import KERNELS
from ds_finetune.model.loss.head_chunks import NeededGradients

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def head(recorder: Recorder, *, is_tiny: bool) -> None:
    """Each kernel of the loss against logits of all tokens in fp32; milliseconds of loss and gradients."""
    shapes = {"1.5B": (4096, 1536, 151936), "V3": (2048, 7168, 129280)}
    if is_tiny:
        shapes = {"tiny": (12, 16, 40)}
    for name, (tokens, width, vocabulary) in shapes.items():
        for kernel in KERNELS:
            with recorder.record(f"{kernel}, {name}: {tokens:,} tokens, vocabulary {vocabulary:,}") as values:
                if kernel == "liger" and (device().type == "cpu" or find_spec("liger_kernel") is None):
                    raise SkippedError("liger-kernel needs a GPU and has to be installed")
                _measure_head(values, kernel, (tokens, width, vocabulary))


def _measure_head(values: dict[str, Any], kernel: str, shape: tuple[int, int, int]) -> None:
    tokens, width, vocabulary = shape
    torch.manual_seed(1)
    hidden = torch.randn(tokens, width, device=device(), dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, width, device=device(), dtype=torch.bfloat16) * width**-0.5
    targets = torch.randint(vocabulary, (tokens,), device=device())
    needed = NeededGradients(hidden=True, weight=True, bias=False)
    seconds = median_seconds(lambda: KERNELS[kernel](hidden, weight, None, targets, needed), repeats=5)
    values |= {"ms": seconds * 1e3, "TFLOP/s": 6 * tokens * width * vocabulary / seconds / 1e12}
    some = slice(0, 256)
    found = KERNELS[kernel](hidden[some], weight, None, targets[some], needed)
    leaves = [hidden[some].float().requires_grad_(), weight.float().requires_grad_()]
    loss = nn.functional.cross_entropy(leaves[0] @ leaves[1].T, targets[some], reduction="sum")
    wanted = torch.autograd.grad(loss, leaves)
    check_limit(values, "loss", abs(float(found.loss_sum / loss.detach()) - 1), limit=1e-3)
    for name, one, other in (("d_hidden", found.d_hidden, wanted[0]), ("d_weight", found.d_weight, wanted[1])):
        assert one is not None
        check_limit(values, name, float((one.float() - other).norm() / other.norm()), limit=2e-2)


def experts(recorder: Recorder, *, is_tiny: bool) -> None:
    """One layer of routed experts by grouped products against transformers' loop over experts in fp32; milliseconds of
    forward and backward, and how often they wait for the GPU.
    """
    config = tiny(DEEPSEEK_V2_LITE) if is_tiny else DEEPSEEK_V2_LITE
    tokens = 24 if is_tiny else 8192
    for precision, dtype in _PRECISIONS.items():
        with recorder.record(f"{precision}, {tokens:,} tokens") as values:
            # Rounded first, so that routers choose the same experts.
            layer = _expert_layer(config, dtype).float()
            given = torch.randn(1, tokens, config["hidden_size"], device=device()).to(dtype)
            few = given[:, :512]
            _choose_experts(layer, "eager")
            wanted = _forward_and_backward(layer, few.float())
            layer.to(dtype)
            _choose_experts(layer, "grouped_mm")
            found = _forward_and_backward(layer, few)
            error = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))
            check_limit(values, "difference", error, limit=1e-4 if dtype == torch.float32 else 5e-2)
            with count_waits() as waits:
                _forward_and_backward(layer, given)
            values["waits for the GPU"] = waits[0] if waits else None
            seconds = median_seconds(partial(_forward_and_backward, layer, given), repeats=5)
            active = config["num_experts_per_tok"] + config["n_shared_experts"]
            flops = 6 * 3 * config["hidden_size"] * config["moe_intermediate_size"] * active * tokens
            values |= {"ms": seconds * 1e3, "TFLOP/s": flops / seconds / 1e12}


def _expert_layer(config: Any, dtype: torch.dtype) -> nn.Module:  # noqa: ANN401 - contents of config.json
    """The MLP of the first layer with routed experts, alone."""
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "vocab_size": 128}
    hf_config = AutoConfig.for_model(**{**config, **sizes})
    torch.manual_seed(3)
    lm = build_skeleton(hf_config, attention="sdpa", dtype=dtype, device=str(device()))
    layer: nn.Module = lm.base_model.layers[1].mlp
    for param in layer.parameters():
        nn.init.normal_(param, std=config["hidden_size"] ** -0.5)
    return layer


def _choose_experts(layer: nn.Module, implementation: str) -> None:
    """Let the experts of the layer be computed by one of transformers' implementations."""
    for module in layer.modules():
        if hasattr(module, "config"):
            config: Any = module.config
            config._experts_implementation = implementation


def _forward_and_backward(layer: nn.Module, hidden: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of the hidden states and of the parameters that have one."""
    given = hidden.detach().requires_grad_()
    trained = [param for name, param in layer.named_parameters() if "experts" in name]
    out = layer(given)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, [given, *trained], torch.ones_like(out))]


def four_bit(recorder: Recorder, *, is_tiny: bool) -> None:
    """A linear module in NF4: its error against the same weights in bf16, and the time of forward and backward."""
    shape, tokens = ((64, 128), 8) if is_tiny else ((3584, 18944), 4096)
    with recorder.record(f"nf4, {shape[0]} x {shape[1]}, {tokens:,} tokens") as values:
        if find_spec("bitsandbytes") is None:
            raise SkippedError("bitsandbytes is not installed")
        from bitsandbytes.nn import Linear4bit

        torch.manual_seed(1)
        outputs, inputs = shape
        plain = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        packed = Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        packed.weight.data = plain.weight.data.clone()
        plain, packed = plain.to(device()), packed.to(device())
        hidden = torch.randn(tokens, shape[1], device=device(), dtype=torch.bfloat16)
        wanted, found = plain(hidden).detach(), packed(hidden).detach()
        # Uniform weights in blocks of 64 lose about 9% of their norm in NF4.
        check_limit(values, "difference", float((found - wanted).float().norm() / wanted.float().norm()), limit=0.15)
        for name, module in (("bf16 ms", plain), ("nf4 ms", packed)):
            given = hidden.clone().requires_grad_()
            seconds = median_seconds(partial(_backward, module, given), repeats=5)
            values[name] = seconds * 1e3


def _backward(module: nn.Module, hidden: torch.Tensor) -> None:
    module(hidden).sum().backward()
