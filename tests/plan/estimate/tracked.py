"""Forward and backward of this program's own modules on fake tensors, whose memory torch's tracker counts: models of
any size on a CPU, with the kernels of GPUs.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools import mod_tracker
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import PreTrainedModel

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.config.sections import LoraConfig
from ds_finetune.features.teacher import DistilledModel
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.foreign.torch_nn import fake_tensors
from ds_finetune.model.activation_memory import install_tiled_mlps, recompute_layers
from ds_finetune.model.adapters.lora import AdapterPlacement, install_lora
from ds_finetune.model.attention.compressed_layout import entries_of, tokens_of
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.skeleton import build_skeleton, whole
from ds_finetune.model.fused import install
from ds_finetune.model.fused.install import install_fused
from ds_finetune.model.loss import head_chunks
from ds_finetune.model.loss.cross_entropy import chunked_cross_entropy
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.teacher import HiddenStates, Teacher
from ds_finetune.model.loss.token_loss import LossHead, TrainedModel, install_loss_head
from ds_finetune.model.parallel.expert import compute_shared_experts_ahead
from ds_finetune.objectives.objective import (
    AnswerObjective,
    Distillation,
    DocumentObjective,
    Examples,
    Objective,
    make_objective,
)
from ds_finetune.plan.forward import head_chunk, mlp_tiles
from ds_finetune.plan.lora_targets import adapted_targets, targets_among

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Tracked:
    """Bytes at most while one micro-batch is computed, with weights and gradients that are there before."""

    states: int
    """Weights, gradients and buffers."""
    head: int
    """All bytes at most until the loss is computed."""
    peak: int
    """All bytes at most."""

    @property
    def activations(self) -> int:
        """Bytes at most beside weights and gradients."""
        return self.peak - self.states


class OutputsOnly:
    """Fused kernels that compute nothing, and have no tensors but their results: Liger's, which write the gradients of
    gate and up over them, or those of torch.compile.
    """

    def __init__(self, name: str) -> None:
        self.overwrites = name == "liger"

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)

    def norm_backward(self, grad: torch.Tensor, saved: tuple[torch.Tensor, ...], _: bool, needs_weight: bool) -> Any:
        return torch.empty_like(grad), torch.empty_like(saved[1]) if needs_weight else None

    def rotate(self, tensors: tuple[torch.Tensor, ...], *_: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(each) for each in tensors)

    def gate(self, *parts: torch.Tensor) -> torch.Tensor:
        return parts[0].new_empty(len(parts[0]), parts[0].shape[1] * len(parts) // 2)

    def gate_backward(self, _: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return parts if self.overwrites else tuple(torch.empty_like(each) for each in parts)


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Experts by torch's grouped product, no layouts of documents from another mode of fake tensors, blocks of logits as large as the chunk, and products that are added where
    they are computed: what a GPU does, on fake tensors that are said to be on a CPU.
    """
    for layouts in (tokens_of, entries_of):
        layouts.cache_clear()
    with ExitStack() as stack:
        stack.enter_context(patch.object(install, "kernels_of", OutputsOnly))
        stack.enter_context(patch.object(head_chunks, "_BLOCK_NUMBERS", 2**62))
        stack.enter_context(patch.object(head_chunks, "_add_product", lambda *_: None))
        stack.enter_context(patch.object(mod_tracker, "register_multi_grad_hook", _hook_where_it_can))
        # Those hooks name gradients, which the sum of all bytes does not need; frozen weights have none.
        stack.enter_context(patch.object(MemTracker, _FOLLOWED, _follow_without_hooks))
        yield


