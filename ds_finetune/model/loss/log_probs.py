"""Log-probabilities of tokens and documents, and gradients of any loss on them, without all logits in memory.

With logits z_t = W h_t + b and the log-probability lp_t = z_t[y_t] - log sum exp z_t, a loss L(lp) has the gradient
dL/dz_t = g_t (onehot(y_t) - softmax(z_t)) with g_t = dL/dlp_t. The g_t depend on the log-probabilities of full
documents, so the head is applied to all tokens twice, chunk by chunk.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from ds_finetune.model.loss.head_chunks import (
    CHUNK_TOKENS,
    HeadGradients,
    NeededGradients,
    cap_logits,
    logits_of_chunk,
    needed_gradients,
    softmax_of_chunk,
    subtract_one_hot,
)
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.objectives.objective import (
    AnswerObjective,
    AnswerTokens,
    DocumentLogProbs,
    DocumentObjective,
    Examples,
    LossAndSums,
    StepNumbers,
)


class HeadInputs(NamedTuple):
    """What a head reads to predict `targets` int64 [tokens]: `hidden` [tokens, width], `weight` [vocabulary, width],
    and `bias` [vocabulary] or None.

    With tensor parallelism, `weight` and `bias` are this rank's shard of the vocabulary. `cap` is the logits' soft cap,
    or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    targets: torch.Tensor
    cap: float | None = None

    def detach(self) -> Self:
        """Copy of the head's inputs without gradients."""
        return self._replace(
            hidden=self.hidden.detach(),
            weight=self.weight.detach(),
            bias=None if self.bias is None else self.bias.detach(),
        )


class TwoPassHead:
    """A head that computes log-probabilities of tokens in a first pass over chunks, and gradients in a second pass.

    The second pass begins with the last chunk, whose softmax is still in memory. If only `hidden` needs a gradient, the
    first pass already computes it up to the factor g_t of each token.
    """

    def __init__(
        self,
        inputs: HeadInputs,
        *,
        chunk: int = CHUNK_TOKENS,
        tp_group: TensorParallelGroup | None = None,
        forbidden: torch.Tensor | None = None,
        with_entropy: bool = False,
    ) -> None:
        """`forbidden`, bool [vocabulary] or this rank's shard, marks ids that get probability 0. `with_entropy` makes
        the first pass compute entropies too.
        """
        self._inputs, self._chunk, self._tp_group = inputs, chunk, tp_group
        self._forbidden = forbidden
        tokens = len(inputs.targets)
        self._starts = range(0, tokens, chunk)
        self._buffer = inputs.hidden.new_empty(min(chunk, tokens), inputs.weight.shape[0])
        self._log_sum = torch.zeros(tokens, dtype=torch.float32, device=inputs.hidden.device)
        self._last: _CappedChunk | None = None
        self.entropy = torch.zeros_like(self._log_sum) if with_entropy else None
        """Entropy of the predicted distribution of each token in nats, fp32 [tokens]; zero before the first pass."""

    def log_probs(self) -> torch.Tensor:
        """First pass: the log-probability of each target in nats, fp32 [tokens]."""
        return self._first_pass(directions=None)

    def log_probs_and_directions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First pass: log-probabilities, and their gradients with respect to `hidden` [tokens, width], which is all
        that a frozen head needs.
        """
        directions = torch.zeros_like(self._inputs.hidden)
        return self._first_pass(directions), directions

    def gradients(self, d_logp: torch.Tensor, needed: NeededGradients) -> HeadGradients:
        """Second pass: gradients of a loss, whose gradient with respect to log-probabilities is `d_logp` [tokens]."""
        hidden, weight, bias, targets, _ = self._inputs
        gradients = HeadGradients.zeros(hidden, weight, bias, needed)
        for start in reversed(self._starts):
            chunk_rows = slice(start, start + self._chunk)
            probabilities, slope = self._probabilities(start)
            d_logits = subtract_one_hot(probabilities, targets[chunk_rows], self._tp_group).mul_(
                -d_logp[chunk_rows, None]
            )
            gradients.add_chunk(d_logits if slope is None else d_logits.mul_(slope), hidden[chunk_rows], weight, start)
        return gradients

    def _first_pass(self, directions: torch.Tensor | None) -> torch.Tensor:
        hidden, weight, _, targets, _ = self._inputs
        logp = torch.zeros_like(self._log_sum)
        for start in self._starts:
            chunk_rows, is_last = slice(start, start + self._chunk), start == self._starts[-1]
            logits, slope = self._logits(start, needs_slope=directions is not None or is_last)
            softmax = softmax_of_chunk(logits, targets[chunk_rows], self._tp_group)
            logp[chunk_rows], self._log_sum[chunk_rows] = softmax.logp, softmax.log_sum
            if self.entropy is not None:
                # With e = `exps` and their sum n, the entropy -sum (e/n) log(e/n) is log n - (1/n) sum e log e.
                weighted = torch.special.entr(softmax.exps).sum(-1)
                weighted = weighted if self._tp_group is None else self._tp_group.all_reduce(weighted)
                self.entropy[chunk_rows] = softmax.norm.log() + weighted / softmax.norm
            if directions is not None:
                direction = subtract_one_hot(
                    softmax.exps.div_(softmax.norm[:, None]), targets[chunk_rows], self._tp_group
                )
                direction = direction if slope is None else direction.mul_(slope)
                torch.mm(direction.neg_().to(hidden.dtype), weight, out=directions[chunk_rows])
            elif is_last:
                self._last = _CappedChunk(softmax.exps.div_(softmax.norm[:, None]), slope)
        return logp

    def _probabilities(self, start: int) -> "_CappedChunk":
        last, self._last = self._last, None
        if last is not None:
            return last
        log_sum = self._log_sum[start : start + self._chunk, None]
        logits, slope = self._logits(start, needs_slope=True)
        return _CappedChunk(logits.sub_(log_sum).exp_(), slope)

    def _logits(self, start: int, *, needs_slope: bool) -> "_CappedChunk":
        hidden, weight, bias, _, cap = self._inputs
        part = hidden[start : start + self._chunk]
        logits = logits_of_chunk(part, weight, bias, self._buffer[: len(part)])
        slope = cap_logits(logits, cap, needs_slope=needs_slope)
        return _CappedChunk(
            logits if self._forbidden is None else logits.masked_fill_(self._forbidden, -torch.inf), slope
        )


class _CappedChunk(NamedTuple):
    """Logits or probabilities of a chunk, fp32 [tokens, vocabulary], and the derivative of the logits' soft cap."""

    values: torch.Tensor
    slope: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class DocumentTokens:
    """The supervised tokens of a forward, with the documents to which they belong.

    With `sp_group` these are this rank's tokens, while documents extend over all ranks of the group.
    """

    index: torch.Tensor
    """Number of each token's document in the forward, int64 [tokens]."""
    examples: Examples
    sp_group: SequenceParallelGroup | None = None

    def sums(self, logp: torch.Tensor) -> DocumentLogProbs:
        """Log-probabilities of documents, from those of this rank's tokens, `logp` fp32 [tokens]. The result is the
        same on all sequence parallel ranks, all of which must call this.
        """
        sums = torch.zeros(2, len(self.examples.numbers), dtype=torch.float64, device=logp.device)
        sums.index_add_(1, self.index, torch.stack([logp.double(), torch.ones_like(logp, dtype=torch.float64)]))
        if self.sp_group is not None:
            sums = self.sp_group.all_reduce(sums)
        return DocumentLogProbs(sums[0], sums[1], self.examples.targets, self.examples.reference)


