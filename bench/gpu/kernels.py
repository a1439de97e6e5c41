"""Kernels at the sizes of real models against the same in fp32: attention by document, the loss of the head, and
routed experts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.gpu.machine import device, median_seconds, waits_for_gpu
from bench.gpu.models import DEEPSEEK_V2_LITE, tiny
from bench.gpu.results import Recorder, SkippedError, Values
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.attention.by_document import attend_by_document
from ds_finetune.model.attention.kernels import pack_documents
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.cross_entropy import chunked_cross_entropy, liger_cross_entropy
from ds_finetune.model.loss.head_chunks import HeadInputs, NeededGradients

_HALF_LIMIT = 3e-2
"""Largest difference from fp32, relative to the largest number, of attention and its gradients in half precision."""


class Heads(NamedTuple):
    """Sizes of an attention."""

    queries: int
    keys: int
    width: int
    value_width: int


HEADS = {
    "llama 8B": Heads(32, 8, 128, 128),
    "qwen 1.5B": Heads(12, 2, 128, 128),
    "latent 16B": Heads(16, 16, 192, 128),
    "width 64": Heads(8, 8, 64, 64),
    "width 256": Heads(4, 1, 256, 256),
}
_LENGTHS = ((300, 77, 647), (1024,), (1, 1, 510, 512))
_TINY_LENGTHS = ((5, 9, 2), (16,), (1, 1, 14))


class _Module(nn.Module):
    """What attention asks a module for."""

    def __init__(self, *, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


@dataclass(frozen=True)
class _Inputs:
    parts: tuple[torch.Tensor, ...]
    """Query, key and value [rows, heads, tokens, width], and the gradient of the result [rows, tokens, heads, width].
    """
    documents: tuple[tuple[int, ...], ...]

    def to(self, dtype: torch.dtype) -> "_Inputs":
        return _Inputs(tuple(part.to(dtype) for part in self.parts), self.documents)


def _draw(heads: Heads, documents: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> _Inputs:
    rows, tokens = len(documents), sum(documents[0])
    torch.manual_seed(1)
    sizes = ((heads.queries, heads.width), (heads.keys, heads.width), (heads.keys, heads.value_width))
    parts = [torch.randn(rows, tokens, *size, device=device(), dtype=dtype).transpose(1, 2) for size in sizes]
    grad = torch.randn(rows, tokens, heads.queries, heads.value_width, device=device(), dtype=dtype)
    return _Inputs((*parts, grad), documents)


def _run(
    inputs: _Inputs, *, is_packed: bool, window: int | None = None, is_causal: bool = True
) -> tuple[torch.Tensor, ...]:
    """Result and gradients of query, key and value."""
    parts = [part.detach().requires_grad_() for part in inputs.parts[:3]]
    packed = pack_documents(inputs.documents, device()) if is_packed else None
    query, key, value = parts
    out, _ = attend_by_document(
        _Module(is_causal=is_causal),
        query,
        key,
        value,
        None,
        scaling=query.shape[3] ** -0.5,
        documents=inputs.documents,
        sliding_window=window,
        packed=packed,
    )
    return out, *torch.autograd.grad(out, parts, inputs.parts[3])


def _largest_difference(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Relative to the largest number of each tensor; the largest of all."""
    pairs = [(one.detach().float(), other.detach().float()) for one, other in zip(found, wanted, strict=True)]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def kernels(recorder: Recorder, folder: Path, *, is_tiny: bool) -> None:
    """Attention, the loss of the head, and routed experts."""
    for measured in (_attention, _head, _experts):
        measured(recorder, is_tiny=is_tiny)


