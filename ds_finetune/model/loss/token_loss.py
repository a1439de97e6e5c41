"""The loss of supervised tokens, computed in chunks, so that logits of all tokens [tokens, vocabulary] never exist."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.model.attention.by_document import (
    BY_DOCUMENT,
    BY_LENGTHS,
    FLASH,
    Documents,
    flash_arguments,
    mask_context,
)
from ds_finetune.model.attention.kernels import PackedDocuments, pack_documents
from ds_finetune.model.build.encoder import encoder_inputs, encoder_of
from ds_finetune.model.build.skeleton import head_of, soft_cap
from ds_finetune.model.loss.cross_entropy import Kernel, chunked_cross_entropy
from ds_finetune.model.loss.extra_loss import ExtraLoss, add_extra_losses
from ds_finetune.model.loss.forward_rows import ForwardRows, StageOutput, find_supervised
from ds_finetune.model.loss.head_chunks import HeadInputs, loss_with_gradients
from ds_finetune.model.loss.log_probs import (
    DocumentTokens,
    LossOfAnswers,
    LossOfDocuments,
    TwoPassHead,
    loss_of_log_probs,
)
from ds_finetune.model.parallel.pipeline import ModelChunks, PipelineGroup
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.parallel.tensor import TensorParallelGroup, copy_to_tensor_parallel_region
from ds_finetune.model.weights.fp32_weights import Fp32Weights
from ds_finetune.objectives.objective import (
    AnswerObjective,
    DocumentObjective,
    Examples,
    LossAndSums,
    Objective,
    StepNumbers,
    TokenObjective,
)


@dataclass(frozen=True)
class HeadGroups:
    """Process groups that a head needs to compute its loss. Each is None without its kind of parallelism."""

    tp: TensorParallelGroup | None = None
    sp: SequenceParallelGroup | None = None
    pp: PipelineGroup | None = None
    """Pipeline stages. The last stage has the head, and sends its logits to the others."""


class LossHead(nn.Linear):
    """Language model head that returns logits or, with `labels`, the loss. It never holds the logits of all tokens."""

    kernel: Kernel = staticmethod(chunked_cross_entropy)
    objective: Objective = TokenObjective("sft")
    groups = HeadGroups()
    cap: float | None = None
    """Soft cap of the logits in the loss. Returned logits are capped by the model's own forward."""
    forbidden: torch.Tensor | None = None
    """Mask of token ids that are never sampled, bool [vocabulary] or its shard. The loss on answers excludes them."""

    def forward(  # noqa: PLR0913
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        numbers: StepNumbers | None = None,
        examples: Examples | None = None,
        *,
        supervised: torch.Tensor | None = None,
        wants_log_probs: bool = False,
        is_trained: bool = True,
    ) -> Any:  # noqa: ANN401 - logits, LossAndSums or log-probabilities
        """Map `hidden` [..., width] to logits [..., vocabulary] or, with shifted int64 `labels` [...], to LossAndSums.

        With `wants_log_probs`, return the log-probability of each document of `examples`, summed over supervised
        tokens, fp64 [documents], without gradient and identical on all tensor and sequence parallel ranks. For sampled
        answers return the log-probabilities of this rank's tokens, fp32 [supervised tokens].

        Without `is_trained` the head's own weights get no gradient. `supervised`, int64 [supervised tokens], has the
        indices of labels other than IGNORE_INDEX; with None they are searched, which synchronises host and GPU. Without
        supervised tokens the loss is 0 with zero gradients, so that every rank takes part in reductions.
        """
        if labels is None:
            logits = super().forward(hidden)
            logits = logits if self.groups.tp is None else self.groups.tp.all_gather_last_dim(logits)
            return logits if self.groups.pp is None else self.groups.pp.broadcast_from_last(logits)
        supervised = find_supervised(labels) if supervised is None else supervised
        part = hidden.reshape(-1, hidden.shape[-1]).index_select(0, supervised)
        part = part if self.groups.tp is None else copy_to_tensor_parallel_region(part, self.groups.tp)
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if not is_trained:
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        inputs = HeadInputs(part, weight, bias, labels.reshape(-1).index_select(0, supervised), self.cap)
        if not wants_log_probs and self.objective.is_per_token:
            loss_sum, sums = loss_with_gradients(inputs, partial(self.kernel, inputs))
            return LossAndSums(loss_sum if numbers is None else loss_sum * numbers.weights[0].to(loss_sum.dtype), sums)
        assert examples is not None, "the batch has no examples; set documents_per_unit in its BatchPlan"
        index = examples.index.reshape(-1).index_select(0, supervised)
        tokens = DocumentTokens(index, examples, self.groups.sp)
        if isinstance(self.objective, AnswerObjective):
            head = TwoPassHead(
                inputs, tp_group=self.groups.tp, forbidden=self.forbidden, with_entropy=not wants_log_probs
            )
            if wants_log_probs:
                return head.log_probs()
            return loss_of_log_probs(inputs, LossOfAnswers(self.objective, supervised, tokens, numbers, head), head)
        head = TwoPassHead(inputs, tp_group=self.groups.tp)
        if wants_log_probs:
            return tokens.sums(head.log_probs()).logp
        assert isinstance(self.objective, DocumentObjective), type(self.objective)
        return loss_of_log_probs(inputs, LossOfDocuments(self.objective, tokens, numbers), head)