@dataclass(frozen=True, eq=False)
class AnswerPositions:
    """The answer tokens of a forward: where their labels are, and to which documents they belong."""

    positions: torch.Tensor
    """Indices of the labels in the flattened rows, int64 [tokens]."""
    documents: DocumentTokens

    def numbers(self, logp: torch.Tensor, entropy: torch.Tensor) -> AnswerTokens:
        """Collect the inputs of a loss on answer tokens. All sequence parallel ranks must call this."""
        examples, index = self.documents.examples, self.documents.index
        answers = examples.answers
        absent = torch.full_like(logp, torch.nan, requires_grad=False)
        old, reference, sampled = (
            absent if rows is None else rows.reshape(-1).index_select(0, self.positions).double()
            for rows in ((None, None, None) if answers is None else (answers.old, answers.reference, answers.sampled))
        )
        lengths = self.documents.sums(torch.zeros_like(absent)).num_tokens
        return AnswerTokens(
            logp=logp,
            entropy=entropy.double(),
            advantage=examples.targets[index],
            lengths=lengths[index],
            old=old,
            reference=reference,
            sampled=sampled,
            means=lambda values: (self.documents.sums(values).logp / lengths.clamp(min=1))[index],
        )


class LossOfDocuments:
    """Computes the loss of a forward from log-probabilities, for an objective that scores documents."""

    def __init__(self, objective: DocumentObjective, tokens: DocumentTokens, numbers: StepNumbers | None) -> None:
        self._objective, self._tokens = objective, tokens
        self._numbers = numbers

    def of_tokens(self, logp: torch.Tensor, *, has_gradient: bool) -> tuple[LossAndSums, torch.Tensor | None]:
        """Compute loss and sums from the log-probabilities of this rank's tokens, fp32 [tokens]. With `has_gradient`
        the third result is the loss's gradient with respect to them, fp64 [tokens], else None.

        Sums are zero on all sequence parallel ranks but the first, so that each document counts once.
        """
        documents = self._tokens.sums(logp)
        one = torch.ones(len(self._objective.terms), dtype=torch.float64, device=logp.device)
        weights, baseline = self._numbers or StepNumbers(one, one.new_zeros(()))
        with torch.set_grad_enabled(has_gradient):
            documents.logp.requires_grad_(has_gradient)
            loss = self._objective.loss(documents, weights, baseline)
        d_logp = torch.autograd.grad(loss.loss, documents.logp)[0] if has_gradient else None
        sp_group = self._tokens.sp_group
        sums = loss.sums if sp_group is None or sp_group.group_rank == 0 else torch.zeros_like(loss.sums)
        result = LossAndSums(loss.loss.detach().float(), sums.detach())
        return result, None if d_logp is None else d_logp[self._tokens.index]


