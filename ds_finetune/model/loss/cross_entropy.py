"""Cross entropy of a language model head with gradients, in chunks of tokens: in PyTorch, and with Liger's kernel."""

from collections.abc import Callable

import torch

from ds_finetune.model.loss.head_chunks import (
    CHUNK_TOKENS,
    ChunkBlocks,
    HeadGradients,
    HeadInputs,
    LossSumsAndGradients,
    NeededGradients,
    cap_logits,
    softmax_of_chunk,
    subtract_one_hot,
)
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.objectives.labels import IGNORE_INDEX

_LIGER_BLOCK = 32768
"""Maximum number of columns in a block of Liger's kernel (liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py:26)."""


Kernel = Callable[[HeadInputs, NeededGradients], LossSumsAndGradients]
"""Function that computes the cross entropy of a head, summed over tokens, and its gradients. The sums for metrics, fp64
[2], are the loss in nats and the number of correctly predicted tokens.
"""


def chunked_cross_entropy(
    inputs: HeadInputs,
    needed: NeededGradients,
    *,
    chunk: int = CHUNK_TOKENS,
    tp_group: TensorParallelGroup | None = None,
) -> LossSumsAndGradients:
    """Sum of the cross entropy, in plain PyTorch. Softmax, sums over chunks, `d_weight` and `d_bias` are fp32.

    With `tp_group`, weight and bias are this rank's shard of the vocabulary, and `d_hidden` must be summed
    over ranks. Ranks all-reduce a few numbers per token, never logits.
    """
    hidden, weight, bias, targets, cap = inputs
    loss_sum = torch.zeros((), dtype=torch.float32, device=hidden.device)
    num_correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
    gradients = HeadGradients.zeros(inputs, needed)
    # Chunks share a buffer for logits, because on a CPU fresh memory pages cost a third of the matrix product (torch
    # 2.13, [1024, 102400] fp32).
    buffer = hidden.new_empty(min(chunk, len(hidden)), weight.shape[0])
    blocks, logp = ChunkBlocks(buffer, bias, tp_group), loss_sum.new_empty(len(buffer))
    for start in range(0, len(hidden), chunk):
        part, labels = hidden[start : start + chunk], targets[start : start + chunk]
        products = buffer[: len(part)]
        torch.mm(part, weight.T, out=products)
        for rows, logits in blocks.split(products):
            slope = cap_logits(logits, cap, needs_slope=any(needed))
            softmax = softmax_of_chunk(logits, labels[rows], tp_group)
            logp[rows] = softmax.logp
            num_correct.add_(softmax.num_correct)
            if any(needed):
                d_logits = subtract_one_hot(softmax.exps.div_(softmax.norm[:, None]), labels[rows], tp_group)
                d_logits = d_logits if slope is None else d_logits.mul_(slope)
                gradients.add_bias(d_logits)
                blocks.keep(d_logits, products[rows])
        loss_sum.sub_(logp[: len(part)].sum())
        if any(needed):
            gradients.add_products(products, part, weight, start)
    return LossSumsAndGradients(loss_sum, torch.stack([loss_sum.double(), num_correct.double()]), gradients)


def liger_cross_entropy(
    inputs: HeadInputs, needed: NeededGradients, *, chunk: int = CHUNK_TOKENS
) -> LossSumsAndGradients:
    """Sum of the cross entropy by Liger's kernel (liger-kernel 0.8.5, ops/cross_entropy.py), which computes softmax,
    loss and gradient in one pass and overwrites the logits.

    Liger's own wrapper of the kernel is not used. It reads the number of supervised tokens, which synchronises host and
    GPU, and uses chunks of some hundred tokens, each of which costs a pass over `d_weight`.
    """
    hidden, weight, bias, targets, cap = inputs
    assert cap is None, "Triton's interpreter cannot run the kernel's soft cap, so no test covers it"
    losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    predicted = torch.empty_like(targets)
    gradients = HeadGradients.zeros(inputs, needed)
    buffer = hidden.new_empty(min(chunk, len(hidden)), weight.shape[0])
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        part = hidden[rows]
        logits = torch.mm(part, weight.T, out=buffer[: len(part)])
        logits = logits if bias is None else logits.add_(bias)
        _run_liger_kernel(logits, targets[rows], losses[rows], predicted[rows], has_gradients=any(needed))
        if any(needed):
            gradients.add_bias(logits)
            gradients.add_products(logits, part, weight, start)
    loss_sum, num_correct = losses.sum(), (predicted == targets).sum()
    return LossSumsAndGradients(loss_sum, torch.stack([loss_sum.double(), num_correct.double()]), gradients)


def _run_liger_kernel(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, predicted: torch.Tensor, *, has_gradients: bool
) -> None:
    """Run Liger's kernel on `logits` [tokens, vocabulary]. It writes each row's loss and most likely id and, with
    `has_gradients`, overwrites the logits by their gradient.

    Arguments are as in liger-kernel 0.8.5, ops/fused_linear_cross_entropy.py:240-272. The loss is a sum, which needs no
    number of tokens, and no target is IGNORE_INDEX.
    """
    import triton
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel

    columns = logits.shape[1]
    liger_cross_entropy_kernel[(len(logits),)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=targets.stride(0),
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=losses.stride(0),
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=predicted,
        predicted_tokens_stride=predicted.stride(0),
        n_cols=columns,
        n_non_ignore=1,
        sum_non_ignore_weight=1,
        weight_sum=0.0,
        ignore_index=IGNORE_INDEX,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="sum",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=True,
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=has_gradients,
        BLOCK_SIZE=min(_LIGER_BLOCK, triton.next_power_of_2(columns)),
        # AMD GPUs run 64 threads per warp and at most 1,024 per block. Liger makes the same distinction.
        num_warps=32 if torch.version.hip is None else 16,
    )
