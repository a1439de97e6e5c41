"""An ordinary PyTorch training loop with transformers' model, with which `bench` compares the engine."""

import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from ds_finetune.config.objectives import DistillObjective
from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.engine.engine import Engine
from ds_finetune.engine.loss_normalisation import term_weights, unit_counts
from ds_finetune.errors import ConfigError
from ds_finetune.export.adapter import AdapterBase, write_adapter
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.foreign.torch_nn import without_cpu_packing
from ds_finetune.model.adapters.lora import factors_of
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import FACTORIES, resolve_folder
from ds_finetune.model.loss.teacher import TeacherPlan
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import (
    Distillation,
    DocumentLogProbs,
    DocumentObjective,
    ScoreObjective,
    TopLogProbs,
)
from ds_finetune.reference.selftest.plain_losses import distill_loss
from ds_finetune.system.versions import pip_install, requirements_of

PADDED_DOCUMENTS = 8
"""Number of documents in one forward pass of the PyTorch loop that pads rows."""


@dataclass(frozen=True)
class PlainForward:
    """Inputs of one forward pass of transformers' model, and labels of its tokens.

    `index`, int64 [rows, tokens], is the number of each token's document, or -1 for padding. `targets` and `reference`,
    fp64 [documents], are each document's target and its log-probability under the reference model. `top` has a
    teacher's stored distributions.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    index: torch.Tensor
    targets: torch.Tensor
    reference: torch.Tensor
    top: TopLogProbs | None = None


def packed_forwards(batch: Batch) -> list[PlainForward]:
    """Make forward passes over the rows that the engine has packed. Positions restart at each document."""
    return [_packed(micro) for micro in batch.micro]


def _packed(micro: MicroBatch) -> PlainForward:
    inputs = {"input_ids": micro.input_ids, "position_ids": micro.position_ids}
    if micro.examples is None:
        none = torch.zeros(0, dtype=torch.float64)
        return PlainForward(inputs, micro.labels, torch.full_like(micro.labels, -1), none, none)
    examples = micro.examples
    return PlainForward(inputs, micro.labels, examples.index, examples.targets, examples.reference, examples.top)


def padded_forwards(batch: Batch) -> list[PlainForward]:
    """Make forward passes with a document per row and at most `PADDED_DOCUMENTS` rows, padded to the longest."""
    documents = [document for micro in batch.micro for document in _documents(micro)]
    return [
        _padded(documents[start : start + PADDED_DOCUMENTS]) for start in range(0, len(documents), PADDED_DOCUMENTS)
    ]


class _PlainDocument(NamedTuple):
    """A document without padding. `ids`, `labels` and `token_types` are [tokens]; token types are 1 for a second text.
    `reference` is the log-probability under the reference model, and `top` a teacher's distributions [tokens, ...].
    """

    ids: torch.Tensor
    labels: torch.Tensor
    target: float = 0.0
    reference: float = 0.0
    top: TopLogProbs | None = None
    token_types: torch.Tensor | None = None


def _documents(micro: MicroBatch) -> Iterator[_PlainDocument]:
    for number, (ids, labels) in enumerate(zip(micro.input_ids, micro.labels, strict=True)):
        lengths = micro.documents[number] if micro.documents else (len(ids),)
        if micro.examples is None:
            documents = zip(ids.split(lengths), labels.split(lengths), strict=True)
            yield from (
                _PlainDocument(*document) for document in documents if bool((document[1] != IGNORE_INDEX).any())
            )
            continue
        examples, index = micro.examples, micro.examples.index[number]
        for document in index[index >= 0].unique_consecutive().tolist():
            mask = index == document
            top, types = examples.top, micro.token_types
            yield _PlainDocument(
                ids[mask],
                labels[mask],
                examples.targets[document].item(),
                examples.reference[document].item(),
                None if top is None else TopLogProbs(top.ids[number, mask], top.log_probs[number, mask]),
                None if types is None else types[number, mask],
            )


def _padded(documents: list[_PlainDocument]) -> PlainForward:
    ids, labels, targets, reference, _, types = zip(*documents, strict=True)
    tops, names = [document.top for document in documents if document.top is not None], ("ids", "log_probs")
    mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    rows = torch.arange(len(ids))[:, None].expand_as(mask)
    inputs = {"input_ids": pad_sequence(list(ids), batch_first=True), "attention_mask": mask}
    if all(each is not None for each in types) and any(each.any() for each in types):
        inputs["token_type_ids"] = pad_sequence(list(types), batch_first=True)
    return PlainForward(
        inputs,
        pad_sequence(list(labels), batch_first=True, padding_value=IGNORE_INDEX),
        torch.where(mask.bool(), rows, -1),
        torch.tensor(targets, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
        TopLogProbs(*(pad_sequence([getattr(top, name) for top in tops], batch_first=True) for name in names))
        if tops
        else None,
    )


def check_peft(model: ModelPlan) -> None:
    """Raise ConfigError if peft is not installed, or cannot represent the run's adapters."""
    if model.lora is None:
        return
    rank, quantize = model.lora.section.rank, model.lora.section.quantize
    if model.lora.section.dropout:
        raise ConfigError(
            f"bench cannot compare losses with lora.dropout {model.lora.section.dropout}: peft drops out other values",
            hint="set lora.dropout: 0",
        )
    if find_spec("peft") is None:
        peft = [line for line in requirements_of("test") if line.name == "peft"]
        raise ConfigError(
            f"bench compares runs with LoRA (lora.rank {rank}) with peft, which is not installed",
            hint=f"{pip_install(*peft)}, or leave `lora` out",
        )
    stored = json.loads((resolve_folder(model.path) / "config.json").read_text(encoding="utf-8"))
    if quantize is not None and "quantization_config" in stored:
        raise ConfigError(
            f"bench cannot load {model.path} in {quantize} with transformers, since its weights are stored in "
            f"{stored['quantization_config'].get('quant_method')}",
            hint="leave lora.quantize out, or set model.path to a copy of the model in bf16",
        )


