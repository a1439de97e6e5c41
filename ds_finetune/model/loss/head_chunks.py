"""A language model head on chunks of tokens: logits, softmax and gradients. Losses that use it never hold the logits of
all tokens. The vocabulary may be sharded over tensor parallel ranks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Self

import torch

from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.plan.forward import CPU_BLOCK_NUMBERS, CPU_TOKENS

CHUNK_TOKENS = CPU_TOKENS
"""Default number of supervised tokens whose logits are in memory at a time."""
_BLOCK_NUMBERS = CPU_BLOCK_NUMBERS


class NeededGradients(NamedTuple):
    """Whether a head must compute the gradients of its hidden states, its weight and its bias."""

    hidden: bool
    weight: bool
    bias: bool


class HeadInputs(NamedTuple):
    """Inputs of a head that predicts `targets` int64 [tokens]: `hidden` [tokens, width]; `weight` [vocabulary, width]
    and `bias` [vocabulary] or None, of this rank's shard of the vocabulary; soft cap of the logits, or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    cap: float | None = None


class HeadGradients(NamedTuple):
    """Gradients of a head, summed chunk by chunk, with the shapes of `hidden`, `weight` and `bias`; None if not needed.

    `d_weight` and `d_bias` are fp32. If the vocabulary is sharded, `d_hidden` must be summed over ranks.
    """

    d_hidden: torch.Tensor | None
    d_weight: torch.Tensor | None
    d_bias: torch.Tensor | None

    @classmethod
    def zeros(cls, inputs: HeadInputs, needed: NeededGradients) -> Self:
        """Allocate the needed gradients, filled with zeros."""
        hidden, weight, bias, *_ = inputs
        return cls(
            d_hidden=torch.zeros_like(hidden) if needed.hidden else None,
            d_weight=torch.zeros_like(weight, dtype=torch.float32) if needed.weight else None,
            d_bias=torch.zeros_like(bias, dtype=torch.float32) if needed.bias and bias is not None else None,
        )

    def add_chunk(self, d_logits: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, start: int) -> None:
        """Add a chunk's gradients from its `d_logits` (fp32) and hidden states `part`, which begin at token `start`."""
        self.add_bias(d_logits)
        self.add_products(d_logits.to(part.dtype), part, weight, start)

    def add_bias(self, d_logits: torch.Tensor) -> None:
        """Add to the bias's gradient the sum of `d_logits` over tokens, in fp32."""
        if self.d_bias is not None:
            self.d_bias.add_(d_logits.sum(0, dtype=self.d_bias.dtype))

    def add_products(self, d_logits: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, start: int) -> None:
        """Add the gradients of hidden states and weight of a chunk, from its `d_logits` in the dtype of `hidden`."""
        if self.d_hidden is not None:
            torch.mm(d_logits, weight, out=self.d_hidden[start : start + len(part)])
        if self.d_weight is not None:
            _add_product(self.d_weight, d_logits.T, part)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    elif total.device.type == "cuda":
        # `out_dtype` keeps the fp32 sum of a product of 16-bit matrices, which would be rounded to 16 bits.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        # torch 2.13 can return fp32 products of 16-bit matrices on GPUs only.
        total += left @ right


class LossSumsAndGradients(NamedTuple):
    """Loss of a head (fp32 scalar), sums for metrics (fp64), and gradients of the loss, computed in the forward.

    Backward multiplies by `factors`, fp64: all gradients if the shape is [1], only those of hidden states if [tokens].
    """

    loss: torch.Tensor
    sums: torch.Tensor
    gradients: HeadGradients
    factors: torch.Tensor | None = None


