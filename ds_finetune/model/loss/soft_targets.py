"""Distillation loss: KL(teacher || model) between next-token distributions, summed over tokens, with gradients.

Logits of model and teacher exist for one chunk of tokens at a time. The gradient with respect to the model's logits is
p_model - p_teacher, so one pass with three matrix products is enough.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ds_finetune.model.loss.head_chunks import (
    HeadGradients,
    HeadInputs,
    LossSumsAndGradients,
    NeededGradients,
    cap_logits,
    columns_in_shard,
    logits_of_chunk,
)
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.plan.forward import DISTILLATION_TOKENS

CHUNK_TOKENS = DISTILLATION_TOKENS
"""Number of supervised tokens whose logits are in memory at a time in distillation."""


@dataclass(frozen=True)
class Mix:
    """How a token's loss is mixed: `label_weight` x cross entropy + (1 - `label_weight`) x T^2 x divergence.

    T is `temperature`, by which the logits of model and teacher are divided in the divergence. Gradients of the
    divergence shrink as 1 / T^2 (Hinton et al., arXiv 1503.02531, section 2.1); the factor T^2 makes the balance of
    both losses, and the best learning rate, independent of T.
    """

    temperature: float = 1.0
    label_weight: float = 0.0


class VocabularyShard(NamedTuple):
    """This rank's shard of the vocabulary: token ids from `start` on, one for each column of this rank's logits."""

    start: int
    tp_group: TensorParallelGroup | None

    def log_norm(self, logits: torch.Tensor) -> torch.Tensor:
        """Logarithm of the sum of exp(logits) over the vocabulary of all ranks, [tokens, 1]."""
        local = torch.logsumexp(logits, dim=-1, keepdim=True)
        if self.tp_group is None:
            return local
        return torch.logsumexp(self.tp_group.all_gather_last_dim(local), dim=-1, keepdim=True)

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum `partial` over tensor parallel ranks, if there are several."""
        return partial if self.tp_group is None else self.tp_group.all_reduce(partial)

    def most_likely(self, logits: torch.Tensor) -> torch.Tensor:
        """The id with the largest logit for each token, int64 [tokens]."""
        top, index = logits.max(-1)
        return index if self.tp_group is None else self.tp_group.all_reduce_argmax(top, index + self.start)[1]


_NEVER = -1e30
"""Logit of an id that the teacher lacks. It is finite, so that probability 0 times its logarithm is 0 and not NaN."""


@dataclass(frozen=True)
class TeacherStates:
    """Distributions of a running teacher, from its hidden states and head. Teacher and model may differ in width.

    Teacher and model may pad the same vocabulary to different sizes. An id that only one of them has gets probability
    0.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    temperature: float
    cap: float | None = None

    def divergence(
        self, log_probs: torch.Tensor, tokens: slice, shard: VocabularyShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of KL(teacher || model) over the supervised tokens in the slice `tokens`, scalar, and its gradient for
        the model's logits. `log_probs` fp32 [tokens, columns of the shard] are the model's.
        """
        columns = slice(shard.start, shard.start + log_probs.shape[1])
        logits = (self.hidden[tokens] @ self.weight[columns].T).float()
        if self.bias is not None:
            logits += self.bias[columns]
        cap_logits(logits, self.cap, needs_slope=False)
        teacher_logits = logits.div_(self.temperature)
        if absent := log_probs.shape[1] - teacher_logits.shape[1]:
            teacher_logits = torch.nn.functional.pad(teacher_logits, (0, absent), value=_NEVER)
        teacher_logits -= shard.log_norm(teacher_logits)
        probs = teacher_logits.exp()
        divergence = shard.add_up((teacher_logits.sub_(log_probs).mul_(probs)).sum(-1).sum())
        return divergence, log_probs.exp().sub_(probs)