def install_loss_head(
    lm: PreTrainedModel,
    *,
    kernel: Kernel = chunked_cross_entropy,
    objective: Objective = LossHead.objective,
    groups: HeadGroups = LossHead.groups,
) -> LossHead:
    """Turn the head of `lm` into a LossHead in place, with the same parameters and names.

    `kernel` computes the cross entropy; with a tensor parallel group it must support a shard of the vocabulary.
    """
    head = lm.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(
            f"the head of {type(lm).__name__} is a {type(head).__name__}, not a Linear",
            hint="train a model whose head is a torch.nn.Linear",
        )
    head.__class__ = LossHead
    assert isinstance(head, LossHead)
    head.kernel, head.objective, head.groups, head.cap = kernel, objective, groups, soft_cap(lm.config)
    return head


class TrainedModel(nn.Module):
    """The module that is trained. Its forward returns the loss. `lm` is the transformers model or a pipeline stage."""

    extras: tuple[ExtraLoss, ...] = ()
    packs_documents = False
    """Whether one attention kernel call computes all documents of a forward."""
    _packed: tuple[tuple[Documents, ...], PackedDocuments] | None = None
    chunks: ModelChunks | None = None
    """This rank's chunks of layers in an interleaved pipeline; None if each rank has one chunk."""
    in_fp32: Fp32Weights
    """Parameters whose fp32 values a 16-bit run uses in forwards."""

    def __init__(
        self, lm: PreTrainedModel, sp_group: SequenceParallelGroup | None = None, pp_group: PipelineGroup | None = None
    ) -> None:
        super().__init__()
        self.lm = lm
        self.sp_group = sp_group
        self.pp_group = pp_group

    def continues_documents(self, device: torch.device) -> bool:
        """Whether a document may have the first tokens of an earlier one as prefix (`MicroBatch.shared`). This needs
        attention within documents on `device`, and no other layers that mix tokens.
        """
        family = family_of(self.config.model_type)
        is_by_document = self.config._attn_implementation == BY_DOCUMENT and (
            self.packs_documents or device.type == "cpu"
        )
        return is_by_document and not (family.is_generic or family.indexer or family.has_state)

    @property
    def has_head(self) -> bool:
        """Whether the forward ends with the head on this rank. Other pipeline stages return hidden states."""
        return self.pp_group is None or self.pp_group.runs_head

    @property
    def config(self) -> Any:  # noqa: ANN401 - a PretrainedConfig
        """The model's configuration, in the attribute that DeepSpeed reads."""
        return self.lm.config

    def forward(
        self, rows: ForwardRows, numbers: StepNumbers | None = None, *, wants_log_probs: bool = False
    ) -> LossAndSums | StageOutput | torch.Tensor:
        """Compute the objective's loss of `rows` and, with `numbers`, the auxiliary losses.

        With `wants_log_probs`, return the examples' log-probabilities instead, fp64 [documents]. Pipeline stages or
        chunks before the last one return hidden states.
        """
        chunk = None if self.pp_group is None else self.pp_group.running_chunk
        assert chunk is None or self.chunks is not None, chunk
        with nullcontext() if chunk is None or self.chunks is None else self.chunks.only(chunk):
            return self._loss(rows, numbers, wants_log_probs=wants_log_probs)

    def _loss(
        self, rows: ForwardRows, numbers: StepNumbers | None, *, wants_log_probs: bool
    ) -> LossAndSums | StageOutput | torch.Tensor:
        inputs = self.head_inputs(rows)
        # Only language model heads have the argument `wants_log_probs`.
        inputs |= {"wants_log_probs": True} if wants_log_probs else {}
        extras = () if numbers is None or wants_log_probs else self.extras
        is_first = self.pp_group is None or not self.pp_group.running_chunk
        with ExitStack() as stack:
            for extra in extras:
                stack.enter_context(extra.listen(rows, is_counting=self.training, is_first=is_first))
            hidden = self.hidden(rows.input_ids, rows.position_ids, rows.documents, rows.token_types, rows.shared)
        weights: list[torch.Tensor] = []
        if numbers is not None:
            sizes = [len(extra.terms) for extra in extras]
            main_weights, *weights = numbers.weights.split([len(numbers.weights) - sum(sizes), *sizes])
            numbers = numbers._replace(weights=main_weights)
        extra_loss, extra_sums = add_extra_losses(extras, rows, hidden, weights)
        if not self.has_head:
            return StageOutput(hidden, extra_loss, extra_sums)
        out: LossAndSums | torch.Tensor = head_of(self.lm)(hidden, rows.labels, numbers, **inputs)
        if not extras:
            return out
        assert isinstance(out, LossAndSums)
        loss = out.loss if extra_loss is None else out.loss + extra_loss
        return out._replace(loss=loss, sums=torch.cat([out.sums, extra_sums]))

    def head_inputs(self, rows: ForwardRows) -> dict[str, Any]:
        """Prepare the head's arguments from `rows`, before the forward, when no activations are in memory yet."""
        return {"examples": rows.examples, "supervised": rows.supervised}

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        documents: tuple[Documents, ...] | None,
        token_types: torch.Tensor | None = None,
        shared: tuple[Documents, ...] | None = None,
    ) -> torch.Tensor:
        """Compute hidden states before the head, [batch, tokens, width].

        Attention by document and FlashAttention separate documents by their lengths, other implementations of
        transformers by position ids that restart at 0. No attention mask and no cache are passed: with either,
        transformers 5.23 ignores position ids (masking_utils.py:873), and packed documents would attend to each other.
        """
        lengths = self.document_arguments(documents, input_ids.device, shared)
        inputs = {"position_ids": position_ids, "input_ids": input_ids}
        if encoder_of(self.lm.config) is not None:
            inputs = {"input_ids": input_ids, **encoder_inputs(self.lm.config, position_ids, token_types)}
        with mask_context(self.lm):
            return self.lm.base_model(use_cache=False, **inputs, **lengths).last_hidden_state

    def document_arguments(
        self, documents: tuple[Documents, ...] | None, device: torch.device, shared: tuple[Documents, ...] | None = None
    ) -> dict[str, Any]:
        """Keyword arguments that tell attention where documents begin, and how long their prefixes (`shared`) are."""
        attention = self.lm.config._attn_implementation
        if attention == BY_DOCUMENT:
            packed = None
            if self.packs_documents and documents is not None:
                if self._packed is None or self._packed[0] is not documents:
                    self._packed = documents, pack_documents(documents, device, shared)
                packed = self._packed[1]
            arguments = {"documents": documents, "sp_group": self.sp_group, "packed": packed}
            return arguments if shared is None else arguments | {"shared": shared}
        assert shared is None, attention
        if attention in (FLASH, BY_LENGTHS) and documents is not None:
            return flash_arguments(documents, device)
        return {}
