"""What a feature is: a part of a model, or of its training, that the run file turns on.

The methods are called in the order in which they stand here. A feature overrides those that it needs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.model.adapters.lora import AdapterPlacement
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.teacher import Teacher
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.settings import RunSettings


@dataclass(frozen=True)
class RankParts:
    """What the engine gives to the features of a rank."""

    groups: HeadGroups
    device: torch.device
    start_teacher: Callable[[], AbstractContextManager[Teacher | None]]
    """Starts the live teacher of a distillation, where this rank runs it."""


class Feature:
    """A part of a model or of its training; an object of it belongs to one engine."""

    name: ClassVar[str]
    """Its key in `ModelPlan.features`, and in `features` of the run file where another package adds it."""
    saves_frozen: bool = True
    """Whether checkpoints hold parameters that are not trained; false where all of them are in the model's folder."""

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> object | None:
        """What follows from the run file and the model's configuration, for `ModelPlan.features`; None where the
        feature is off. ConfigError or ModelError where its settings are wrong.

        It may change `hf_config`, of which models are built from then on. By default it is `features.NAME` of the run
        file, as it stands there.
        """
        return run.features.get(cls.name)

    @classmethod
    def of(cls, model: ModelPlan, plan: Plan) -> Self | None:
        """The feature of an engine; None where it is off."""
        settings = model.features.get(cls.name)
        return None if settings is None else cls(settings, model, plan)

    def __init__(self, settings: Any, model: ModelPlan, plan: Plan) -> None:  # noqa: ANN401 - what `planned` gave
        self.settings, self.model, self.plan = settings, model, plan

    @property
    def own_loss(self) -> str:
        """Name of the auxiliary loss that is the only one to train the parameters which the feature `owns`; empty for
        none. They are clipped by the norm of their own gradient.
        """
        return ""

    def complete(self, plan: Plan) -> Plan:
        """The plan of the run with what follows from the feature: parameters that it freezes, and notes."""
        return plan

    def lines(self) -> list[tuple[str, str]]:
        """Name and text of what is decided about it, for people."""
        return []

    def open(self, parts: RankParts) -> AbstractContextManager[object]:
        """What is open while the engine runs; it is entered before the model is built."""
        return nullcontext()

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Change the built part of the model that this rank holds, after its weights are loaded. New parameters are put
        where `placement` says, and are trained unless they do not require a gradient.
        """

    def owns(self, name: str) -> bool:
        """Whether `own_loss` is the only loss that trains the parameter `name`."""
        return False

    def wrap(self, trained: TrainedModel) -> TrainedModel:
        """The module whose forward is the loss, which DeepSpeed gets."""
        return trained

    def extra_loss(self, trained: TrainedModel, parts: RankParts) -> ExtraLoss | None:
        """Its auxiliary loss with its metrics, or None; hooks that it needs in `trained` are registered here, after
        those of DeepSpeed.
        """
        return None