@dataclass(frozen=True)
class TopTargets:
    """Stored distributions of a teacher: its k most likely tokens, and a bucket for all other tokens.

    The model's probability of the bucket is the sum of its probabilities of these other tokens, so its full
    distribution is trained.
    """

    ids: torch.Tensor
    """Ids of the teacher's k most likely tokens, integers [supervised tokens, k], distinct within a row."""
    log_probs: torch.Tensor
    """Log-probabilities of the k tokens and, last, of all others, [supervised tokens, k + 1], normalised when used."""

    def divergence(
        self, log_probs: torch.Tensor, tokens: slice, shard: VocabularyShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum of KL(teacher || model) over the slice `tokens`, and its gradient for the model's logits."""
        teacher_log_probs = torch.log_softmax(self.log_probs[tokens].float(), dim=-1)
        columns, is_here = columns_in_shard(self.ids[tokens], log_probs.shape[1], shard.tp_group)
        top = shard.add_up(torch.where(is_here, log_probs.gather(1, columns), 0.0))
        # Ids of other vocabulary shards point to column 0, which may belong to an id of this shard too. Their value is
        # infinity, so that "amin" ignores them. Selecting this shard's ids instead would synchronise host and GPU.
        infinity = torch.full_like(top, float("inf"))
        others = log_probs.scatter_reduce(1, columns, torch.where(is_here, -infinity, infinity), "amin")
        bucket = shard.log_norm(others)
        divergence = (teacher_log_probs.exp() * (teacher_log_probs - torch.cat([top, bucket], dim=-1))).sum(-1).sum()
        gradient = log_probs.exp()
        gradient.scatter_add_(1, columns, torch.where(is_here, -teacher_log_probs[:, :-1].exp(), 0.0))
        return divergence, gradient.sub_(others.add_(teacher_log_probs[:, -1:] - bucket).exp_())


SoftTargets = TeacherStates | TopTargets
"""The source of the teacher's distribution of each supervised token: a running teacher, or stored distributions."""


def chunked_mixed_loss(  # noqa: PLR0913 - a head, its targets, and how they are mixed
    inputs: HeadInputs,
    soft_targets: SoftTargets | None,
    needed: NeededGradients,
    *,
    mix: Mix,
    chunk: int = CHUNK_TOKENS,
    tp_group: TensorParallelGroup | None = None,
) -> LossSumsAndGradients:
    """Distillation loss of a head. Its sums, fp64 [4], are the mixed loss, the divergence, the labels' cross entropy
    (all in nats), and the number of correctly predicted tokens.

    Without `soft_targets` the loss is the labels' cross entropy. Softmax, sums and the head's gradients are at least
    fp32. With `tp_group`, weight and bias are this rank's shard of the vocabulary, and `d_hidden` must be summed over
    ranks.
    """
    hidden, weight, bias, labels, cap = inputs
    shard = VocabularyShard(0 if tp_group is None else tp_group.group_rank * weight.shape[0], tp_group)
    mix = mix if soft_targets is not None else Mix(label_weight=1.0)
    sums = torch.zeros(3, dtype=torch.float64, device=hidden.device)
    gradients = HeadGradients.zeros(inputs, needed)
    buffer = hidden.new_empty(min(chunk, len(hidden)), weight.shape[0])
    for start in range(0, len(hidden), chunk):
        tokens = slice(start, start + chunk)
        part = hidden[tokens]
        logits = logits_of_chunk(part, weight, bias, buffer[: len(part)])
        slope = cap_logits(logits, cap, needs_slope=any(needed))
        chunk_sums, d_logits = _chunk_loss(logits, labels[tokens], soft_targets, tokens, shard=shard, mix=mix)
        sums += chunk_sums
        d_logits = d_logits if slope is None else d_logits.mul_(slope)
        gradients.add_chunk(d_logits, part, weight, start)
    divergence, label_loss, correct = sums
    loss = mix.label_weight * label_loss + (1 - mix.label_weight) * mix.temperature**2 * divergence
    return LossSumsAndGradients(loss.float(), torch.stack([loss, divergence, label_loss, correct]), gradients)


def _chunk_loss(  # noqa: PLR0913 - the values of one chunk
    logits: torch.Tensor,
    labels: torch.Tensor,
    targets: SoftTargets | None,
    tokens: slice,
    *,
    shard: VocabularyShard,
    mix: Mix,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of divergence, label cross entropy and correct predictions, fp64 [3], and the gradient for `logits`."""
    correct = (shard.most_likely(logits) == labels).sum()
    soft = None if mix.temperature == 1 else logits / mix.temperature
    log_probs = logits.sub_(shard.log_norm(logits))
    column, is_here = columns_in_shard(labels[:, None], logits.shape[1], shard.tp_group)
    label_loss = -shard.add_up(torch.where(is_here, log_probs.gather(1, column), 0.0)).sum()
    soft = log_probs if soft is None else soft.sub_(shard.log_norm(soft))
    divergence, gradient = label_loss.new_zeros(()), torch.zeros_like(logits) if targets is None else None
    if targets is not None:
        divergence, gradient = targets.divergence(soft, tokens, shard)
        gradient *= (1 - mix.label_weight) * mix.temperature
    assert gradient is not None
    if mix.label_weight:
        gradient.add_(log_probs.exp_(), alpha=mix.label_weight)
        gradient.scatter_add_(1, column, -mix.label_weight * is_here.to(gradient.dtype))
    return torch.stack([divergence.double(), label_loss.double(), correct.double()]), gradient


@torch.no_grad()
def top_log_probs(  # noqa: PLR0913 - a head and its soft cap
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    cap: float | None = None,
    chunk: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` most likely token ids, int32 [tokens, top_k], and their log-probabilities, fp16 [tokens, top_k + 1].
    The last column is the log-probability of all other tokens together.

    `hidden` is [tokens, width], `weight` [vocabulary, width], `bias` [vocabulary] or None. The softmax is fp32.
    """
    assert top_k < len(weight)
    ids = torch.zeros(len(hidden), top_k, dtype=torch.int32, device=hidden.device)
    log_probs = torch.zeros(len(hidden), top_k + 1, dtype=torch.float16, device=hidden.device)
    buffer = hidden.new_empty(min(chunk, len(hidden)), weight.shape[0])
    for start in range(0, len(hidden), chunk):
        tokens = slice(start, start + chunk)
        part = hidden[tokens]
        logits = logits_of_chunk(part, weight, bias, buffer[: len(part)])
        cap_logits(logits, cap, needs_slope=False)
        top, best = logits.topk(top_k, dim=-1)
        others = logits.scatter_(1, best, float("-inf")).logsumexp(-1, keepdim=True)
        buckets = torch.cat([top, others], dim=-1)
        ids[tokens], log_probs[tokens] = best.int(), torch.log_softmax(buckets, dim=-1).half()
    return ids, log_probs
