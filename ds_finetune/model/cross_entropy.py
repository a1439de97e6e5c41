"""Summed cross entropy and its gradients, for a chunk of tokens at a time: in plain PyTorch, and with Liger's fused
kernel.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ds_finetune.model.parallel.tensor import TensorParallelGroup

CHUNK_TOKENS = 1024
"""Supervised positions whose logits exist at a time."""


class NeededGradients(NamedTuple):
    """Which gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


class LossAndGradients(NamedTuple):
    """Summed cross entropy in nats (fp32 scalar), number of tokens predicted right (int64 scalar), and the gradients of
    the sum.

    Gradients have the shapes of `hidden`, `weight` and `bias`; None where they are not needed.
    """

    loss_sum: torch.Tensor
    num_correct: torch.Tensor
    d_hidden: torch.Tensor | None
    d_weight: torch.Tensor | None
    d_bias: torch.Tensor | None


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, NeededGradients], LossAndGradients]
"""From `hidden` [tokens, width], `weight` [vocabulary, width], `bias` [vocabulary] or None, `targets` [tokens] int64.
"""


def chunked_cross_entropy(  # noqa: PLR0913 - a Kernel, its chunk and its group of ranks
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    needed: NeededGradients,
    *,
    chunk: int = CHUNK_TOKENS,
    tp_group: TensorParallelGroup | None = None,
) -> LossAndGradients:
    """The loss in plain PyTorch; softmax and the sums over chunks are fp32, as are `d_weight` and `d_bias`.

    With `tp_group`, `weight` and `bias` are this rank's shard of the vocabulary, and `d_hidden` is its partial sum.
    Only a few numbers per token are reduced over ranks, never the logits.
    """
    result = LossAndGradients(
        loss_sum=torch.zeros((), dtype=torch.float32, device=hidden.device),
        num_correct=torch.zeros((), dtype=torch.int64, device=hidden.device),
        d_hidden=torch.zeros_like(hidden) if needed.hidden else None,
        d_weight=torch.zeros_like(weight, dtype=torch.float32) if needed.weight else None,
        d_bias=torch.zeros_like(bias, dtype=torch.float32) if needed.bias and bias is not None else None,
    )
    # One buffer for the logits of every chunk: fresh pages cost a third of the product on a CPU (torch 2.13, [1024,
    # 102400] fp32).
    buffer = hidden.new_empty(min(chunk, len(hidden)), weight.shape[0])
    for start in range(0, len(hidden), chunk):
        part, labels = hidden[start : start + chunk], targets[start : start + chunk]
        logits = _logits(part, weight, bias, buffer[: len(part)])
        d_logits = (
            _softmax_minus_one_hot(logits, labels, result)
            if tp_group is None
            else _softmax_minus_one_hot_parallel(logits, labels, result, tp_group)
        )
        if result.d_bias is not None:
            result.d_bias.add_(d_logits.sum(0))
        d_logits = d_logits.to(hidden.dtype)
        if result.d_hidden is not None:
            torch.mm(d_logits, weight, out=result.d_hidden[start : start + chunk])
        if result.d_weight is not None:
            _add_product(result.d_weight, d_logits.T, part)
    return result


def _logits(part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """`part @ weight.T + bias` in fp32, in `buffer` where that is fp32."""
    torch.mm(part, weight.T, out=buffer)
    logits = buffer.float()
    return logits if bias is None else logits.add_(bias)


def _softmax_minus_one_hot(logits: torch.Tensor, labels: torch.Tensor, result: LossAndGradients) -> torch.Tensor:
    """Overwrite the logits by the gradient of the summed loss, and add loss and right predictions to `result`."""
    top, most_likely = logits.max(-1, keepdim=True)
    result.num_correct.add_((most_likely.squeeze(1) == labels).sum())
    result.loss_sum.add_((top - logits.gather(1, labels[:, None])).sum())
    weights = logits.sub_(top).exp_()
    norm = weights.sum(-1, keepdim=True)
    result.loss_sum.add_(norm.log().sum())
    if result.d_hidden is result.d_weight is result.d_bias is None:
        return weights
    d_logits = weights.div_(norm)
    d_logits[torch.arange(len(labels), device=labels.device), labels] -= 1
    return d_logits


def _softmax_minus_one_hot_parallel(
    logits: torch.Tensor, labels: torch.Tensor, result: LossAndGradients, tp_group: TensorParallelGroup
) -> torch.Tensor:
    """The same for `logits` of this rank's shard of the vocabulary."""
    size = logits.shape[1]
    start = tp_group.group_rank * size
    top, most_likely = logits.max(-1)
    top, most_likely = tp_group.all_reduce_argmax(top, most_likely + start)
    result.num_correct.add_((most_likely == labels).sum())
    local = labels - start
    here = ((local >= 0) & (local < size)).nonzero().squeeze(1)
    sums = torch.zeros(2, len(labels), device=logits.device)
    sums[0, here] = top[here] - logits[here, local[here]]
    weights = logits.sub_(top[:, None]).exp_()
    sums[1] = weights.sum(-1)
    below_top, norm = tp_group.all_reduce(sums)
    result.loss_sum.add_(below_top.sum() + norm.log().sum())
    d_logits = weights.div_(norm[:, None])
    d_logits[here, local[here]] -= 1
    return d_logits


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to the fp32 `total`."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        total += left @ right


def liger_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    needed: NeededGradients,
) -> LossAndGradients:
    """The loss by liger-kernel (0.8.5, ops/fused_linear_cross_entropy.py): softmax, loss and gradient of the logits in
    one pass over them.

    `d_weight` is summed in fp32 and rounded to the dtype of `weight` once. Liger's own chunks hold as many logits as
    `hidden` has numbers, a hundred tokens or so, and each costs a pass over `d_weight`; here they hold CHUNK_TOKENS or
    more.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    if len(hidden) == 0:
        return chunked_cross_entropy(hidden, weight, bias, targets, needed)
    logits_per_hidden = -(-CHUNK_TOKENS * weight.shape[0] // hidden.numel())
    loss, _, _, predicted, d_hidden, d_weight, d_bias = fused_linear_cross_entropy_forward(
        hidden,
        weight,
        targets,
        bias=bias,
        reduction="sum",
        accum_dtype=torch.float32,
        return_predicted_tokens=True,
        compute_gradients=any(needed),
        weight_requires_grad=needed.weight,
        chunk_mem_const=max(1, logits_per_hidden),
    )
    return LossAndGradients(
        loss_sum=loss,
        num_correct=(predicted == targets).sum(),
        d_hidden=d_hidden if needed.hidden else None,
        d_weight=d_weight if needed.weight else None,
        d_bias=d_bias if needed.bias else None,
    )


KERNELS: Mapping[str, Kernel] = {"chunked": chunked_cross_entropy, "liger": liger_cross_entropy}
"""Kernels by their name in a plan (`loss_kernel`)."""
