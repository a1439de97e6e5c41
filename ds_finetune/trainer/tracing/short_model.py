"""The model of a rank on fake tensors, without most of its layers.

Two layers of each kind remain, from which models of any depth are extrapolated. Layers are of one kind if their
modules, settings and tensors are equal; the code here knows no family and no feature.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_finetune.config.sections import OWN_ATTENTIONS
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
from ds_finetune.features.feature import RankParts
from ds_finetune.features.table import features_of
from ds_finetune.foreign.torch_nn import fake_tensors
from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.loss.extra_loss import TotalLoss
from ds_finetune.model.loss.forward_rows import ForwardRows, RealTokens
from ds_finetune.model.loss.teacher import HiddenStates, Teacher
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel
from ds_finetune.model.mtp import mtp_layers
from ds_finetune.model.parallel.expert import ExpertParallelGroup
from ds_finetune.model.parallel.pipeline import missing_layer
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.model.weights.fp32_weights import Fp32Weights
from ds_finetune.objectives.objective import AnswerNumbers, Distillation, Examples, Objective, StepNumbers, TopLogProbs
from ds_finetune.plan.forward import mlp_tiles, varlen_problem
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.tracing.kernels import Recorder, silent_group, stand_ins

_ALIKE = 2
"""Number of layers of each kind that are computed, besides the last layer of the model. One is not enough, because the
first layer of a kind may allocate other memory than later ones.
"""

_STORED = 64
"""Assumed number of stored log-probabilities per token in distillation; it is small compared with a vocabulary."""


class ShortModel:
    """Context with a run's model on fake tensors, reduced to two layers of each kind, and with rows for a forward."""

    def __init__(self, plan: Plan, model: ModelPlan, *, is_full: bool = False) -> None:
        self._plan, self._is_full = plan, is_full
        # The short model has layers of all stages, so pipeline ranks become data parallel ranks here. At ZeRO stage 0
        # its weights are not partitioned.
        mesh = Mesh(0, plan.mesh.dp * plan.mesh.pp, sp=plan.mesh.sp, tp=plan.mesh.tp, ep=plan.mesh.ep)
        tiles = mlp_tiles(model.hf_config.to_dict()) if plan.train.tiled_mlp else 1
        unpartitioned = plan.deepspeed_config | {"zero_optimization": plan.zero | {"stage": 0}}
        self._arranged = replace(plan, mesh=mesh, deepspeed_config=unpartitioned)
        own = dict(model.features)
        if model.lora is not None:
            # Fake tensors cannot take the values of the adapter from which training starts.
            section = model.lora.section.model_copy(update={"start": None})
            own["adapters"] = replace(model.lora, section=section)
        self._model = replace(model, stages=(None,), mlp_tiles=tiles, features=own)
        self.recorder = Recorder()
        self.teacher: HiddenStates | None = None

    def __enter__(self) -> "ShortModel":
        # If the model cannot be built, the stack closes: else all tensors of this process would be fake from here on.
        with ExitStack() as stack:
            self._build(stack)
            self._stack = stack.pop_all()
        return self

    def _build(self, stack: ExitStack) -> None:
        stack.enter_context(fake_tensors())
        stack.enter_context(stand_ins(self._plan.device, self.recorder))
        plan, model, mesh = self._arranged, self._model, self._arranged.mesh
        features = features_of(model, plan)
        groups = Groups(
            stage=None,
            sequence=silent_group(SequenceParallelGroup, mesh.sp),
            tensor=silent_group(TensorParallelGroup, mesh.tp),
            experts=silent_group(ExpertParallelGroup, mesh.ep),
            mpu=None,
        )
        parts = RankParts(HeadGroups(groups.tensor, groups.sequence), torch.device("cpu"), self._teacher)
        for feature in features:
            stack.enter_context(feature.open(parts))
        self.lm = lm = build_modules(replace(plan, device="cpu"), model, groups)
        install_groups(lm, model, groups)
        placement = placement_of(lm, plan, groups)
        in_fp32 = Fp32Weights(lm, placement.where)
        in_fp32.install(lm)
        for feature in features:
            feature.install(lm, placement)
        mark_parameters(lm, plan, model, groups, features)
        self.layers, self.kinds = _shorten(lm, self._is_full, is_reached=self._plan.mesh.pp > 1)
        install_head(lm, plan, model, groups)
        arrange_forward(lm, plan, model)
        if self._plan.mesh.pp > 1:
            lm.enable_input_require_grads()
        trained = TrainedModel(lm, groups.sequence)
        for feature in features:
            trained = feature.wrap(trained)
        trained.packs_documents, trained.in_fp32 = self._packs(model.hf_config), in_fp32
        trained.extras = tuple(filter(None, (feature.extra_loss(trained, parts) for feature in features)))
        self.trained = trained.train()
        self.rows = _rows(plan, model.objective, has_types=hasattr(lm.config, "type_vocab_size"))
        terms = len(TotalLoss(model.objective, self.trained.extras).terms)
        number = torch.zeros((), dtype=torch.float64)
        self.numbers = StepNumbers(number.expand(terms).clone(), number)
        for param in self.trained.parameters():
            param.grad = torch.zeros_like(param) if param.requires_grad else None

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _packs(self, hf_config: Any) -> bool:  # noqa: ANN401 - a PretrainedConfig
        attention = self._plan.model.attention
        is_own = self._plan.device == "cuda" and attention in OWN_ATTENTIONS and attention != "by_document"
        return is_own and not varlen_problem(hf_config.to_dict(), precision=self._plan.precision)

    @contextmanager
    def _teacher(self) -> Iterator[Teacher | None]:
        plan = self._model.teacher
        assert plan is not None
        dtype = PRECISION_DTYPES[self._plan.precision]
        lm = build_skeleton(plan.hf_config, attention=self._model.attention, dtype=dtype, device="cpu")
        _shorten(lm, self._is_full)
        states = HiddenStates(
            lm.requires_grad_(requires_grad=False).eval(), silent_group(SequenceParallelGroup, self._plan.mesh.sp)
        )
        states.packs_documents = self._packs(plan.hf_config)
        self.teacher = states
        yield states.unsharded_teacher()