def plain_model(engine: Engine, model: ModelPlan) -> Any:  # noqa: ANN401 - of transformers or peft
    """Build transformers' model with the engine's current weights, on the engine's device. Weights are fp32, for
    autocast. With LoRA, peft's adapters are added, and the frozen base weights have the run's precision, or are loaded
    in 4 bits by transformers and bitsandbytes.
    """
    device, lora, in_four_bits = engine.plan.device, model.lora, {f"{name}.weight" for name in model.quantised}
    dtype = torch.float32 if lora is None else PRECISION_DTYPES[engine.plan.precision]
    lm = _four_bit_model(model, engine) if in_four_bits else FACTORIES[model.task].from_config(_config(model)).to(dtype)
    lm.load_state_dict(
        {name: tensor for name, tensor in engine.tensors() if tensor is not None and name not in in_four_bits},
        strict=False,
    )
    if lora is None:
        return lm.to(device)
    from peft import PeftModel

    adapters = {name: tensor.clone() for name, tensor in engine.adapters() if tensor is not None}
    trained = engine.named_tensors(lora.fully_trained)
    base = AdapterBase(
        name=model.path,
        digest="",
        family=model.family,
        trained={name: tensor.clone() for name, tensor in trained if tensor is not None},
        classifier_config={} if model.task == "causal_lm" else model.hf_config.to_dict(),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "adapter"
        write_adapter(factors_of(adapters, lora.section.scale), lora.section, path, base)
        return PeftModel.from_pretrained(lm, path, is_trainable=True).to(device)


def _config(model: ModelPlan) -> Any:  # noqa: ANN401 - of transformers
    config = copy.deepcopy(model.hf_config)
    config._attn_implementation = "sdpa"
    return config


def _four_bit_model(model: ModelPlan, engine: Engine) -> Any:  # noqa: ANN401 - of transformers
    from transformers import BitsAndBytesConfig

    dtype = PRECISION_DTYPES[engine.plan.precision]
    modules = build_meta_model(model.hf_config, model.task).named_modules()
    unquantised = [name for name, module in modules if isinstance(module, nn.Linear) and name not in model.quantised]
    options: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantisation = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=dtype, llm_int8_skip_modules=unquantised)
    lm = FACTORIES[model.task].from_pretrained(
        resolve_folder(model.path),
        config=_config(model),
        dtype=dtype,
        quantization_config=quantisation,
        device_map={"": engine.plan.device},
        trust_remote_code=False,
    )
    for name in model.quantised:
        without_cpu_packing(lm.get_submodule(name))
    return lm


