"""An ordinary PyTorch training loop with transformers' model and all its logits, which `bench` compares with."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig

from ds_finetune.auto_models import AutoModelForCausalLM, AutoModelForSequenceClassification
from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.loss_normalisation import term_weights
from ds_finetune.labels import IGNORE_INDEX
from ds_finetune.model.dtypes import PRECISION_DTYPES
from ds_finetune.objectives.objective import DocumentLogProbs, DocumentObjective, ScoreObjective

LR = 1e-4
PADDED_DOCUMENTS = 8
"""Documents in one forward of the padded loop."""


@dataclass(frozen=True)
class PlainForward:
    """Inputs of one forward of transformers' model, and the labels of its tokens.

    `index` int64 [rows, tokens] is the number of each token's document, -1 for padding; `targets` and `reference` fp64
    [documents] belong to the documents.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    index: torch.Tensor
    targets: torch.Tensor
    reference: torch.Tensor


Layout = Callable[[Batch], list[PlainForward]]


class PlainLoop:
    """A copy of the engine's model as transformers builds it, trained by torch's AdamW on the engine's objective."""

    def __init__(self, engine: Engine, hf_config: PretrainedConfig, layout: Layout) -> None:
        self._layout, self._objective = layout, engine.objective
        self._precision, self._device = engine.plan.precision, engine.plan.device
        self._max_norm = engine.plan.optimizer.max_grad_norm or float("inf")
        config = copy.deepcopy(hf_config)
        config._attn_implementation = "sdpa"
        is_scored = isinstance(self._objective, ScoreObjective)
        auto_class = AutoModelForSequenceClassification if is_scored else AutoModelForCausalLM
        self._lm = auto_class.from_config(config).to(torch.float32)
        self._lm.load_state_dict(
            {name: tensor for name, tensor in engine.tensors() if tensor is not None}, strict=False
        )
        self._lm.to(self._device).train()
        if engine.plan.activation_checkpointing:
            self._lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            self._lm.parameters(), lr=LR, betas=engine.plan.optimizer.betas, weight_decay=0.0
        )

    def step(self, batch: Batch) -> float:
        """One optimizer step; the loss is the mean over the units of the batch."""
        total, weights = 0.0, term_weights(self._objective.terms, batch.counts).to(self._device)
        for part in self._layout(batch):
            inputs = {name: tensor.to(self._device) for name, tensor in part.inputs.items()}
            if isinstance(self._objective, ScoreObjective):
                # transformers pools the last token that is not this one (5.23, modeling_layers.py:170).
                is_padding = part.index.to(self._device) < 0
                inputs["input_ids"] = inputs["input_ids"].masked_fill(is_padding, self._lm.config.pad_token_id)
            is_mixed = self._precision != "fp32"
            with torch.autocast(self._device, PRECISION_DTYPES[self._precision]) if is_mixed else nullcontext():
                logits = self._lm(**inputs, use_cache=False).logits.float()
            loss = self._loss(logits, part, weights)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._lm.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def _loss(self, logits: torch.Tensor, part: PlainForward, weights: torch.Tensor) -> torch.Tensor:
        """The contribution of a forward to the loss of the batch."""
        labels, targets = part.labels.to(self._device), part.targets.to(self._device)
        if isinstance(self._objective, ScoreObjective):
            return self._objective.loss(logits, targets, weights).loss
        losses = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        if not isinstance(self._objective, DocumentObjective):
            return losses.sum() * weights[0].float()
        is_supervised = labels.flatten() != IGNORE_INDEX
        documents = part.index.to(self._device).flatten()[is_supervised]
        zeros = torch.zeros(len(targets), dtype=torch.float64, device=self._device)
        logps = zeros.index_add(0, documents, -losses[is_supervised].double())
        num_tokens = zeros.index_add(0, documents, torch.ones_like(documents, dtype=torch.float64))
        reference = part.reference.to(self._device)
        return self._objective.loss(
            DocumentLogProbs(logps, num_tokens, targets, reference), weights, zeros.new_zeros(())
        ).loss


def packed_forwards(batch: Batch) -> list[PlainForward]:
    """The engine's own rows, with positions that restart at each document."""
    return [_packed(micro) for micro in batch.micro]


def _packed(micro: MicroBatch) -> PlainForward:
    inputs = {"input_ids": micro.input_ids, "position_ids": micro.position_ids}
    if micro.examples is None:
        none = torch.zeros(0, dtype=torch.float64)
        return PlainForward(inputs, micro.labels, torch.full_like(micro.labels, -1), none, none)
    examples = micro.examples
    return PlainForward(inputs, micro.labels, examples.index, examples.targets, examples.reference)


def padded_forwards(batch: Batch) -> list[PlainForward]:
    """Documents of a batch in rows of their own, `PADDED_DOCUMENTS` to a forward, padded to the longest."""
    documents = [document for micro in batch.micro for document in _documents(micro)]
    return [
        _padded(documents[start : start + PADDED_DOCUMENTS]) for start in range(0, len(documents), PADDED_DOCUMENTS)
    ]


_Document = tuple[torch.Tensor, torch.Tensor, float, float]
"""Ids, labels, target and reference log-probability."""


def _documents(micro: MicroBatch) -> Iterator[_Document]:
    """The documents of a forward, without padding."""
    for number, (ids, labels) in enumerate(zip(micro.input_ids, micro.labels, strict=True)):
        lengths = micro.documents[number] if micro.documents else (len(ids),)
        if micro.examples is None:
            whole = zip(ids.split(lengths), labels.split(lengths), strict=True)
            yield from ((*document, 0.0, 0.0) for document in whole if bool((document[1] != IGNORE_INDEX).any()))
            continue
        examples, index = micro.examples, micro.examples.index[number]
        for document in index[index >= 0].unique_consecutive().tolist():
            here = index == document
            yield ids[here], labels[here], examples.targets[document].item(), examples.reference[document].item()


def _padded(documents: list[_Document]) -> PlainForward:
    ids, labels, targets, reference = zip(*documents, strict=True)
    mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    rows = torch.arange(len(ids))[:, None].expand_as(mask)
    return PlainForward(
        {"input_ids": pad_sequence(list(ids), batch_first=True), "attention_mask": mask},
        pad_sequence(list(labels), batch_first=True, padding_value=IGNORE_INDEX),
        torch.where(mask.bool(), rows, -1),
        torch.tensor(targets, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
    )
