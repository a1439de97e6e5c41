"""An ordinary PyTorch training loop with transformers' model and all its logits, which `bench` compares with."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ds_finetune.config.objectives import DistillObjective
from ds_finetune.data.batches import Batch
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.loss_normalisation import term_weights, unit_counts
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import Distillation, DocumentLogProbs, is_of_documents, is_of_scores
from ds_finetune.reference.bench.plain_forwards import PlainForward
from ds_finetune.reference.bench.plain_models import plain_model

LR = 1e-4

Layout = Callable[[Batch], list[PlainForward]]


class PlainLoop:
    """A copy of the engine's model as transformers and peft build it, trained by torch's AdamW on its objective."""

    def __init__(self, engine: Engine, model: ModelPlan, layout: Layout, *, teacher: nn.Module | None = None) -> None:
        self._layout, self._objective = layout, engine.objective
        self._precision, self._device = engine.plan.precision, engine.plan.device
        self._max_norm = engine.plan.optimizer.max_grad_norm or float("inf")
        self._teacher = teacher
        self._lm: Any = plain_model(engine, model).train()
        if engine.plan.activation_checkpointing:
            self._lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            self._lm.parameters(), lr=LR, betas=engine.plan.optimizer.betas, weight_decay=0.0
        )

    def step(self, batch: Batch) -> float:
        """One optimizer step; the loss is the mean over the units of the batch."""
        total, weights = 0.0, term_weights(self._objective.terms, unit_counts(batch.counts)).to(self._device)
        baseline = torch.tensor(self._baseline(batch), dtype=torch.float64, device=self._device)
        for part in self._layout(batch):
            loss = self._loss(self._with_reference(part), weights, baseline)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._lm.parameters(), self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    @torch.no_grad()
    def _baseline(self, batch: Batch) -> float:
        """z0 of KTO, else 0."""
        if not self._objective.needs_baseline:
            return 0.0
        parts = map(self._with_reference, self._layout(replace(batch, micro=batch.baseline)))
        every = [self._documents(self._logits(part), part) for part in parts]
        ratios = torch.cat([documents.logp - documents.reference for documents in every])
        return self._objective.baseline(ratios.sum().item(), len(ratios))

    @torch.no_grad()
    def _with_reference(self, part: PlainForward) -> PlainForward:
        """The forward with log-probabilities of the reference, where that is the model without its adapters."""
        if not self._objective.reference_from_adapters:
            return part
        with self._lm.disable_adapter():
            return replace(part, reference=self._documents(self._logits(part), part).logp)

    def _loss(self, part: PlainForward, weights: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
        """The contribution of a forward to the loss of the batch."""
        logits = self._logits(part)
        if is_of_scores(self._objective):
            return self._objective.loss(logits, part.targets.to(self._device), weights).loss
        if is_of_documents(self._objective):
            return self._objective.loss(self._documents(logits, part), weights, baseline).loss
        labels = part.labels.to(self._device)
        if isinstance(self._objective, Distillation):
            is_supervised = labels != IGNORE_INDEX
            section = self._objective.section
            targets = self._targets(part, is_supervised, section)
            return _distillation(section, logits[is_supervised], labels[is_supervised], *targets) * weights[0]
        return (
            functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
            * weights[0].float()
        )

    def _logits(self, part: PlainForward) -> torch.Tensor:
        """Logits of all tokens, fp32 [rows, tokens, vocabulary], or the scores of the rows, fp32 [rows, outputs]."""
        inputs = {name: tensor.to(self._device) for name, tensor in part.inputs.items()}
        if is_of_scores(self._objective):
            # transformers pools the last token that is not this one (5.23, modeling_layers.py:170).
            is_padding = part.index.to(self._device) < 0
            inputs["input_ids"] = inputs["input_ids"].masked_fill(is_padding, self._lm.config.pad_token_id)
        with self._autocast():
            logits: torch.Tensor = self._lm(**inputs, use_cache=False).logits.float()
        return logits

    def _autocast(self) -> AbstractContextManager[Any]:
        is_mixed = self._precision != "fp32"
        return torch.autocast(self._device, PRECISION_DTYPES[self._precision]) if is_mixed else nullcontext()

    def _documents(self, logits: torch.Tensor, part: PlainForward) -> DocumentLogProbs:
        labels = part.labels.to(self._device).flatten()
        losses = functional.cross_entropy(logits.flatten(0, 1), labels, ignore_index=IGNORE_INDEX, reduction="none")
        is_supervised = labels != IGNORE_INDEX
        documents = part.index.to(self._device).flatten()[is_supervised]
        zeros = torch.zeros(len(part.targets), dtype=torch.float64, device=self._device)
        return DocumentLogProbs(
            logp=zeros.index_add(0, documents, -losses[is_supervised].double()),
            num_tokens=zeros.index_add(0, documents, torch.ones_like(documents, dtype=torch.float64)),
            target=part.targets.to(self._device),
            reference=part.reference.to(self._device),
        )

    @torch.no_grad()
    def _targets(
        self, part: PlainForward, is_supervised: torch.Tensor, section: DistillObjective
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The teacher's log-probabilities of the supervised tokens, and their ids where only some are stored."""
        if part.top is not None:
            top = part.top.to(torch.device(self._device))
            return top.log_probs[is_supervised].float(), top.ids[is_supervised].long()
        assert self._teacher is not None
        inputs = {name: tensor.to(self._device) for name, tensor in part.inputs.items()}
        with self._autocast():
            logits = self._teacher(**inputs, use_cache=False).logits.float()[is_supervised]
        return torch.log_softmax(logits / section.temperature, dim=-1), None


def _distillation(
    section: DistillObjective,
    logits: torch.Tensor,
    labels: torch.Tensor,
    wanted: torch.Tensor,
    ids: torch.Tensor | None,
) -> torch.Tensor:
    """The loss of distillation summed over supervised tokens; `wanted` are the teacher's log-probabilities."""
    found = torch.log_softmax(logits / section.temperature, dim=-1)
    if ids is not None:
        others = found.scatter(1, ids, float("-inf")).logsumexp(-1, keepdim=True)
        found, wanted = torch.cat([found.gather(1, ids), others], dim=-1), torch.log_softmax(wanted, dim=-1)
    divergence = (wanted.exp() * (wanted - found)).sum()
    label_loss = functional.cross_entropy(logits, labels, reduction="sum")
    return section.label_weight * label_loss + (1 - section.label_weight) * section.temperature**2 * divergence
