"""Hyper-connections of DeepSeek-V4 (arXiv 2512.24880): the weights that make one hidden state of the residual streams
of a token, and streams of what a sublayer makes of it.

Autograd would keep a copy of all streams in fp32, and a small matrix of each token for each of some forty divisions.
Here only the streams, which the layer keeps anyway, and the products of a token are kept.
"""

from typing import Any

import torch
from torch import nn

from ds_finetune.foreign.transformers_attention import hyper_connection_class


class _Sinkhorn(torch.autograd.Function):
    """Matrices [rows, columns, tokens] whose columns and then rows are divided by their sums, by turns, beginning and
    ending with columns. With the tokens last, each operation goes through memory in order.
    """

    @staticmethod
    def forward(ctx: Any, matrices: torch.Tensor, times: int, eps: float) -> torch.Tensor:  # noqa: ANN401
        found, sums = [], []
        for number in range(2 * times - 1):
            sums.append(matrices.sum(number % 2, keepdim=True) + eps)
            matrices = matrices / sums[-1]
            found.append(matrices)
        ctx.save_for_backward(*found, *sums)
        return matrices

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        number, grad = len(ctx.saved_tensors) // 2, grad.contiguous()
        for each in reversed(range(number)):
            normed, total = ctx.saved_tensors[each], ctx.saved_tensors[number + each]
            grad = (grad - (grad * normed).sum(each % 2, keepdim=True)) / total
        return grad, None, None


class _Mixing(torch.autograd.Function):
    """From streams [batch, tokens, streams, width] the weights `post` and `comb`, and one hidden state of all."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes its inputs by position
        ctx: Any,  # noqa: ANN401
        streams: torch.Tensor,
        fn: torch.Tensor,
        base: torch.Tensor,
        scale: torch.Tensor,
        sizes: tuple[int, float, float],
    ) -> tuple[torch.Tensor, ...]:
        wide = streams.flatten(0, 1).flatten(1).float()
        root = torch.rsqrt(torch.linalg.vecdot(wide, wide)[:, None] / wide.shape[1] + sizes[1])
        products = wide @ fn.float().T
        pre, post, comb = _weights(products * root, base, scale, sizes)
        ctx.save_for_backward(streams, fn, base, scale, products, root)
        ctx.sizes = sizes
        collapsed = (pre[:, None] @ wide.view(len(wide), *streams.shape[2:])).to(streams.dtype)
        return (
            *(part.unflatten(0, streams.shape[:2]) for part in (post, comb)),
            collapsed.view(*streams[:, :, 0].shape),
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        streams, fn, base, scale, products, root = ctx.saved_tensors
        wide, of_one = streams.flatten(0, 1).flatten(1).float(), grads[2].flatten(0, 1).float()
        by_stream = wide.view(len(wide), *streams.shape[2:])
        with torch.enable_grad():
            leaves = [part.detach().requires_grad_() for part in (products, root, base, scale)]
            weights = _weights(leaves[0] * leaves[1], leaves[2], leaves[3], ctx.sizes)
        of_pre = torch.linalg.vecdot(by_stream, of_one[:, None])
        of_weights = [of_pre, *(grad.flatten(0, 1) for grad in grads[:2])]
        of_products, of_root, of_base, of_scale = torch.autograd.grad(weights, leaves, of_weights)
        of_streams = torch.addcmul(of_products @ fn.float(), wide, of_root * root**3, value=-1 / wide.shape[1])
        of_streams.view_as(by_stream).addcmul_(weights[0].detach()[..., None], of_one[:, None])
        of_fn = (of_products.T @ wide).to(fn.dtype) if ctx.needs_input_grad[1] else None
        return of_streams.view_as(streams).to(streams.dtype), of_fn, of_base, of_scale, None


def _weights(
    mixes: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, sizes: tuple[int, float, float]
) -> tuple[torch.Tensor, ...]:
    """`pre` and `post` [tokens, streams] and `comb` [tokens, streams, streams] of transformers 5.23
    (deepseek_v4/modeling_deepseek_v4.py:966-994).
    """
    times, _, eps = sizes
    number = int((1 + mixes.shape[1]) ** 0.5) - 1
    parts = zip(*(each.split([number, number, number**2], -1) for each in (mixes, base)), scale, strict=True)
    pre, post, comb = (mix * factor + bias for mix, bias, factor in parts)
    matrices = comb.T.unflatten(0, (number, number)).contiguous().softmax(1) + eps
    comb = _Sinkhorn.apply(matrices, times, eps).permute(2, 0, 1).contiguous()
    return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


class MixedStreams(nn.Module):
    """Mixed into transformers' hyper-connections."""

    fn: nn.Parameter
    base: nn.Parameter
    scale: nn.Parameter
    hc_sinkhorn_iters: int
    hc_eps: float
    input_norm: Any

    def forward(self, hidden_streams: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As transformers' own."""
        sizes = self.hc_sinkhorn_iters, self.input_norm.eps, self.hc_eps
        return _Mixing.apply(hidden_streams, self.fn, self.base, self.scale, sizes)  # type: ignore[no-any-return]


def install_hyper_connections(lm: nn.Module) -> None:
    """Let the hyper-connections of a model keep no more than their inputs, in place."""
    kind = hyper_connection_class()
    for module in lm.modules():
        if type(module) is kind:
            module.__class__ = type(f"{MixedStreams.__name__}{kind.__name__}", (MixedStreams, kind), {})