class LossOfAnswers:
    """Computes the loss of a forward from log-probabilities, for an objective on answer tokens. `head` has their
    entropies.
    """

    def __init__(
        self, objective: AnswerObjective, tokens: AnswerPositions, numbers: StepNumbers | None, head: TwoPassHead
    ) -> None:
        self._objective, self._tokens, self._numbers, self._head = objective, tokens, numbers, head

    def of_tokens(self, logp: torch.Tensor, *, has_gradient: bool) -> tuple[LossAndSums, torch.Tensor | None]:
        """Compute loss, sums and gradient from the log-probabilities of this rank's answer tokens, fp32 [tokens]."""
        assert self._head.entropy is not None
        logp = logp.double().requires_grad_(has_gradient)
        one = torch.ones(1, dtype=torch.float64, device=logp.device)
        with torch.set_grad_enabled(has_gradient):
            weights = one if self._numbers is None else self._numbers.weights
            loss = self._objective.loss(self._tokens.numbers(logp, self._head.entropy), weights)
        d_logp = torch.autograd.grad(loss.loss, logp)[0] if has_gradient else None
        return LossAndSums(loss.loss.detach().float(), loss.sums), d_logp


class _DocumentLoss(torch.autograd.Function):
    """Autograd function of a loss on documents or answer tokens. The forward computes the head's gradients, and
    backward scales them.

    Backward reads no weight of the head, because ZeRO-3 may have partitioned it again by then.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes its inputs by position
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        head: TwoPassHead,
        loss: LossOfDocuments | LossOfAnswers,
        needed: NeededGradients,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        gradients, factors = HeadGradients(None, None, None), None
        if needed.weight or needed.bias:
            values, d_logp = loss.of_tokens(head.log_probs(), has_gradient=True)
            assert d_logp is not None
            # Gradients are scaled so that the largest is one. Otherwise small ones would underflow in 16 bits.
            factors = torch.cat([d_logp.abs(), d_logp.new_full((1,), torch.finfo(torch.float32).tiny)]).max()[None]
            gradients = head.gradients((d_logp / factors).float(), needed)
        elif needed.hidden:
            logp, directions = head.log_probs_and_directions()
            values, factors = loss.of_tokens(logp, has_gradient=True)
            gradients = HeadGradients(directions, None, None)
        else:
            values, _ = loss.of_tokens(head.log_probs(), has_gradient=False)
        ctx.save_for_backward(*gradients, factors)
        ctx.mark_non_differentiable(values.sums)
        return values.loss, values.sums

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        *gradients, factors = ctx.saved_tensors
        scale = factors.float() * d_loss
        return (
            *(
                None if grad is None else (grad * scale.view(-1, *[1] * (grad.ndim - 1))).to(dtype)
                for grad, dtype in zip(gradients, ctx.dtypes, strict=True)
            ),
            None,
            None,
            None,
        )


def document_loss(
    inputs: HeadInputs, loss: LossOfDocuments, *, chunk: int = CHUNK_TOKENS, tp_group: TensorParallelGroup | None = None
) -> LossAndSums:
    """Loss of the documents of a forward, with gradients for those of `hidden`, `weight` and `bias` that require one.

    With `tp_group` the gradient of `hidden` is this rank's part of a sum.
    """
    return _loss(inputs, loss, TwoPassHead(inputs.detach(), chunk=chunk, tp_group=tp_group))


def answer_loss(
    inputs: HeadInputs,
    tokens: AnswerPositions,
    numbers: StepNumbers | None,
    objective: AnswerObjective,
    head: TwoPassHead,
) -> LossAndSums:
    """Loss of the sampled answers of a forward, with gradients for those of `hidden`, `weight` and `bias` that require
    one. `head` has the same tensors, detached, and computes entropies.
    """
    return _loss(inputs, LossOfAnswers(objective, tokens, numbers, head), head)


def _loss(inputs: HeadInputs, loss: LossOfDocuments | LossOfAnswers, head: TwoPassHead) -> LossAndSums:
    hidden, weight, bias, *_ = inputs
    needed = needed_gradients(hidden, weight, bias)
    return LossAndSums(*_DocumentLoss.apply(hidden, weight, bias, head, loss, needed))


def document_log_probs(
    inputs: HeadInputs, tokens: DocumentTokens, *, tp_group: TensorParallelGroup | None = None
) -> torch.Tensor:
    """Log-probability of each document of a forward in nats, fp64 [documents], without gradient."""
    return tokens.sums(TwoPassHead(inputs.detach(), tp_group=tp_group).log_probs()).logp
