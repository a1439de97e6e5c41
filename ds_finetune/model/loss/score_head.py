"""Head of a classifier or reward model, which scores the last token of each document.

It finds the ends of documents by their lengths. transformers' own classes search the last token that is not
`pad_token_id`. They would give a packed row only one score, and misplace the end of a document that ends in this token.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.model.build.encoder import encoder_of, encoder_scores
from ds_finetune.model.build.skeleton import Where, has_score_head, head_of
from ds_finetune.model.loss.token_loss import HeadGroups
from ds_finetune.model.parallel.rank_group import sum_over_ranks
from ds_finetune.model.weights.load import initialise_weights, seed_of
from ds_finetune.objectives.objective import Examples, LossAndSums, Objective, ScoreObjective, StepNumbers

SCORE_HEAD = "score"
"""Name of the head's attribute in transformers' sequence classification classes of causal models."""
INITIAL_REWARD = 1e-4
"""Standard deviation of a new reward model's rewards, for hidden states with a mean square of 1. It is so small that
the first loss is ln 2 to within 1e-3, but hidden states get a gradient, which a head of zeros would not give.
"""


def loss_of_scores(
    objective: ScoreObjective, scores: torch.Tensor, examples: Examples, numbers: StepNumbers | None
) -> LossAndSums:
    """Loss of a forward's documents from their scores, fp32 [documents, outputs]. `numbers` has the weights of the
    loss's terms in the step; without `numbers` all weights are 1.
    """
    device = scores.device
    weights = torch.ones(len(objective.terms), dtype=torch.float64) if numbers is None else numbers.weights
    loss = objective.loss(scores, examples.targets.to(device), weights.to(device))
    return LossAndSums(loss.loss, loss.sums, scores.detach())


class ScoreHead(nn.Linear):
    """Linear head that returns logits or, with `examples`, the loss of the scores of each document's last token.

    Tensor parallel ranks have identical heads and hidden states. A sequence parallel rank scores the documents that end
    among its tokens, and an all-reduce gives all ranks the scores.
    """

    objective: ScoreObjective
    groups = HeadGroups()

    def forward(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        numbers: StepNumbers | None = None,
        examples: Examples | None = None,
        *,
        supervised: torch.Tensor | None = None,
    ) -> Any:  # noqa: ANN401 - logits or LossAndSums
        """Map `hidden` [rows, tokens, width] to logits [rows, tokens, outputs] or, with `examples`, to the documents'
        loss with fp32 scores. `labels` and `supervised` are not used.

        Without documents the loss is 0 with zero gradients, so that every rank takes part in reductions. A sequence
        parallel rank gets its own tokens of each row. Only the first rank returns sums, so that each document counts
        once.
        """
        if examples is None:
            logits = super().forward(hidden)
            return logits if self.groups.pp is None else self.groups.pp.broadcast_from_last(logits)
        loss = loss_of_scores(self.objective, self.scores(hidden, examples.ends), examples, numbers)
        is_first = self.groups.sp is None or self.groups.sp.group_rank == 0
        return loss if is_first else loss._replace(sums=torch.zeros_like(loss.sums))

    def scores(self, hidden: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Scores fp32 [documents, outputs] of documents whose last tokens are at `ends` in the flattened rows."""
        sp_group = self.groups.sp
        ranks, rank = (1, 0) if sp_group is None else (sp_group.size, sp_group.group_rank)
        ends, tokens = ends.to(hidden.device), hidden.shape[1]
        row, column = ends // (tokens * ranks), ends % (tokens * ranks) - tokens * rank
        is_own = (column >= 0) & (column < tokens)
        # Other ranks' scores are masked, because selecting this rank's documents would synchronise host and GPU.
        pooled = hidden.reshape(-1, hidden.shape[-1]).index_select(0, (row * tokens + column).where(is_own, 0))
        bias = None if self.bias is None else self.bias.float()
        scores = functional.linear(pooled.float(), self.weight.float(), bias)
        return scores if sp_group is None else sum_over_ranks(scores.where(is_own[:, None], 0), sp_group)


def logits_of_prompt(lm: PreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one prompt, int64 [1, tokens]. A classifier returns its scores, [1, outputs],
    instead; a causal one scores the prompt's last token, even if that is the padding token.
    """
    if not has_score_head(lm):
        return lm(input_ids=input_ids, use_cache=False).logits[0]  # type: ignore[no-any-return]
    if not hasattr(lm, SCORE_HEAD):
        return lm(input_ids=input_ids).logits  # type: ignore[no-any-return]
    hidden = lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    return head_of(lm)(hidden)[0, -1:]  # type: ignore[no-any-return]


def head_parameters(lm: PreTrainedModel) -> list[str]:
    """Names of the classification head's parameters on this rank; none for a language model."""
    encoder = encoder_of(lm.config)
    modules = (SCORE_HEAD,) if encoder is None else encoder.head
    prefixes = tuple(f"{module}." for module in modules)
    return [name for name, _ in lm.named_parameters() if has_score_head(lm) and name.startswith(prefixes)]


def initialise_score_head(
    lm: PreTrainedModel, objective: Objective, names: Sequence[str], *, seed: int, where: Where
) -> None:
    """Randomly initialise the classification head's parameters `names`, with small values for a reward model, else by
    the model's own rule. Values depend on the seed and the parameter's name, not on the layout.
    """
    if not (isinstance(objective, ScoreObjective) and objective.starts_small):
        initialise_weights(lm, seed=seed, where=where, names=names)
        return
    for name in names:
        fragment, generator = where(lm.get_parameter(name)), torch.Generator().manual_seed(seed_of(seed, name))
        values = torch.randn(math.prod(fragment.shape), generator=generator)
        fragment.write(values * (INITIAL_REWARD / math.sqrt(fragment.shape[-1])))


class EncoderHead:
    """Runs an encoder's classification modules through the interface of ScoreHead. EncoderHead has no parameters."""

    def __init__(self, lm: PreTrainedModel, objective: ScoreObjective) -> None:
        self.lm = lm
        self.objective = objective

    def __call__(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None,
        numbers: StepNumbers | None = None,
        examples: Examples | None = None,
        *,
        supervised: torch.Tensor | None = None,
    ) -> LossAndSums:
        """Loss of the documents `examples` from `hidden` [rows, tokens, width]. `labels` and `supervised` are not used.

        Without documents the loss is 0 with zero gradients, so that every rank takes part in reductions.
        """
        assert examples is not None
        return loss_of_scores(self.objective, encoder_scores(self.lm, hidden, examples), examples, numbers)


def install_score_head(
    lm: PreTrainedModel, objective: ScoreObjective, groups: HeadGroups = ScoreHead.groups
) -> ScoreHead:
    """Turn the head of the classifier `lm` into a ScoreHead in place, with the same parameters and names."""
    head = getattr(lm, SCORE_HEAD, None)
    if type(head) is not nn.Linear:
        kind = "none" if head is None else f"a {type(head).__name__}"
        raise ModelError(
            f"{type(lm).__name__} must have a linear head `{SCORE_HEAD}`, but has {kind}",
            hint="train a classifier of another model type, such as llama, qwen3 or deepseek_v3",
        )
    assert head.out_features == objective.num_outputs, (head.out_features, objective.num_outputs)
    head.__class__ = ScoreHead
    assert isinstance(head, ScoreHead)
    head.objective, head.groups = objective, groups
    return head