def load_plain_teacher(teacher: TeacherPlan | None, device: str) -> nn.Module | None:
    """Load the teacher of a distillation with transformers, in fp32 and evaluation mode; None without a teacher."""
    if teacher is None:
        return None
    lm: nn.Module = AutoModelForCausalLM.from_pretrained(
        resolve_folder(teacher.path), dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
    )
    return lm.to(device).eval()


LR = 1e-4

Layout = Callable[[Batch], list[PlainForward]]


class PlainLoop:
    """Trains the engine's model, built by transformers and peft, with torch's AdamW and the engine's objective."""

    def __init__(self, engine: Engine, model: ModelPlan, layout: Layout, *, teacher: nn.Module | None = None) -> None:
        self._layout, self._objective = layout, engine.objective
        self._precision, self._device = engine.plan.precision, engine.plan.device
        self._max_norm = engine.plan.train.max_grad_norm or float("inf")
        self._teacher = teacher
        self._lm: Any = plain_model(engine, model).train()
        if engine.plan.recomputes:
            self._lm.gradient_checkpointing_enable({"use_reentrant": False})
        self._optimizer = torch.optim.AdamW(
            self._lm.parameters(), lr=LR, betas=engine.plan.optim.betas, weight_decay=0.0
        )

    def step(self, batch: Batch) -> float:
        """Take one optimizer step. Returns the loss, which is the mean over the supervised units of the batch."""
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
        if not self._objective.needs_baseline:
            return 0.0
        parts = map(self._with_reference, self._layout(replace(batch, micro=batch.baseline)))
        document_log_probs = [self._documents(self._logits(part), part) for part in parts]
        ratios = torch.cat([documents.logp - documents.reference for documents in document_log_probs])
        return self._objective.baseline(ratios.sum().item(), len(ratios))

    @torch.no_grad()
    def _with_reference(self, part: PlainForward) -> PlainForward:
        """Add reference log-probabilities to the inputs, if the reference is the model with its adapters disabled."""
        if not self._objective.reference_from_adapters:
            return part
        with self._lm.disable_adapter():
            return replace(part, reference=self._documents(self._logits(part), part).logp)

    def _loss(self, part: PlainForward, weights: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
        logits = self._logits(part)
        if isinstance(self._objective, ScoreObjective):
            return self._objective.loss(logits, part.targets.to(self._device), weights).loss
        if isinstance(self._objective, DocumentObjective):
            return self._objective.loss(self._documents(logits, part), weights, baseline).loss
        labels = part.labels.to(self._device)
        if isinstance(self._objective, Distillation):
            is_supervised = labels != IGNORE_INDEX
            section = self._objective.section
            targets = self._targets(part, is_supervised, section)
            return distill_loss(section, logits[is_supervised], labels[is_supervised], *targets) * weights[0]
        return (
            functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
            * weights[0].float()
        )

    def _logits(self, part: PlainForward) -> torch.Tensor:
        """Logits of all tokens, fp32 [rows, tokens, vocabulary]; for a classifier, its scores, fp32 [rows, outputs]."""
        inputs = {name: tensor.to(self._device) for name, tensor in part.inputs.items()}
        if isinstance(self._objective, ScoreObjective):
            # transformers classifies by the last token that is not the padding token (5.23, modeling_layers.py:170).
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
        """Teacher's log-probabilities at supervised positions, and the token ids if only the top k are stored."""
        if part.top is not None:
            ids, log_probs = part.top.ids.to(self._device), part.top.log_probs.to(self._device)
            return log_probs[is_supervised].float(), ids[is_supervised].long()
        assert self._teacher is not None
        inputs = {name: tensor.to(self._device) for name, tensor in part.inputs.items()}
        with self._autocast():
            logits = self._teacher(**inputs, use_cache=False).logits.float()[is_supervised]
        return torch.log_softmax(logits / section.temperature, dim=-1), None
