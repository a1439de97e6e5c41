"""Distillation as a feature: the teacher beside the model, and the loss towards its distributions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.loss.distillation import DistilledModel
from ds_finetune.model.loss.teacher import Teacher
from ds_finetune.model.loss.teacher_plan import TeacherPlan
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.objectives.distill import Distillation
from ds_finetune.plan.distillation import is_teacher_partitioned
from ds_finetune.plan.plan import Plan


class TeacherFeature(Feature):
    """Trains towards a live teacher, or towards stored distributions of one."""

    name = "teacher"
    _teacher: Teacher | None = None

    def __init__(self, objective: Distillation, teacher: TeacherPlan | None, plan: Plan) -> None:
        self._objective, self._of, self._plan = objective, teacher, plan

    @classmethod
    def of(cls, model: ModelPlan, plan: Plan) -> Self | None:
        """With the objective `distill`."""
        return cls(model.objective, model.teacher, plan) if isinstance(model.objective, Distillation) else None

    def lines(self) -> list[tuple[str, str]]:
        """Which model the live teacher is, and where its weights are held."""
        if self._of is None:
            return []
        plan, offload = self._plan, self._of.offload
        where = "host memory" if offload == "cpu" or plan.device == "cpu" else "GPU memory"
        held = f"whole in {where} of each rank"
        if is_teacher_partitioned(plan.zero_stage, offload):
            held = f"partitioned by ZeRO-3 over {plan.world.world_size} ranks, in {where}"
        params = self._of.count_params() / 1e6
        return [("teacher", f"{self._of.path}, {params:,.3f} M parameters in {plan.precision}, {held}")]

    @contextmanager
    def open(self, parts: RankParts) -> Iterator[None]:
        """Start the live teacher, and end it with the engine."""
        with parts.start_teacher() as self._teacher:
            yield

    def wrap(self, trained: TrainedModel) -> TrainedModel:
        """The loss of distillation in place of the cross entropy."""
        return DistilledModel(trained, self._objective, self._teacher)
