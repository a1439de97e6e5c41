"""Norms and hyper-connections of DeepSeek-V4 (arXiv 2512.24880). Hyper-connections merge a token's residual streams
into one hidden state, and distribute a sublayer's output over the streams.

Autograd would save an fp32 copy of all streams. About forty divisions balance the mixing weights, and
autograd would save a small matrix per token for each of them. The functions here save the streams, which the layer
saves anyway, and one row of products per token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ds_finetune.foreign.transformers_attention import stream_classes
from ds_finetune.foreign.transformers_elementwise import norm_classes

_Backward = Callable[..., torch.Tensor]


class _StreamSizes(NamedTuple):
    streams: int
    times: int
    """How often the mixing weights `comb` are divided by their column sums. They are divided by row sums once less."""
    eps: float
    norm_eps: float


class _Mixing(torch.autograd.Function):
    """Merges residual streams [batch, tokens, streams, width] into one hidden state. If the projection `fn` has columns
    for `post` and `comb`, also returns `post`, the factor of the sublayer's output in each stream, and the streams
    mixed by `comb`.
    """

    @staticmethod
    def forward(ctx: Any, streams: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        fn, base, scale, sizes = given
        wide = streams.flatten(0, 1).flatten(1).float()
        products = wide @ fn.float().T
        root = torch.rsqrt(torch.linalg.vector_norm(wide, dim=1, keepdim=True) ** 2 / wide.shape[1] + sizes.norm_eps)
        weights, _ = _weights(torch.addcmul(base, products * root, _by_column(scale, sizes)), sizes)
        ctx.save_for_backward(streams, fn, base, scale, products, root)
        ctx.sizes = sizes
        pre, *others = (each.unflatten(0, streams.shape[:2]) for each in weights)
        outputs = [(pre[:, :, None] @ wide.view(streams.shape))[:, :, 0].to(streams.dtype)]
        if others:
            post, comb = others
            outputs += [post, comb.to(streams.dtype).mT @ streams]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        streams, fn, base, scale, products, root = ctx.saved_tensors
        of_one, *of_others = (grad.flatten(0, 1) for grad in grads)
        flat, of_one = streams.flatten(0, 1), of_one[:, None].float()
        wide, mixes, factors = flat.flatten(1).float(), products * root, _by_column(scale, ctx.sizes)
        (pre, *others), backward = _weights(torch.addcmul(base, mixes, factors), ctx.sizes)
        of_weights = [(of_one @ wide.view(flat.shape).mT)[:, 0]]
        if others:
            of_post, of_mixed = of_others
            of_weights += [of_post, (flat @ of_mixed.mT).float()]
            d_streams = others[1] @ of_mixed.float()
        else:
            d_streams = torch.zeros_like(flat, dtype=torch.float32)
        of_sums = backward(*of_weights)
        of_mixes = of_sums * factors
        of_products = of_mixes * root
        of_root = torch.linalg.vecdot(of_mixes, mixes)[:, None] * root**2
        d_streams.flatten(1).addmm_(of_products, fn.float()).addcmul_(wide, of_root, value=-1 / wide.shape[1])
        d_streams.addcmul_(pre[:, :, None], of_one)
        of_fn = (of_products.T @ wide).to(fn.dtype) if ctx.needs_input_grad[1] else None
        by_kind = (of_sums * mixes).sum(0).split(_columns(ctx.sizes)[: len(scale)])
        of_scale = torch.stack([part.sum() for part in by_kind])
        return d_streams.view(streams.shape).to(streams.dtype), of_fn, of_sums.sum(0), of_scale, None


class _Adding(torch.autograd.Function):
    """Computes residual streams after a sublayer, [batch, tokens, streams, width], in place: the mixed streams plus the
    sublayer's output [batch, tokens, width] times each stream's weight in `post`.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        mixed, out, post = (part.to(inputs[0].dtype) for part in inputs)
        ctx.save_for_backward(out, post)
        ctx.mark_dirty(inputs[0])
        return mixed.addcmul_(post[..., None], out[:, :, None])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        out, post = ctx.saved_tensors
        return grad, (post[:, :, None] @ grad)[:, :, 0], (out[:, :, None] @ grad.mT)[:, :, 0].float()


def _columns(sizes: _StreamSizes) -> list[int]:
    """Numbers of columns of a hyper-connection's projection: for merging (`pre`), output (`post`) and mixing
    (`comb`).
    """
    return [sizes.streams, sizes.streams, sizes.streams**2]


def _by_column(scale: torch.Tensor, sizes: _StreamSizes) -> torch.Tensor:
    return torch.cat([factor.expand(columns) for factor, columns in zip(scale, _columns(sizes), strict=False)])


