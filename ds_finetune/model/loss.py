"""The loss over supervised positions, chunk by chunk: the [tokens, vocabulary] logits are never built."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.labels import IGNORE_INDEX
from ds_finetune.model.attention import BY_DOCUMENT, Documents

CHUNK_TOKENS = 1024
"""Supervised positions whose logits exist at a time."""


class TokenLoss(NamedTuple):
    """Summed cross entropy in nats (fp32 scalar) and number of tokens whose most likely prediction is right (int64 scalar)."""

    loss_sum: torch.Tensor
    num_correct: torch.Tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of `hidden @ weight.T + bias` against `targets`.

    The gradients are computed chunk by chunk in forward, while a chunk's logits exist, and only scaled in backward:
    three matrix products instead of the four that recomputation would need, for the price of one gradient of the head's
    size, which backward would need a moment later anyway. Softmax and the sum over chunks are fp32.
    """

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes its inputs by position
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        chunk: int,
        wants: tuple[bool, bool, bool],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wants_hidden, wants_weight, wants_bias = wants
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if wants_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        # One buffer for the logits of every chunk: fresh pages cost a third of the product on a CPU (torch 2.13, [1024, 102400] fp32).
        buffer = hidden.new_empty(min(chunk, len(hidden)), weight.shape[0])
        for start in range(0, len(hidden), chunk):
            part, wanted = hidden[start : start + chunk], targets[start : start + chunk]
            logits = _logits(part, weight, bias, buffer[: len(part)])
            top, most_likely = logits.max(-1, keepdim=True)
            correct += (most_likely.squeeze(1) == wanted).sum()
            loss += (top - logits.gather(1, wanted[:, None])).sum()
            weights = logits.sub_(top).exp_()
            norm = weights.sum(-1, keepdim=True)
            loss += norm.log().sum()
            if not any(wants):
                continue
            d_logits = weights.div_(norm)
            d_logits[torch.arange(len(wanted), device=wanted.device), wanted] -= 1
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[start : start + chunk])
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, part)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = (weight.dtype, bias.dtype if bias is not None else None)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        d_hidden, d_weight, d_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if d_hidden is None else d_hidden * d_loss,
            None if d_weight is None else d_weight.mul_(d_loss).to(weight_dtype),
            None if d_bias is None else d_bias.mul_(d_loss).to(bias_dtype),
            None,
            None,
            None,
        )


def _logits(part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, buffer: torch.Tensor) -> torch.Tensor:
    """`part @ weight.T + bias` in fp32, in `buffer` where that is fp32."""
    torch.mm(part, weight.T, out=buffer)
    logits = buffer.float()
    return logits if bias is None else logits.add_(bias)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to the fp32 `total`."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    else:
        total += left @ right


class LossHead(nn.Linear):
    """A language-model head that gives logits as before, and with `labels` the summed loss without them."""

    chunk_tokens: int = CHUNK_TOKENS

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> Any:  # noqa: ANN401 - logits or TokenLoss
        """`hidden` [..., width] -> logits [..., vocabulary]; with `labels` [...] (already shifted, int64) -> TokenLoss.

        Positions whose label is IGNORE_INDEX cost nothing. Without a supervised position the loss is 0 and its
        gradients are zeros, so every rank still takes part in the reductions.
        """
        if labels is None:
            return super().forward(hidden)
        places = (labels.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
        part = hidden.reshape(-1, hidden.shape[-1]).index_select(0, places)
        targets = labels.reshape(-1).index_select(0, places)
        is_on = torch.is_grad_enabled()
        wants = (is_on and part.requires_grad, is_on and self.weight.requires_grad, is_on and self.bias is not None and self.bias.requires_grad)
        return TokenLoss(*_ChunkedCrossEntropy.apply(part, self.weight, self.bias, targets, self.chunk_tokens, wants))


def install_loss_head(lm: PreTrainedModel, *, chunk_tokens: int = CHUNK_TOKENS) -> LossHead:
    """Turn the head of `lm` into a LossHead in place: same module, same parameters, same name."""
    head = lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(f"the head of {type(lm).__name__} is a {type(head).__name__}, not a Linear", hint="train a model with a plain head")
    head.__class__ = LossHead
    assert isinstance(head, LossHead)
    head.chunk_tokens = chunk_tokens
    return head


class TrainedModel(nn.Module):
    """A causal LM whose forward is the loss; the Hugging Face model is `lm`."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    @property
    def config(self) -> Any:  # noqa: ANN401 - a PretrainedConfig
        """The model's configuration, where DeepSpeed looks for it."""
        return self.lm.config

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor, documents: tuple[Documents, ...] | None
    ) -> TokenLoss:
        """Loss of rows [batch, tokens] (int64 each) whose documents have the lengths `documents`; None where a row is one."""
        return self.lm.get_output_embeddings()(self.hidden(input_ids, position_ids, documents), labels)

    def hidden(self, input_ids: torch.Tensor, position_ids: torch.Tensor, documents: tuple[Documents, ...] | None) -> torch.Tensor:
        """Hidden states before the head, [batch, tokens, width].

        Documents are kept apart by their lengths where attention is by document, by positions that start again where it is
        transformers'. No attention mask and no cache are given: with either, transformers 5.23 does not look at the positions
        (masking_utils.py:873) and packed documents would see each other.
        """
        lengths = {"documents": documents} if self.lm.config._attn_implementation == BY_DOCUMENT else {}
        return self.lm.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **lengths).last_hidden_state