def _shorten(lm: PreTrainedModel, is_full: bool, *, is_reached: bool = False) -> tuple[list[str], list[int]]:
    """Remove layers of `lm` that equal others, in place. Returns the names of the remaining layers, and for each
    original layer the index of the remaining layer that represents it.
    """
    ahead = mtp_layers(lm.config)
    names = [
        name
        for name, module in lm.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and layer_of(f"{name}.") not in ahead
    ]
    names = [name for name in names if not any(name.startswith(f"{outer}.") for outer in names)]
    is_reached |= lm.get_input_embeddings().weight.requires_grad
    remaining, layers_of_kind, representatives = list[str](), dict[Any, list[int]](), list[int]()
    for number, name in enumerate(names):
        layer = lm.get_submodule(name)
        computed = layers_of_kind.setdefault((_kind_of(layer, name), is_reached), [])
        if len(computed) < _ALIKE or is_full or number == len(names) - 1:
            computed.append(len(remaining))
            remaining.append(name)
        else:
            missing = missing_layer(lm.config, number)
            # The placeholder gets the text attributes of the removed layer, because some models read the kind of
            # attention from them.
            vars(missing).update({key: value for key, value in vars(layer).items() if isinstance(value, str)})
            lm.set_submodule(name, missing)
        representatives.append(computed[-1])
        is_reached |= any(param.requires_grad for param in layer.parameters())
    return remaining, representatives


def _kind_of(layer: nn.Module, name: str) -> tuple[object, ...]:
    """Modules, settings, and shapes of tensors of a layer. They are equal for layers of one kind."""
    parts = list[object]()
    for inner, module in layer.named_modules():
        settings = {
            key: value.replace(name, "") if isinstance(value, str) else value
            for key, value in vars(module).items()
            if isinstance(value, str | int | float | None) and "layer_idx" not in key
        }
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = [(leaf, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for leaf, tensor in tensors]
        parts.append((inner, type(module).__name__, tuple(sorted(settings.items(), key=str)), tuple(shapes)))
    return tuple(parts)


def _rows(plan: Plan, objective: Objective, *, has_types: bool) -> ForwardRows:
    """Rows of a forward pass with every input that a loss may read."""
    number, length = plan.micro_batch_size, plan.train.max_seq_len
    documents = ((length - length // 2, length // 2) if objective.documents_per_unit == 2 else (length,),) * number
    ids = torch.zeros(number, -(-length // plan.mesh.sp), dtype=torch.int64)
    zeros = torch.zeros(ids.numel(), dtype=torch.int64)
    of_documents = torch.zeros(sum(map(len, documents)), dtype=torch.int64)
    wide, examples = of_documents.double(), None
    if objective.documents_per_unit:
        top = None
        if isinstance(objective, Distillation):
            scores = torch.zeros(*ids.shape, _STORED + 1, dtype=torch.float16)
            top = TopLogProbs(scores[..., 1:].int(), scores)
        numbers = ids.float()
        answers = AnswerNumbers(numbers, numbers.clone(), numbers.clone()) if objective.head == "answers" else None
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
        real=RealTokens(zeros, of_documents),
        supervised=zeros,
        next_supervised=zeros,
    )