def _weights(sums: torch.Tensor, sizes: _StreamSizes) -> tuple[tuple[torch.Tensor, ...], _Backward]:
    """A hyper-connection's weights `pre`, `post` [tokens, streams] and `comb` [tokens, streams, streams], or only `pre`
    (transformers 5.23, deepseek_v4/modeling_deepseek_v4.py:966-994). Also returns a function that maps their gradients
    to the gradient of `sums`.
    """
    number, eps = sizes.streams, sizes.eps
    pre = sums[:, :number].sigmoid()
    if sums.shape[1] == number:
        return (pre + eps,), lambda of_pre: of_pre * pre * (1 - pre)
    post = sums[:, number : 2 * number].sigmoid()
    mixing = sums[:, 2 * number :].T.unflatten(0, (number, number)).contiguous().softmax(1)
    comb, unbalanced = _balanced(mixing + eps, sizes)

    def backward(of_pre: torch.Tensor, of_post: torch.Tensor, of_comb: torch.Tensor) -> torch.Tensor:
        grad = unbalanced(of_comb.permute(1, 2, 0).contiguous())
        grad = mixing * (grad - (grad * mixing).sum(1, keepdim=True))
        of_both = of_pre * pre * (1 - pre), 2 * of_post * post * (1 - post)
        return torch.cat([*of_both, grad.flatten(0, 1).T], -1)

    return (pre + eps, 2 * post, comb.permute(2, 0, 1).contiguous()), backward


def _balanced(matrices: torch.Tensor, sizes: _StreamSizes) -> tuple[torch.Tensor, _Backward]:
    """Divide matrices [rows, columns, tokens] alternately by their column and row sums, beginning and ending with
    columns. Also returns the backward function, which may be called once.

    Forward and backward change the matrices in place. Backward multiplies by the sums again, which touches less memory
    than saved copies. With tokens last, operations read memory in order.
    """
    sums = []
    for number in range(2 * sizes.times - 1):
        sums.append(matrices.sum(number % 2, keepdim=True).add_(sizes.eps))
        matrices.div_(sums[-1])

    def backward(grad: torch.Tensor) -> torch.Tensor:
        for number in reversed(range(len(sums))):
            grad.sub_((grad * matrices).sum(number % 2, keepdim=True)).div_(sums[number])
            matrices.mul_(sums[number])
        return grad

    return matrices, backward


class _WideNorm(torch.autograd.Function):
    """RMSNorm of [..., width], computed in fp32 and rounded at the end. The weight [width] may be None."""

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


def _merge(module: Any, streams: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 - of transformers
    """Forward of a hyper-connection before a sublayer. Returns the merged state, `post` (the output's factor in each
    stream), and the streams mixed by `comb`.
    """
    sizes = _StreamSizes(module.hc_mult, module.hc_sinkhorn_iters, module.hc_eps, module.input_norm.eps)
    return _Mixing.apply(streams, module.fn, module.base, module.scale, sizes)  # type: ignore[no-any-return]


def _merge_last(module: Any, streams: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - of transformers
    """Forward of the module that merges the residual streams after the last layer into one hidden state."""
    sizes = _StreamSizes(module.hc_mult, 0, module.eps, module.input_norm.eps)
    return _Mixing.apply(streams, module.hc_fn, module.hc_base, module.hc_scale, sizes)[0]  # type: ignore[no-any-return]


def _run_layer(
    layer: Any,  # noqa: ANN401 - of transformers
    hidden_states: torch.Tensor,
    input_ids: torch.Tensor | None = None,
    **options: Any,  # noqa: ANN401
) -> torch.Tensor:
    """Forward of a decoder layer. Returns its residual streams (transformers 5.23,
    deepseek_v4/modeling_deepseek_v4.py:1175-1199).
    """
    one, post, mixed = layer.attn_hc(hidden_states)
    out, _ = layer.self_attn(layer.input_layernorm(one), **options)
    one, post, mixed = layer.ffn_hc(_Adding.apply(mixed, out, post))
    out = layer.mlp(layer.post_attention_layernorm(one), input_ids=input_ids)
    return _Adding.apply(mixed, out, post)  # type: ignore[no-any-return]


def install_hyper_connections(lm: nn.Module) -> None:
    """Change DeepSeek-V4's norms and hyper-connections in place, so that they save little but inputs for backward."""
    forwards = (
        _merge,
        _merge_last,
        _run_layer,
        lambda self, x: _WideNorm.apply(x, self.weight, self.variance_epsilon),
        lambda self, x: _WideNorm.apply(x, None, self.eps),
    )
    forward_of = dict(zip((*stream_classes(), *norm_classes()), forwards, strict=True))
    for module in lm.modules():
        kind = type(module)
        if (forward := forward_of.get(kind)) is not None:
            module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
