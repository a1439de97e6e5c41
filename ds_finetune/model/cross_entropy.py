"""Summed cross entropy and its gradients, for a chunk of tokens at a time: in plain PyTorch, and with Liger's fused
kernel.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ds_finetune.model.head_chunks import (
    CHUNK_TOKENS,
    ChunkBlocks,
    HeadGradients,
    NeededGradients,
    softmax_of_chunk,
    subtract_one_hot,
)
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.model.products import multiplication


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
    loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    gradients = HeadGradients.zeros(hidden, weight, bias, needed)
    # One buffer for the logits of every chunk: fresh pages cost a third of the product on a CPU (torch 2.13, [1024,
    # 102400] fp32).
    buffer = hidden.new_empty(min(chunk, len(hidden)), weight.shape[0])
    blocks, logp = ChunkBlocks(buffer, bias, tp_group), loss_sum.new_empty(len(buffer))
    multiply = multiplication(hidden)
    for start in range(0, len(hidden), chunk):
        part, labels = hidden[start : start + chunk], targets[start : start + chunk]
        products = buffer[: len(part)]
        multiply(part, weight.T, out=products)
        for rows, logits in blocks.split(products):
            softmax = softmax_of_chunk(logits, labels[rows], tp_group)
            logp[rows] = softmax.logp
            num_correct.add_(softmax.num_correct)
            if any(needed):
                d_logits = subtract_one_hot(softmax.exps.div_(softmax.norm[:, None]), labels[rows], tp_group)
                gradients.add_bias(d_logits)
                blocks.keep(d_logits, products[rows])
        loss_sum.sub_(logp[: len(part)].sum())
        if any(needed):
            gradients.add_products(products, part, weight, start)
    return LossAndGradients(loss_sum, num_correct, *gradients)


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