def loss_with_gradients(
    inputs: HeadInputs, compute: Callable[[NeededGradients], LossSumsAndGradients]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the loss of `compute` differentiable, with the gradients that `compute` returns. Returns loss and sums.

    Gradients of each chunk are computed in the forward, while its logits exist, and backward only scales them. This
    takes three matrix products; recomputing logits in backward would take four. The head's gradient needs memory
    already in the forward. Backward reads no weight of the head, because ZeRO-3 may have partitioned it again by then.
    """
    hidden, weight, bias, *_ = inputs
    is_on = torch.is_grad_enabled()
    needed = NeededGradients(*(is_on and each is not None and each.requires_grad for each in (hidden, weight, bias)))
    return _ScaledGradients.apply(hidden, weight, bias, partial(compute, needed))  # type: ignore[no-any-return]


class _ScaledGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        compute: Callable[[], LossSumsAndGradients],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss, sums, gradients, factors = compute()
        ctx.save_for_backward(*gradients, factors)
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.mark_non_differentiable(sums)
        return loss, sums

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        d_hidden, d_weight, d_bias, factors = ctx.saved_tensors
        hidden_dtype, weight_dtype, bias_dtype = ctx.dtypes
        scale = d_loss if factors is None else factors.float() * d_loss
        scale_of_token = d_loss if factors is None else scale[:, None]
        return (
            None if d_hidden is None else (d_hidden * scale_of_token).to(hidden_dtype),
            None if d_weight is None else d_weight.mul_(scale).to(weight_dtype),
            None if d_bias is None else d_bias.mul_(scale).to(bias_dtype),
            None,
        )


class ChunkSoftmax(NamedTuple):
    """Softmax of a chunk's logits, and the log-probabilities of its labels, in fp32.

    With tensor parallelism `exps` has this rank's shard of the vocabulary; the other fields cover all of it.
    """

    exps: torch.Tensor
    """exp(logit - largest logit), [tokens, vocabulary]. It overwrites the logits."""
    norm: torch.Tensor
    """Sum of `exps` over the vocabulary, [tokens]."""
    log_sum: torch.Tensor
    """Logarithm of the sum of exp(logit) over the vocabulary, [tokens]."""
    logp: torch.Tensor
    """Log-probability of the label in nats, [tokens]."""
    num_correct: torch.Tensor
    """Number of tokens whose label has the highest logit, int64 scalar."""


def logits_of_chunk(
    part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, buffer: torch.Tensor
) -> torch.Tensor:
    """Compute logits `part @ weight.T + bias` in fp32, written to `buffer` if that is fp32."""
    torch.mm(part, weight.T, out=buffer)
    logits = buffer.float()
    return logits if bias is None else logits.add_(bias)


def cap_logits(logits: torch.Tensor, cap: float | None, *, needs_slope: bool) -> torch.Tensor | None:
    """Replace logits z, fp32 [tokens, vocabulary], by cap * tanh(z / cap) in place (Gemma 2, arXiv 2408.00118, section
    2). Returns the derivative with respect to z; None if it is not needed or `cap` is None.
    """
    if cap is None:
        return None
    logits.div_(cap).tanh_()
    slope = 1 - logits.square() if needs_slope else None
    logits.mul_(cap)
    return slope


class ChunkBlocks:
    """Converts a chunk's products, `hidden @ weight.T`, to fp32 logits. On CPUs it works in blocks of rows that fit
    into caches; on other devices the chunk is one block.

    Rows are independent, so blocks do not change results. fp32 products need no conversion. With tensor parallelism the
    chunk is one block, because each block would cost all-reduces.
    """

    def __init__(self, buffer: torch.Tensor, bias: torch.Tensor | None, tp_group: TensorParallelGroup | None) -> None:
        self._bias, self._rows, self._scratch = bias, max(1, len(buffer)), None
        if buffer.dtype != torch.float32:
            if buffer.device.type == "cpu" and tp_group is None:
                self._rows = max(1, torch.get_num_threads() * _BLOCK_NUMBERS // buffer.shape[1])
            rows = min(self._rows, len(buffer))
            self._scratch = buffer.new_empty(rows, buffer.shape[1], dtype=torch.float32)

    def split(self, products: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield each block's rows with their fp32 logits [rows, vocabulary], from `products` [tokens, vocabulary]. If
        products are fp32, logits overwrite them. Otherwise logits are in a buffer that the next block overwrites.
        """
        for start in range(0, len(products), self._rows):
            rows = slice(start, min(start + self._rows, len(products)))
            logits = products[rows]
            if self._scratch is not None:
                logits = self._scratch[: len(logits)].copy_(logits)
            yield rows, logits if self._bias is None else logits.add_(self._bias)

    def keep(self, d_logits: torch.Tensor, products: torch.Tensor) -> None:
        """Copy the gradient of a block's logits to its rows of `products`. fp32 products already contain it."""
        if self._scratch is not None:
            products.copy_(d_logits)


def softmax_of_chunk(
    logits: torch.Tensor, labels: torch.Tensor, tp_group: TensorParallelGroup | None = None
) -> ChunkSoftmax:
    """Softmax of `logits` fp32 [tokens, vocabulary], which it overwrites, and log-probabilities of `labels` [tokens].

    With `tp_group` the logits are this rank's shard of the vocabulary. Ranks all-reduce a few numbers per token.
    """
    top, most_likely = logits.max(-1)
    if tp_group is not None:
        first = tp_group.group_rank * logits.shape[1]
        top, most_likely = tp_group.all_reduce_argmax(top, most_likely + first)
    columns, is_here = columns_in_shard(labels[:, None], logits.shape[1], tp_group)
    below_top = logits.gather(1, columns)[:, 0] - top
    exps = logits.sub_(top[:, None]).exp_()
    norm = exps.sum(-1)
    if tp_group is not None:
        below_top, norm = tp_group.all_reduce(torch.stack([below_top.where(is_here[:, 0], 0), norm]))
    log_norm = norm.log()
    return ChunkSoftmax(exps, norm, top + log_norm, below_top - log_norm, (most_likely == labels).sum())


def subtract_one_hot(
    probabilities: torch.Tensor, labels: torch.Tensor, tp_group: TensorParallelGroup | None = None
) -> torch.Tensor:
    """Subtract 1 at each label from `probabilities` [tokens, vocabulary or its shard], in place."""
    columns, is_here = columns_in_shard(labels[:, None], probabilities.shape[1], tp_group)
    return probabilities.scatter_(1, columns, probabilities.gather(1, columns) - is_here.to(probabilities.dtype))


def columns_in_shard(
    ids: torch.Tensor, size: int, tp_group: TensorParallelGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of `ids` in this rank's vocabulary shard of `size` columns, int64 (0 for ids of other shards), and a mask
    of the ids in the shard. Selecting the ids in the shard would synchronise host and GPU.
    """
    if tp_group is None:
        return ids.long(), torch.ones_like(ids, dtype=torch.bool)
    local = ids.long() - tp_group.group_rank * size
    is_here = (local >= 0) & (local < size)
    return local.where(is_here, 0), is_here
