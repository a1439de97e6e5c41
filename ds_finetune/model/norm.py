"""RMSNorm of DeepSeek-V4, with a weight or without, that keeps its input and a number for each row."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_finetune.foreign.transformers_elementwise import norm_classes


class _WideNorm(torch.autograd.Function):
    """Rows [..., width] over their root mean squares, times a weight [width] or none; in fp32, rounded at the end."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:  # noqa: ANN401
        wide = rows.float()
        scale = torch.rsqrt(torch.linalg.vecdot(wide, wide)[..., None] / wide.shape[-1] + eps)
        ctx.save_for_backward(rows, weight, scale)
        return (wide * scale if weight is None else (wide * scale).mul_(weight)).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        rows, weight, scale = ctx.saved_tensors
        wide, grad = rows.float(), grad.float()
        products, of_weight = grad * wide, None
        of_scale = products.sum(-1) if weight is None else products @ weight.float()
        root = of_scale[..., None] * scale**2 / -wide.shape[-1]
        if ctx.needs_input_grad[1]:
            # A product with a row is several times as fast on a CPU as a sum over rows.
            of_weight = (scale.flatten() @ products.flatten(0, -2)).to(weight.dtype)
        return (
            torch.addcmul(grad if weight is None else grad * weight, wide, root).mul_(scale).to(rows.dtype),
            of_weight,
            None,
        )


def install_norms(lm: nn.Module) -> None:
    """Let norms of DeepSeek-V4 keep their inputs only, in place."""
    weighted, plain = norm_classes()
    forwards = {
        weighted: lambda self, x: _WideNorm.apply(x, self.weight, self.variance_epsilon),
        plain: lambda self, x: _WideNorm.apply(x, None, self.eps),
    }
    for module in lm.modules():
        kind = type(module)
        if (forward := forwards.get(kind)) is not None:
            module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
