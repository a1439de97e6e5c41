"""Autograd functions of fused RMSNorm, rotary embedding and SwiGLU. For backward a norm saves its input and one number
per row, a rotary embedding cosines and sines, and SwiGLU gate and up projections. Backward recomputes the rest.
"""

import inspect
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from ds_finetune.model.fused import formulas
from ds_finetune.model.fused.formulas import Rotation

_MOST_KERNELS = 64
"""Maximum number of variants of one kernel that torch.compile may build."""


Kernels = ModuleType | SimpleNamespace
"""A set of fused kernels: the functions of model/fused/formulas.py."""
_KERNELS = ("norm", "norm_backward", "rotate", "gate", "gate_backward")


@cache
def kernels_of(name: str) -> Kernels:
    """The kernels that `model.kernels` selects, `liger` or `compile`. Liger is imported only if selected."""
    if name == "liger":
        return import_module("ds_finetune.foreign.liger_operations")
    assert name == "compile", name
    # Shapes are dynamic, because the numbers of packed rows and of experts' tokens change. torch still
    # compiles additional kernels for size 0, size 1 and strided rows. It raises an error beyond the limit on kernels.
    options: dict[str, Any] = {"fullgraph": True, "dynamic": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        # From torch 2.12 on, torch._dynamo's setting of this limit holds for one thread only, and backward runs in
        # other threads. So it is an argument.
        options["recompile_limit"] = _MOST_KERNELS
    else:
        torch._dynamo.config.recompile_limit = max(_MOST_KERNELS, torch._dynamo.config.recompile_limit)
    return SimpleNamespace(**{name: torch.compile(getattr(formulas, name), **options) for name in _KERNELS})


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    rows = _plain(tensor.reshape(-1, tensor.shape[-1]))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without autograd metadata. torch.compile would build separate kernels for tensors with and without
    gradients, and for each kind of view.
    """
    return tensor.data


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, *inputs: Any) -> torch.Tensor:  # noqa: ANN401
        hidden, weight, eps, ctx.rounds_last = inputs
        out, scale = kernels.norm(_rows(hidden), _plain(weight), eps, ctx.rounds_last)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.kernels = kernels
        return out.view(hidden.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        hidden, weight, scale = ctx.saved_tensors
        saved = _rows(hidden), _plain(weight), scale
        d_hidden, d_weight = ctx.kernels.norm_backward(_rows(grad), saved, ctx.rounds_last, ctx.needs_input_grad[2])
        return None, d_hidden.view(hidden.shape), d_weight, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, rotation: Rotation, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        query, key, cos, sin = map(_plain, tensors)
        ctx.save_for_backward(cos, sin)
        ctx.kernels, ctx.rotation = kernels, rotation
        return kernels.rotate((query, key), (cos, sin), rotation, rotation.is_back)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        arguments = tuple(map(_plain, grads)), ctx.saved_tensors, ctx.rotation
        return None, None, *ctx.kernels.rotate(*arguments, not ctx.rotation.is_back), None, None


class _Gate(torch.autograd.Function):
    """SwiGLU, silu(gate) * up. Inputs are gate and up, or both in one tensor. Kernels may overwrite saved inputs with
    gradients, so a second backward of the same forward raises an error.
    """

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, *parts: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(*parts)
        ctx.kernels = kernels
        return kernels.gate(*(_rows(each).contiguous() for each in parts)).unflatten(0, parts[0].shape[:-1])  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        parts = ctx.saved_tensors
        grads = ctx.kernels.gate_backward(*(_rows(each).contiguous() for each in (grad, *parts)))
        increment_version(parts)
        return None, *(each.view(part.shape) for each, part in zip(grads, parts, strict=True))


norm, rotate, gate = _Norm.apply, _Rotate.apply, _Gate.apply
