"""Attention on a GPU: whether its kernels agree, and how long they take."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.machine import count_kernels, device, median_seconds
from bench.gpu.models import DEEPSEEK_V2_LITE, QWEN2_1B
from bench.gpu.results import Recorder, SkippedError, check_limit
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.attention.by_document import attend_by_document
from ds_finetune.model.attention.kernels import attend_document, pack_documents, packs_documents

_HALF_LIMIT = 3e-2
"""Largest difference from fp32, relative to the largest number, of attention and its gradients in half precision."""


class Heads(NamedTuple):
    """Sizes of an attention."""

    queries: int
    keys: int
    width: int
    value_width: int

    @property
    def operations(self) -> int:
        """FLOPs of forward and backward for each pair of tokens that attend to each other: two products forward and
        five backward.
        """
        products = 2 * self.queries
        return products * (self.width + self.value_width) + products * (3 * self.width + 2 * self.value_width)


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


def parity(recorder: Recorder, *, is_tiny: bool) -> None:
    """One call for all documents, and a call for each, against a call for each in fp32."""
    with recorder.record("the choice for bf16 models by their device") as values:
        for config in (QWEN2_1B, DEEPSEEK_V2_LITE):
            hf_config = AutoConfig.for_model(**config)
            is_packed = packs_documents("sdpa", hf_config, device=device().type, precision="bf16")
            values[str(config["model_type"])] = "varlen" if is_packed else "by document"
    lengths, window = (_TINY_LENGTHS, 4) if is_tiny else (_LENGTHS, 128)
    kinds: dict[str, dict[str, Any]] = {
        "causal": {},
        f"window {window}": {"window": window},
        "both directions": {"is_causal": False},
    }
    for name, kind, dtype in itertools.product(HEADS, kinds, (torch.bfloat16, torch.float16)):
        with recorder.record(f"{name}, {kind}, {str(dtype).removeprefix('torch.')}") as values:
            inputs = _draw(HEADS[name], lengths, dtype)
            wanted = _run(inputs.to(torch.float32), is_packed=False, **kinds[kind])
            found = _run(inputs, is_packed=False, **kinds[kind])
            check_limit(values, "by document", _largest_difference(found, wanted), limit=_HALF_LIMIT)
            _check_for_gpu()
            found = _run(inputs, is_packed=True, **kinds[kind])
            check_limit(values, "varlen", _largest_difference(found, wanted), limit=_HALF_LIMIT)


def _check_for_gpu() -> None:
    if device().type == "cpu":
        raise SkippedError("the kernel for all documents runs only on GPUs")


def speed(recorder: Recorder, *, is_tiny: bool) -> None:
    """Milliseconds of forward and backward of one layer: by document, and all documents at once."""
    shapes = {
        "4 rows of 11 documents": ((372,) * 10 + (376,),) * 4,
        "1 row of 11 documents": ((372,) * 10 + (376,),),
        "1 document of 16,384 tokens": ((16384,),),
    }
    tiny = {name: tuple(row[:2] for row in documents) for name, documents in list(shapes.items())[:1]}
    tiny = {name: tuple(tuple(length // 100 for length in row) for row in rows) for name, rows in tiny.items()}
    chosen = tiny if is_tiny else shapes
    for name, shape in itertools.product(("llama 8B", "qwen 1.5B", "latent 16B"), chosen):
        with recorder.record(f"{name}, {shape}") as values:
            inputs = _draw(HEADS[name], chosen[shape], torch.bfloat16)
            _time(values, "by document", inputs, HEADS[name])
            _check_for_gpu()
            _time(values, "varlen", inputs, HEADS[name])


def _time(values: dict[str, Any], kind: str, inputs: _Inputs, heads: Heads) -> None:
    """Add the time, speed and kernels of one layer to `values`."""
    pairs = sum(length * length / 2 for row in inputs.documents for length in row)
    work = partial(_run, inputs, is_packed=kind == "varlen")
    seconds = median_seconds(work, repeats=10)
    values[f"{kind} ms"] = seconds * 1e3
    values[f"{kind} TFLOP/s"] = heads.operations * pairs / seconds / 1e12
    values[f"{kind} kernels"] = count_kernels(work)


def latent(recorder: Recorder, *, is_tiny: bool) -> None:
    """The kernels for values narrower than keys (192 and 128 columns) in one document: time and difference from fp32.

    The package takes `padded` on GPUs (model/attention/kernels.py).
    """
    heads = Heads(2, 2, 24, 16) if is_tiny else HEADS["latent 16B"]
    kernels: tuple[tuple[bool, SDPBackend | None], ...] = (
        (True, None),
        (True, SDPBackend.FLASH_ATTENTION),
        (True, SDPBackend.CUDNN_ATTENTION),
        (False, SDPBackend.CUDNN_ATTENTION),
        (False, SDPBackend.EFFICIENT_ATTENTION),
        (False, None),
    )
    for tokens in (16,) if is_tiny else (512, 4096, 16384):
        inputs = _draw(heads, ((tokens,),), torch.bfloat16)
        wanted = _narrow(is_padded=False)(inputs.to(torch.float32)) if tokens <= 4096 else None
        for is_padded, backend in kernels:
            by = f" by {backend.name.lower()}" if backend else ""
            with recorder.record(f"{'padded' if is_padded else 'as they are'}{by}, {tokens:,} tokens") as values:
                if backend and device().type == "cpu":
                    raise SkippedError("a kernel of GPUs")
                work = _narrow(backend, is_padded=is_padded)
                _check_difference(values, work(inputs), wanted)
                seconds = median_seconds(partial(work, inputs), repeats=10)
                values["ms"] = seconds * 1e3
                values["TFLOP/s"] = heads.operations * tokens * tokens / 2 / seconds / 1e12


def _check_difference(
    values: dict[str, Any], found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor] | None
) -> None:
    """Nothing where the numbers in fp32 are not known."""
    if wanted is not None:
        check_limit(values, "difference", _largest_difference(found, wanted), limit=_HALF_LIMIT)


def _narrow(backend: SDPBackend | None = None, *, is_padded: bool) -> Callable[[_Inputs], tuple[torch.Tensor, ...]]:
    """Result and gradients with values padded or as they are, with torch held to `backend` where one is given."""

    def run(inputs: _Inputs) -> tuple[torch.Tensor, ...]:
        parts = [part.detach().requires_grad_() for part in inputs.parts[:3]]
        with sdpa_kernel(backend) if backend is not None else torch.enable_grad():
            out = attend_document(*parts, is_padded=is_padded, scale=parts[0].shape[3] ** -0.5, is_causal=True)
            return out, *torch.autograd.grad(out, parts, inputs.parts[3].transpose(1, 2))

    return run


def matmul(recorder: Recorder, *, is_tiny: bool) -> None:
    """What this GPU reaches in a plain bf16 product, which every other number is a share of."""
    size = 64 if is_tiny else 8192
    with recorder.record(f"bf16 product of {size} x {size} x {size}") as values:
        one, other = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
        seconds = median_seconds(lambda: functional.linear(one, other), repeats=20)
        values["TFLOP/s"] = 2 * size**3 / seconds / 1e12
