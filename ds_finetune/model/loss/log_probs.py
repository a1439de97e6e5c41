"""Log-probabilities of tokens and documents, and gradients of any loss on them, without all logits in memory.

With logits z_t = W h_t + b and the log-probability lp_t = z_t[y_t] - log sum exp z_t, a loss L(lp) has the gradient
dL/dz_t = g_t (onehot(y_t) - softmax(z_t)) with g_t = dL/dlp_t. The g_t depend on the log-probabilities of full
documents, so the head is applied to all tokens twice, chunk by chunk.
"""

from dataclasses import dataclass
from functools import partial

import torch

from ds_finetune.model.loss.head_chunks import (
    CHUNK_TOKENS,
    HeadGradients,
    HeadInputs,
    LossSumsAndGradients,
    NeededGradients,
    cap_logits,
    logits_of_chunk,
    loss_with_gradients,
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


class TwoPassHead:
    """A head that computes log-probabilities of tokens in a first pass over chunks, and gradients in a second pass.

    The second pass begins with the last chunk, whose softmax is still in memory. If only `hidden` needs a gradient, the
    first pass computes the gradient of each log-probability, and backward multiplies it by the loss's gradient.
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
        """`forbidden`, bool [vocabulary] or this rank's shard, marks token ids with probability 0. `with_entropy` makes
        the first pass compute entropies too.
        """
        hidden, weight, bias, *_ = inputs
        bias = None if bias is None else bias.detach()
        self._inputs = inputs._replace(hidden=hidden.detach(), weight=weight.detach(), bias=bias)
        self._chunk, self._tp_group, self._forbidden = chunk, tp_group, forbidden
        tokens = len(inputs.targets)
        self._starts = range(0, tokens, chunk)
        self._buffer = inputs.hidden.new_empty(min(chunk, tokens), inputs.weight.shape[0])
        self._log_sum = torch.zeros(tokens, dtype=torch.float32, device=inputs.hidden.device)
        self._last: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self.entropy = torch.zeros_like(self._log_sum) if with_entropy else None
        """Entropy of the predicted distribution of each token in nats, fp32 [tokens]; zero before the first pass."""

    def gradients(self, d_logp: torch.Tensor, needed: NeededGradients) -> HeadGradients:
        """Second pass: the head's gradients, from a loss's gradient `d_logp` [tokens] for log-probabilities."""
        hidden, weight, _, targets, _ = self._inputs
        gradients = HeadGradients.zeros(self._inputs, needed)
        for start in reversed(self._starts):
            rows = slice(start, start + self._chunk)
            last, self._last = self._last, None
            if last is None:
                logits, slope = self._logits(start, needs_slope=True)
                last = logits.sub_(self._log_sum[rows, None]).exp_(), slope
            probabilities, slope = last
            d_logits = subtract_one_hot(probabilities, targets[rows], self._tp_group).mul_(-d_logp[rows, None])
            gradients.add_chunk(d_logits if slope is None else d_logits.mul_(slope), hidden[rows], weight, start)
        return gradients

    def log_probs(self, directions: torch.Tensor | None = None) -> torch.Tensor:
        """First pass: the log-probability of each target in nats, fp32 [tokens]. If `directions` [tokens, width] is
        given, it is overwritten by the gradients of the log-probabilities with respect to `hidden`.
        """
        hidden, weight, _, targets, _ = self._inputs
        logp = torch.zeros_like(self._log_sum)
        for start in self._starts:
            rows, is_last = slice(start, start + self._chunk), start == self._starts[-1]
            logits, slope = self._logits(start, needs_slope=directions is not None or is_last)
            softmax = softmax_of_chunk(logits, targets[rows], self._tp_group)
            logp[rows], self._log_sum[rows] = softmax.logp, softmax.log_sum
            if self.entropy is not None:
                # With e = `exps` and their sum n, the entropy -sum (e/n) log(e/n) is log n - (1/n) sum e log e.
                weighted = torch.special.entr(softmax.exps).sum(-1)
                weighted = weighted if self._tp_group is None else self._tp_group.all_reduce(weighted)
                self.entropy[rows] = softmax.norm.log() + weighted / softmax.norm
            if directions is not None:
                direction = subtract_one_hot(softmax.exps.div_(softmax.norm[:, None]), targets[rows], self._tp_group)
                direction = direction if slope is None else direction.mul_(slope)
                torch.mm(direction.neg_().to(hidden.dtype), weight, out=directions[rows])
            elif is_last:
                self._last = softmax.exps.div_(softmax.norm[:, None]), slope
        return logp

    def _logits(self, start: int, *, needs_slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight, bias, _, cap = self._inputs
        part = hidden[start : start + self._chunk]
        logits = logits_of_chunk(part, weight, bias, self._buffer[: len(part)])
        slope = cap_logits(logits, cap, needs_slope=needs_slope)
        return logits if self._forbidden is None else logits.masked_fill_(self._forbidden, -torch.inf), slope


@dataclass(frozen=True, eq=False)
class DocumentTokens:
    """The supervised tokens of a forward, with the documents to which they belong.

    With `sp_group` these are this rank's tokens of documents that extend over all ranks of the group.
    """

    index: torch.Tensor
    """For each token, the index of its document among the documents of the forward, int64 [tokens]."""
    examples: Examples
    sp_group: SequenceParallelGroup | None = None

    def sums(self, logp: torch.Tensor) -> DocumentLogProbs:
        """Log-probabilities of documents, from those of this rank's tokens, `logp` fp32 [tokens]. All sequence parallel
        ranks must call this, and get the same result.
        """
        sums = torch.zeros(2, len(self.examples.numbers), dtype=torch.float64, device=logp.device)
        sums.index_add_(1, self.index, torch.stack([logp.double(), torch.ones_like(logp, dtype=torch.float64)]))
        if self.sp_group is not None:
            sums = self.sp_group.all_reduce(sums)
        return DocumentLogProbs(sums[0], sums[1], self.examples.targets, self.examples.reference)


@dataclass(frozen=True, eq=False)
class LossOfDocuments:
    """Computes the loss of a forward from log-probabilities, for an objective that scores documents."""

    objective: DocumentObjective
    tokens: DocumentTokens
    numbers: StepNumbers | None

    def of_tokens(self, logp: torch.Tensor, *, has_gradient: bool) -> tuple[LossAndSums, torch.Tensor | None]:
        """Compute loss and sums from the log-probabilities of this rank's tokens, fp32 [tokens]. With `has_gradient`
        the second result is the loss's gradient for the log-probabilities, fp64 [tokens], else None.

        Only the first sequence parallel rank returns sums other than zero, so that each document counts once.
        """
        documents = self.tokens.sums(logp)
        one = torch.ones(len(self.objective.terms), dtype=torch.float64, device=logp.device)
        weights, baseline = self.numbers or StepNumbers(one, one.new_zeros(()))
        with torch.set_grad_enabled(has_gradient):
            documents.logp.requires_grad_(has_gradient)
            loss = self.objective.loss(documents, weights, baseline)
        d_logp = torch.autograd.grad(loss.loss, documents.logp)[0] if has_gradient else None
        sp_group = self.tokens.sp_group
        sums = loss.sums if sp_group is None or sp_group.group_rank == 0 else torch.zeros_like(loss.sums)
        result = LossAndSums(loss.loss.detach().float(), sums.detach())
        return result, None if d_logp is None else d_logp[self.tokens.index]


@dataclass(frozen=True, eq=False)
class LossOfAnswers:
    """Computes the loss of a forward from log-probabilities, for an objective on tokens of sampled answers."""

    objective: AnswerObjective
    positions: torch.Tensor
    """Indices of the answers' labels in the flattened rows, int64 [tokens]."""
    tokens: DocumentTokens
    numbers: StepNumbers | None
    head: TwoPassHead
    """Head whose first pass has computed the entropies of the tokens' distributions."""

    def of_tokens(self, logp: torch.Tensor, *, has_gradient: bool) -> tuple[LossAndSums, torch.Tensor | None]:
        """Compute loss, sums and gradient from the log-probabilities of this rank's answer tokens, fp32 [tokens]. All
        sequence parallel ranks must call this.
        """
        examples, index = self.tokens.examples, self.tokens.index
        answers, entropy = examples.answers, self.head.entropy
        assert entropy is not None
        logp = logp.double().requires_grad_(has_gradient)
        absent = torch.full_like(logp, torch.nan, requires_grad=False)
        old, reference, sampled = (
            absent if rows is None else rows.reshape(-1).index_select(0, self.positions).double()
            for rows in ((None, None, None) if answers is None else (answers.old, answers.reference, answers.sampled))
        )
        lengths = self.tokens.sums(torch.zeros_like(absent)).num_tokens
        with torch.set_grad_enabled(has_gradient):
            tokens = AnswerTokens(
                logp=logp,
                entropy=entropy.double(),
                advantage=examples.targets[index],
                lengths=lengths[index],
                old=old,
                reference=reference,
                sampled=sampled,
                means=lambda values: (self.tokens.sums(values).logp / lengths.clamp(min=1))[index],
            )
            weights = logp.new_ones(1) if self.numbers is None else self.numbers.weights
            loss = self.objective.loss(tokens, weights)
        d_logp = torch.autograd.grad(loss.loss, logp)[0] if has_gradient else None
        return LossAndSums(loss.loss.detach().float(), loss.sums), d_logp


def loss_of_log_probs(inputs: HeadInputs, loss: LossOfDocuments | LossOfAnswers, head: TwoPassHead) -> LossAndSums:
    """Loss of a forward's documents or sampled answers, with gradients for the head's `inputs` that require one. With
    tensor parallelism the gradient of `hidden` must be summed over ranks.
    """
    return LossAndSums(*loss_with_gradients(inputs, partial(_loss_and_gradients, inputs, loss, head)))


def _loss_and_gradients(
    inputs: HeadInputs, loss: LossOfDocuments | LossOfAnswers, head: TwoPassHead, needed: NeededGradients
) -> LossSumsAndGradients:
    if needed.weight or needed.bias:
        values, d_logp = loss.of_tokens(head.log_probs(), has_gradient=True)
        assert d_logp is not None
        # Gradients of the loss are divided by the largest one, because small ones would underflow in 16 bits.
        largest = torch.cat([d_logp.abs(), d_logp.new_full((1,), torch.finfo(torch.float32).tiny)]).max()[None]
        gradients = head.gradients((d_logp / largest).float(), needed)
        return LossSumsAndGradients(values.loss, values.sums, gradients, largest)
    if needed.hidden:
        directions = torch.zeros_like(inputs.hidden)
        values, d_logp = loss.of_tokens(head.log_probs(directions), has_gradient=True)
        return LossSumsAndGradients(values.loss, values.sums, HeadGradients(directions, None, None), d_logp)
    values, _ = loss.of_tokens(head.log_probs(), has_gradient=False)
    return LossSumsAndGradients(values.loss, values.sums, HeadGradients(None, None, None))
