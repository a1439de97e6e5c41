"""Reads activations and FLOPs off the program's own modules: the model of a run is built on fake tensors as a rank has it,
most of its layers are left out, and one forward and backward are computed.

Of layers that are alike two remain, so that those of any depth are known. Layers are alike where their modules, the
numbers in these and their tensors are. No family and no feature is known here.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.engine import rank_model
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.rank_model import (
    arrange_forward,
    build_modules,
    install_groups,
    install_head,
    mark_parameters,
    placement_of,
)
from ds_finetune.families.family import layer_of
from ds_finetune.families.table import family_of
from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.features.table import features_of
from ds_finetune.foreign.guard import replaced
from ds_finetune.foreign.torch_nn import fake_tensors
from ds_finetune.model import activation_memory
from ds_finetune.model.attention import by_document, compressed_layout
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.fused import install
from ds_finetune.model.loss import cross_entropy, head_chunks
from ds_finetune.model.loss.extra_loss import TotalLoss
from ds_finetune.model.loss.forward_rows import ForwardRows, RealTokens
from ds_finetune.model.loss.teacher import HiddenStates, Teacher
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.expert import ExpertParallelExperts, ExpertParallelGroup
from ds_finetune.model.parallel.pipeline import missing_layer
from ds_finetune.model.parallel.rank_group import RankGroup
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.model.quantised.four_bit import is_four_bit
from ds_finetune.model.weights.fp32_weights import Fp32Weights
from ds_finetune.objectives.objective import AnswerNumbers, Distillation, Examples, Objective, StepNumbers, TopLogProbs
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel
from ds_finetune.plan.forward import mlp_tiles, varlen_problem
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.trace_recorder import Recorder

_ALIKE = 2
"""Layers of a kind that are computed: the first one of a model may differ from the others."""


def trace(plan: Plan, model: ModelPlan) -> TracedModel:
    """The activations of `model` on a rank of `plan` for the rows of one forward, which are full, of one document each,
    or of two where these belong together, and supervised; experts are chosen equally often.
    """
    with ShortModel(plan, model) as short:
        recorder = Recorder(short.rows.documents or ())
        watch = _Watch(recorder, short.lm.base_model, [short.lm.get_submodule(name) for name in short.layers])
        with recorder, watch:
            loss = short.trained(short.rows, short.numbers).loss
            watch.begin_backward()
            loss.backward()
        return watch.result(short.kinds)


class ShortModel:
    """The model of a run on fake tensors, as it is within the context, with two layers of each kind, and its rows."""

    def __init__(self, plan: Plan, model: ModelPlan, *, is_whole: bool = False) -> None:
        self._plan, self._stack, self._is_whole = plan, ExitStack(), is_whole
        # Stages are layers of the same model, and its weights are not partitioned.
        one = Mesh(plan.mesh.dp * plan.mesh.pp, plan.mesh.tp, 1, plan.mesh.sp, ep=plan.mesh.ep)
        tiles = mlp_tiles(model.hf_config.to_dict()) if plan.tiled_mlp else 1
        self._arranged = replace(plan, mesh=one, zero_stage=0)
        self._model = replace(model, stages=(None,), mlp_tiles=tiles)

    def __enter__(self) -> "ShortModel":
        self._stack.enter_context(fake_tensors())
        self._stack.enter_context(_stand_ins(self._plan.device))
        self._build(self._stack)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _build(self, stack: ExitStack) -> None:
        plan, model, mesh = self._arranged, self._model, self._arranged.mesh
        features = features_of(model, plan)
        groups = Groups(
            stage=None,
            sequence=_group(SequenceParallelGroup, mesh.sp),
            tensor=_group(TensorParallelGroup, mesh.tp),
            experts=_group(ExpertParallelGroup, mesh.ep),
            mpu=None,
        )
        parts = RankParts(HeadGroups(groups.tensor, groups.sequence), torch.device("cpu"), self._teacher)
        for feature in features:
            stack.enter_context(feature.open(parts))
        self.lm = lm = build_modules(replace(plan, device="cpu"), model, groups)
        install_groups(lm, model, groups)
        placement = placement_of(lm, plan, groups)
        for param in filter(is_four_bit, list(lm.parameters())):
            with placement.where(param).opened():
                """Quantised when it is closed."""
        in_fp32 = Fp32Weights(lm, placement.where)
        in_fp32.install(lm)
        for feature in features:
            feature.install(lm, placement)
        mark_parameters(lm, plan, model, groups, features)
        self.layers, self.kinds = self._shorten()
        install_head(lm, plan, model, groups)
        arrange_forward(lm, plan, model)
        if self._plan.mesh.pp > 1:
            lm.enable_input_require_grads()
        self.trained = self._trained(groups, features, parts)
        self.trained.in_fp32 = in_fp32
        self.rows = _rows(plan, model.objective, has_types=hasattr(lm.config, "type_vocab_size"))
        terms = len(TotalLoss(model.objective, self.trained.extras).terms)
        number = torch.zeros((), dtype=torch.float64)
        self.numbers = StepNumbers(number.expand(terms).clone(), number)
        for param in self.trained.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None

    def _trained(self, groups: Groups, features: Sequence[Feature], parts: RankParts) -> TrainedModel:
        trained = TrainedModel(self.lm, groups.sequence)
        for feature in features:
            trained = feature.wrap(trained)
        trained.packs_documents = self._packs(self._model.hf_config)
        losses = (feature.extra_loss(trained, parts) for feature in features)
        trained.extras = tuple(loss for loss in losses if loss is not None)
        return trained.train()

    def _packs(self, hf_config: Any) -> bool:  # noqa: ANN401 - a PretrainedConfig
        """Whether attention to all documents of a forward is one call."""
        attention = self._plan.attention
        is_own = self._plan.device == "cuda" and attention in OWN_ATTENTIONS and attention != "by_document"
        return is_own and not varlen_problem(hf_config.to_dict(), precision=self._plan.precision)

    @contextmanager
    def _teacher(self) -> Iterator[Teacher | None]:
        """The teacher of the run, with two layers of each kind."""
        plan = self._model.teacher
        assert plan is not None
        dtype = PRECISION_DTYPES[self._plan.precision]
        lm = build_skeleton(plan.hf_config, attention=self._model.attention, dtype=dtype, device="cpu")
        _shorten(lm, self._is_whole)
        states = HiddenStates(lm.requires_grad_(requires_grad=False).eval(), _group(SequenceParallelGroup, self._plan.mesh.sp))
        states.packs_documents = self._packs(plan.hf_config)
        yield states.whole()

    def _shorten(self) -> tuple[list[str], list[int]]:
        return _shorten(self.lm, self._is_whole, is_reached=self._plan.mesh.pp > 1)


def _shorten(lm: PreTrainedModel, is_whole: bool, *, is_reached: bool = False) -> tuple[list[str], list[int]]:
    """Leave out layers of `lm` that are like others, in place. Returns the names of those that remain, and for each
    layer of the model the number of the one that stands for it, of those that remain.
    """
    ahead = mtp_layers(lm.config)
    names = [
        name
        for name, module in lm.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and layer_of(f"{name}.") not in ahead
    ]
    names = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    is_reached |= lm.get_input_embeddings().weight.requires_grad
    remain, alike, stands = list[str](), dict[Any, list[int]](), list[int]()
    for number, name in enumerate(names):
        layer = lm.get_submodule(name)
        chosen = alike.setdefault((_kind_of(layer, name), is_reached), [])
        if len(chosen) < _ALIKE or is_whole:
            chosen.append(len(remain))
            remain.append(name)
        else:
            lm.set_submodule(name, missing_layer(lm.config, number))
        stands.append(chosen[-1])
        is_reached |= any(param.requires_grad for param in layer.parameters())
    return remain, stands


def _kind_of(layer: nn.Module, name: str) -> tuple[object, ...]:
    """What is the same of layers that are alike: modules with their settings, and tensors."""
    found = list[object]()
    for inner, module in layer.named_modules():
        settings = {
            key: value.replace(name, "") if isinstance(value, str) else value
            for key, value in vars(module).items()
            if isinstance(value, str | int | float | None) and "layer_idx" not in key
        }
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(leaf, tuple(each.shape), each.dtype, each.requires_grad) for leaf, each in tensors]
        found.append((inner, type(module).__name__, tuple(sorted(settings.items(), key=str)), tuple(shapes)))
    return tuple(found)


def _group(kind: Any, size: int) -> Any:  # noqa: ANN401 - a RankGroup
    """A group of so many ranks whose communication does nothing; None for one rank."""
    if size == 1:
        return None
    group = dist.ProcessGroup(0, size)
    backend = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), backend, FakeProcessGroup._create_internal(0, size))
    group._set_default_backend(backend)
    return kind(group, size, 0)


def _rows(plan: Plan, objective: Objective, *, has_types: bool) -> ForwardRows:
    """The rows of a forward with everything that a loss may ask for."""
    number, length = plan.batch.micro_batch_size, plan.batch.max_seq_len
    documents = ((length - length // 2, length // 2) if objective.documents_per_unit == 2 else (length,),) * number
    ids = torch.zeros(number, -(-length // plan.mesh.sp), dtype=torch.int64)
    places = torch.zeros(ids.numel(), dtype=torch.int64)
    of_documents = torch.zeros(sum(map(len, documents)), dtype=torch.int64)
    wide, examples = of_documents.double(), None
    if objective.documents_per_unit:
        top = None
        if isinstance(objective, Distillation) and objective.num_scores:
            scores = torch.zeros(*ids.shape, objective.num_scores + 1, dtype=torch.float16)
            top = TopLogProbs(scores[..., 1:].int(), scores)
        known = ids.float()
        answers = AnswerNumbers(known, known.clone(), known.clone()) if objective.head == "answers" else None
        examples = Examples(ids, of_documents, of_documents, of_documents, wide, wide, top, answers)
    return ForwardRows(
        ids,
        ids,
        ids,
        documents,
        examples=examples,
        token_types=ids if has_types else None,
        next_ids=ids,
        next_labels=ids,
        real=RealTokens(places, of_documents),
        supervised=places,
        next_supervised=places,
    )


class _Mark(NamedTuple):
    """What the recorder says where a part of the step begins."""

    part: str
    """`start`, `embedding`, `forward` or `backward` of a layer, `head`, `loss` or `inputs`."""
    layer: int
    peak: int
    """Bytes at most in the part before."""
    held: int
    on_host: int
    flops: float
    attention_flops: float


class _Watch:
    """Reads the recorder where parts of a step begin: while the context is open modules tell it."""

    def __init__(self, recorder: Recorder, base: nn.Module, layers: Sequence[nn.Module]) -> None:
        self._recorder, self._base = recorder, base
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        self._hooks = ExitStack()
        self._marks = list[_Mark]()
        self._has_left_layers = False

    def __enter__(self) -> None:
        self._hooks.callback(register_module_forward_pre_hook(self._before).remove)
        self._hooks.callback(register_module_forward_hook(self._after, always_call=True).remove)
        self._mark("start")

    def __exit__(self, *error: object) -> None:
        self._mark("end")
        self._hooks.close()

    def begin_backward(self) -> None:
        """Say that the loss is there."""
        self._mark("loss")
        self._recorder.is_backward = True

    def _mark(self, part: str, layer: int = -1) -> None:
        own = self._recorder
        self._marks.append(_Mark(part, layer, own.since_mark(), own.held, own.on_host, own.flops, own.attention_flops))

    def _before(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        number = self._numbers.get(module)
        if self._recorder.is_backward:
            self._recorder.is_repeated |= number is not None
        elif number is not None:
            self._mark("forward", number)
            hidden = given[0] if given else None
            if number == 0 and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda _: self._mark("inputs"))
        elif module is self._base:
            self._mark("embedding")
        elif self._has_left_layers:
            self._has_left_layers = False
            self._mark("head")

    def _after(self, module: nn.Module, _: object, out: Any) -> None:  # noqa: ANN401
        number = self._numbers.get(module)
        if number is None:
            return
        if self._recorder.is_backward:
            self._recorder.is_repeated = False
            return
        hidden = out[0] if isinstance(out, tuple) else out
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self._mark("backward", number))
        self._has_left_layers = number == len(self._numbers) - 1

    def result(self, stands: Sequence[int]) -> TracedModel:
        """What has been read, where layer i of the model is like the layer `stands[i]` of those that were computed."""
        parts = {(mark.part, mark.layer): (mark, then) for mark, then in pairwise(self._marks)}
        layers = [self._layer(parts, number) for number in range(len(self._numbers))]
        begin, last = parts["forward", 0][0].held, parts["head", -1][0].held
        total, inside = self._marks[-1], sum(each.flops + each.attention_flops for each in layers)

        def most(part: str, beside: int = 0) -> int:
            return parts[part, -1][1].peak - beside if (part, -1) in parts else 0

        return TracedModel(
            layers=tuple(layers[number] for number in stands),
            before=begin,
            teacher=most("start"),
            embedding=most("embedding"),
            head=most("head", last),
            head_backward=most("loss", last),
            embedding_backward=most("inputs"),
            head_flops=total.flops + total.attention_flops - inside - parts["embedding", -1][0].flops,
        )

    def _layer(self, parts: Mapping[tuple[str, int], tuple[_Mark, _Mark]], number: int) -> TracedLayer:
        begin, after = parts["forward", number]
        both = [parts["forward", number], *([parts["backward", number]] if ("backward", number) in parts else [])]
        return TracedLayer(
            kept=after.held - begin.held,
            forward=after.peak - begin.held,
            backward=both[1][1].peak - begin.held if len(both) > 1 else 0,
            on_host=after.on_host - begin.on_host,
            flops=sum(end.flops - start.flops for start, end in both),
            attention_flops=sum(end.attention_flops - start.attention_flops for start, end in both),
        )


class OutputsOnly:
    """Fused kernels that compute nothing and have no tensors but their results: Liger's, which write the gradients of
    gate and up over them, or those of torch.compile.
    """

    def __init__(self, name: str) -> None:
        self.overwrites = name == "liger"

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """The normalised rows and their scales."""
        return torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)

    def norm_backward(self, grad: torch.Tensor, saved: tuple[torch.Tensor, ...], _: bool, needs_weight: bool) -> Any:  # noqa: ANN401, FBT001
        """The gradients of rows and weight."""
        return torch.empty_like(grad), torch.empty_like(saved[1]) if needs_weight else None

    def rotate(self, tensors: tuple[torch.Tensor, ...], *_: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Queries and keys with positions."""
        return tuple(torch.empty_like(each) for each in tensors)

    def gate(self, *parts: torch.Tensor) -> torch.Tensor:
        """The input of the down projection."""
        return parts[0].new_empty(len(parts[0]), parts[0].shape[1] * len(parts) // 2)

    def gate_backward(self, _: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of gate and up."""
        return parts if self.overwrites else tuple(torch.empty_like(each) for each in parts)


@contextmanager
def _stand_ins(device: str) -> Iterator[None]:
    """What a rank on `device` does where fake tensors on a CPU do something else, or have no numbers to decide by."""
    layouts = (compressed_layout.tokens_of, compressed_layout.entries_of, compressed_layout.parts_of)
    cached = (*layouts, by_document._document_batches)
    with ExitStack() as stack:
        for each in cached:
            each.cache_clear()
            stack.callback(each.cache_clear)
        changes: list[tuple[Any, str, Any]] = [
            (install, "kernels_of", OutputsOnly),
            (ExpertParallelExperts, "_count_rows", _equal_counts),
            (cross_entropy, "_run_liger_kernel", lambda *_, **__: None),
            (rank_model, "tag_expert", lambda *_, **__: None),
        ]
        if device != "cpu":
            changes += [(head_chunks, "_BLOCK_NUMBERS", 2**62), (head_chunks, "_add_product", lambda *_: None)]
        for owner, name, change in changes:
            stack.enter_context(replaced(owner, name, change))
        yield


def _equal_counts(module: ExpertParallelExperts, experts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
    """Rows of each expert and rank, as many of all: `ExpertParallelExperts._count_rows`."""
    size, rows = module.ep_group.size, len(experts)
    counts = [rows // size + (rank < rows % size) for rank in range(size)]
    return experts.new_zeros(module.num_experts * size, dtype=torch.int32), counts, counts