def track(
    tree: Mapping[str, Any],
    documents: Sequence[Sequence[int]],
    *,
    precision: str = "bf16",
    recomputation: str = "full",
    is_tiled: bool = False,
    supervised: int | None = None,
    lora: LoraConfig | None = None,
    objective: ObjectiveConfig | None = None,
    teacher: Mapping[str, Any] | None = None,
    kernels: str = "torch",
) -> Tracked:
    """One micro-batch of a model with the config.json `tree`; `documents` are the lengths of those of each row. So many
    tokens are `supervised`, or all. With `lora` adapters are trained. A `teacher` runs beside the model of an
    `objective` that distils.
    """
    wanted = LossHead.objective if objective is None else make_objective(objective)
    with fake_tensors(), gpu_kernels():
        lm = _with_head(tree, precision, lora, wanted)
        lm.train()
        install_fused(lm, kernels)
        if recomputation != "none":
            recompute_layers(lm, is_selective=recomputation == "selective")
        if is_tiled:
            install_tiled_mlps(lm, tiles=mlp_tiles(tree))
        else:
            compute_shared_experts_ahead(lm)
        model, other = TrainedModel(lm), None if teacher is None else _teacher(teacher, precision)
        if isinstance(wanted, Distillation):
            model = DistilledModel(model, wanted, other)
        model.packs_documents = precision != "fp32"
        trained = [param for param in model.parameters() if param.requires_grad]
        for param in trained:
            param.grad = torch.zeros_like(param)
        rows = _rows(documents, supervised)
        if isinstance(wanted, DocumentObjective | AnswerObjective):
            rows = replace(rows, examples=_examples(rows))
        tracker, beside = MemTracker(), () if other is None else (other.run,)
        tracker.track_external(model, *beside, *(param.grad for param in trained))
        with tracker:
            loss = model(rows).loss
            head = _total(tracker)
            loss.backward()
        kept = (*model.parameters(), *trained, *(param for each in beside for param in each.parameters()))
        states = sum(param.numel() * param.element_size() for param in kept)
        return Tracked(states, head, _total(tracker))


def _with_head(
    tree: Mapping[str, Any], precision: str, lora: LoraConfig | None, objective: Objective
) -> PreTrainedModel:
    hf_config = AutoConfig.for_model(**tree)
    lm = build_skeleton(hf_config, attention="sdpa", dtype=DTYPES[precision], device="cpu")
    chunk = head_chunk(hf_config.vocab_size, precision=precision, device="cuda")
    if lora is not None:
        every = targets_among(read_tensors(hf_config).shapes())
        install_lora(lm, adapted_targets(every, lora), lora, seed=0, placement=AdapterPlacement(whole))
    install_loss_head(lm, kernel=partial(chunked_cross_entropy, chunk=chunk), objective=objective)
    return lm


_FOLLOWED = "_track_module_params_and_buffers"
_follow: Any = getattr(MemTracker, _FOLLOWED)


def _follow_without_hooks(tracker: MemTracker, module: torch.nn.Module, **_: bool) -> Any:
    return _follow(tracker, module, install_grad_hooks=False)


def _hook_where_it_can(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> Any:
    """torch's hook, by which the tracker names modules; it refuses what runs without gradients, as tiles do."""
    try:
        return register_multi_grad_hook(tensors, *others, **named)
    except AssertionError:
        return None


def _rows(documents: Sequence[Sequence[int]], supervised: int | None) -> ForwardRows:
    shape = len(documents), sum(documents[0])
    ids = torch.zeros(shape, dtype=torch.int64)
    places = torch.zeros(shape[0] * shape[1] if supervised is None else supervised, dtype=torch.int64)
    return ForwardRows(ids, ids, ids, tuple(map(tuple, documents)), supervised=places)


def _teacher(tree: Mapping[str, Any], precision: str) -> Teacher:
    hf_config = AutoConfig.for_model(**tree)
    lm = build_skeleton(hf_config, attention="sdpa", dtype=DTYPES[precision], device="cpu")
    states = HiddenStates(lm.requires_grad_(requires_grad=False).eval())
    states.packs_documents = precision != "fp32"
    head: Any = lm.get_output_embeddings()
    return Teacher(states, head, nullcontext)


def _examples(rows: ForwardRows) -> Examples:
    numbers = torch.zeros(2, dtype=torch.int64)
    return Examples(rows.input_ids, numbers, numbers, numbers, numbers.double(), numbers.double())


def _total(tracker: MemTracker) -> int:
    (device,) = tracker.get_tracker_snapshot("peak").values()
    return int(device["Total"])
