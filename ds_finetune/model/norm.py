"""RMSNorm of DeepSeek-V4, with or without a weight. For backward it saves only its input and one number per row."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_finetune.foreign.transformers_elementwise import norm_classes


class _WideNorm(torch.autograd.Function):
    """RMSNorm of rows [..., width] with a weight [width] or none. It is computed in fp32 and rounded at the end."""

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
            # On a CPU, a matrix product with a row is several times faster than a sum over rows.
            of_weight = (scale.flatten() @ products.flatten(0, -2)).to(weight.dtype)
        return (
            torch.addcmul(grad if weight is None else grad * weight, wide, root).mul_(scale).to(rows.dtype),
            of_weight,
            None,
        )


def install_norms(lm: nn.Module) -> None:
    """Make the norms of DeepSeek-V4 save little more than their inputs for backward, in place."""
    weighted, plain = norm_classes()
    forwards = {
        weighted: lambda self, x: _WideNorm.apply(x, self.weight, self.variance_epsilon),
        plain: lambda self, x: _WideNorm.apply(x, None, self.eps),
    }
    for module in lm.modules():
        kind = type(module)
        if (forward := forwards.get(kind)) is not None:
            module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