def _attention(recorder: Recorder, *, is_tiny: bool) -> None:
    """One call for all documents, and a call for each, against a call for each in fp32."""
    lengths, window = (_TINY_LENGTHS, 4) if is_tiny else (_LENGTHS, 128)
    kinds: dict[str, dict[str, Any]] = {
        "causal": {},
        f"window {window}": {"window": window},
        "both directions": {"is_causal": False},
    }
    for name, kind, dtype in itertools.product(HEADS, kinds, (torch.bfloat16, torch.float16)):
        with recorder.record(f"attention: {name}, {kind}, {str(dtype).removeprefix('torch.')}") as values:
            inputs = _draw(HEADS[name], lengths, dtype)
            wanted = _run(inputs.to(torch.float32), is_packed=False, **kinds[kind])
            found = _run(inputs, is_packed=False, **kinds[kind])
            values.check("by document", _largest_difference(found, wanted), limit=_HALF_LIMIT)
            if device().type == "cpu":
                raise SkippedError("the kernel for all documents runs only on GPUs")
            found = _run(inputs, is_packed=True, **kinds[kind])
            values.check("varlen", _largest_difference(found, wanted), limit=_HALF_LIMIT)


_LOSSES = {"chunked": chunked_cross_entropy, "liger": liger_cross_entropy}
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _head(recorder: Recorder, *, is_tiny: bool) -> None:
    """Each kernel of the loss against logits of all tokens in fp32; milliseconds of loss and gradients."""
    shapes = {"1.5B": (4096, 1536, 151936), "V3": (2048, 7168, 129280)}
    if is_tiny:
        shapes = {"tiny": (12, 16, 40)}
    for name, (tokens, width, vocabulary) in shapes.items():
        for kernel in _LOSSES:
            with recorder.record(f"head: {kernel}, {name}: {tokens:,} tokens, vocabulary {vocabulary:,}") as values:
                if kernel == "liger" and (device().type == "cpu" or find_spec("liger_kernel") is None):
                    raise SkippedError("liger-kernel needs a GPU and has to be installed")
                _measure_head(values, kernel, (tokens, width, vocabulary))


def _measure_head(values: Values, kernel: str, shape: tuple[int, int, int]) -> None:
    tokens, width, vocabulary = shape
    torch.manual_seed(1)
    hidden = torch.randn(tokens, width, device=device(), dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, width, device=device(), dtype=torch.bfloat16) * width**-0.5
    targets = torch.randint(vocabulary, (tokens,), device=device())
    needed = NeededGradients(hidden=True, weight=True, bias=False)
    seconds = median_seconds(lambda: _LOSSES[kernel](HeadInputs(hidden, weight, None, targets), needed), repeats=5)
    values |= {"ms": seconds * 1e3, "TFLOP/s": 6 * tokens * width * vocabulary / seconds / 1e12}
    some = slice(0, 256)
    found = _LOSSES[kernel](HeadInputs(hidden[some], weight, None, targets[some]), needed)
    leaves = [hidden[some].float().requires_grad_(), weight.float().requires_grad_()]
    loss = nn.functional.cross_entropy(leaves[0] @ leaves[1].T, targets[some], reduction="sum")
    wanted = torch.autograd.grad(loss, leaves)
    values.check("loss", abs(float(found.loss / loss.detach()) - 1), limit=1e-3)
    for name, one, other in zip(("d_hidden", "d_weight"), found.gradients, wanted, strict=False):
        assert one is not None
        values.check(name, float((one.float() - other).norm() / other.norm()), limit=2e-2)


def _experts(recorder: Recorder, *, is_tiny: bool) -> None:
    """One layer of routed experts by grouped products against transformers' loop over experts in fp32; milliseconds of
    forward and backward, and how often they wait for the GPU.
    """
    config = tiny(DEEPSEEK_V2_LITE) if is_tiny else DEEPSEEK_V2_LITE
    tokens = 24 if is_tiny else 8192
    for precision, dtype in _PRECISIONS.items():
        with recorder.record(f"experts: {precision}, {tokens:,} tokens") as values:
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
            values.check("difference", error, limit=1e-4 if dtype == torch.float32 else 5e-2)
            with waits_for_gpu() as waits:
                _forward_and_backward(layer, given)
            values["waits for the GPU"] = waits.total()
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
