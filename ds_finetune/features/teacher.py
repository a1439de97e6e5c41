"""The feature that distils a teacher: its loss is the divergence from a running teacher or stored log-probabilities."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from transformers import PretrainedConfig

from ds_finetune.config.objectives import is_distillation
from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, read_hf_config
from ds_finetune.model.loss.forward_rows import ForwardRows, find_supervised
from ds_finetune.model.loss.head_chunks import HeadInputs, loss_with_gradients
from ds_finetune.model.loss.soft_targets import Mix, SoftTargets, TopTargets, chunked_mixed_loss
from ds_finetune.model.loss.teacher import Teacher, TeacherPlan
from ds_finetune.model.loss.token_loss import LossHead, TrainedModel
from ds_finetune.model.parallel.tensor import copy_to_tensor_parallel_region
from ds_finetune.objectives.objective import Distillation, Examples, LossAndSums, StepNumbers
from ds_finetune.plan.model_checks import check_model
from ds_finetune.plan.plan import Plan, is_teacher_partitioned
from ds_finetune.plan.settings import ModelSettings, RunSettings


class DistillationHead(LossHead):
    """Language model head that mixes the divergence from a teacher's probabilities with the cross entropy of labels."""

    mix: Mix

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        numbers: StepNumbers | None = None,
        open_targets: Callable[[], AbstractContextManager[SoftTargets | None]] | None = None,
        *,
        supervised: torch.Tensor | None = None,
    ) -> Any:  # noqa: ANN401 - logits or LossAndSums
        """Map `hidden` [..., width] to logits [..., vocabulary]. With shifted `labels` [...] (int64) and
        `open_targets`, return the loss as LossAndSums instead. `open_targets` makes a context with the teacher's
        probabilities at the labels. `supervised` has the indices of supervised labels; with None they are searched.
        """
        if labels is None or open_targets is None:
            return super().forward(hidden)
        supervised = find_supervised(labels) if supervised is None else supervised
        part = hidden.flatten(0, -2).index_select(0, supervised)
        part = part if self.groups.tp is None else copy_to_tensor_parallel_region(part, self.groups.tp)
        inputs = HeadInputs(part, self.weight, self.bias, labels.flatten().index_select(0, supervised), self.cap)
        with open_targets() as targets:
            compute = partial(chunked_mixed_loss, inputs, targets, mix=self.mix, tp_group=self.groups.tp)
            loss_sum, sums = loss_with_gradients(inputs, compute)
        sums = torch.cat([sums, sums.new_full((1,), len(inputs.targets) if targets is not None else 0)])
        return LossAndSums(loss_sum if numbers is None else loss_sum * numbers.weights[0].to(loss_sum.dtype), sums)


class DistilledModel(TrainedModel):
    """A causal LM whose forward returns the distillation loss, from a running teacher or stored log-probabilities."""

    def __init__(self, trained: TrainedModel, objective: Distillation, teacher: Teacher | None) -> None:
        super().__init__(trained.lm, trained.sp_group, trained.pp_group)
        self.teacher = teacher
        self.temperature = objective.section.temperature
        if self.has_head:
            head: Any = trained.lm.get_output_embeddings()
            head.__class__ = DistillationHead
            head.mix = Mix(objective.section.temperature, objective.section.label_weight)

    def head_inputs(self, rows: ForwardRows) -> dict[str, Any]:
        """Run the teacher. Returns the arguments `open_targets` and `supervised` of `DistillationHead.forward`."""
        return {"open_targets": self._targets(rows), "supervised": rows.supervised} if self.has_head else {}

    def _targets(self, rows: ForwardRows) -> Callable[[], AbstractContextManager[SoftTargets | None]]:
        supervised = find_supervised(rows.labels) if rows.supervised is None else rows.supervised
        teacher = self.teacher
        if teacher is None:
            stored = None if rows.examples is None else self._stored(rows.examples, supervised)
            return partial(nullcontext, stored)
        hidden = teacher.hidden(rows.input_ids, rows.position_ids, rows.documents, supervised)
        return partial(teacher.targets, hidden, self.temperature)

    def _stored(self, examples: Examples, supervised: torch.Tensor) -> TopTargets | None:
        if examples.top is None:
            return None
        ids, log_probs = (
            (part if self.sp_group is None else self.sp_group.shard(part)).flatten(0, 1).to(supervised.device)
            for part in (examples.top.ids, examples.top.log_probs)
        )
        return TopTargets(ids.index_select(0, supervised), log_probs.index_select(0, supervised))


class TeacherFeature(Feature):
    """Trains a model towards a teacher's distributions, computed during the run or stored."""

    name = "teacher"
    settings: TeacherPlan | None
    _teacher: Teacher | None = None

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> TeacherPlan | None:
        """Plan the teacher that runs beside the model. None without distillation, or with stored probabilities."""
        objective = run.objective
        if not is_distillation(objective) or objective.teacher is None:
            return None
        teacher = read_hf_config(objective.teacher, files=TOKENIZER_PATTERNS)
        check_model(ModelSettings(run, teacher.to_dict()), "attention of the model")
        return TeacherPlan(objective.teacher, teacher, objective.teacher_offload)

    @classmethod
    def of(cls, model: ModelPlan, plan: Plan) -> Self | None:
        """Make the feature if the run file's objective is `distill`, else None."""
        return cls(model.teacher, model, plan) if isinstance(model.objective, Distillation) else None

    def lines(self) -> list[tuple[str, str]]:
        """Line of the printed plan about a running teacher: its model, and where its weights are held."""
        if self.settings is None:
            return []
        plan, offload = self.plan, self.settings.offload
        where = "host memory" if offload == "cpu" or plan.device == "cpu" else "GPU memory"
        storage = f"whole in {where} of each rank"
        if is_teacher_partitioned(plan.zero_stage, offload):
            storage = f"partitioned by ZeRO-3 over {plan.world.world_size} ranks, in {where}"
        params = read_tensors(self.settings.hf_config).numel / 1e6
        theirs, ours = int(self.settings.hf_config.vocab_size), int(self.model.hf_config.vocab_size)
        common = f"; compared are {min(theirs, ours):,} of its {theirs:,} ids" if theirs != ours else ""
        return [("teacher", f"{self.settings.path}, {params:,.3f} M parameters in {plan.precision}, {storage}{common}")]

    @contextmanager
    def open(self, parts: RankParts) -> Iterator[None]:
        """Run the teacher, if this run needs one, while the context is open."""
        with parts.start_teacher() as self._teacher:
            yield

    def wrap(self, trained: TrainedModel) -> TrainedModel:
        """Replace the model's cross entropy by the distillation loss."""
        assert isinstance(self.model.objective, Distillation)
        return DistilledModel(trained, self.model.objective, self._teacher)
