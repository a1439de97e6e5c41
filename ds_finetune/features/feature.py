"""What a feature is: a part of a model, or of its training, that the run file turns on.

The methods are called in the order in which they stand here. A feature overrides those that it needs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from transformers import PreTrainedModel

from ds_finetune.model.adapters.lora import AdapterPlacement
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.teacher import Teacher
from ds_finetune.model.loss.token_loss import HeadGroups, TrainedModel
from ds_finetune.plan.plan import Plan


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
    """Key of its settings in `features` of the run file, where another package adds it."""
    own_loss: str = ""
    """Name of the auxiliary loss that is the only one to train the parameters which the feature `owns`; empty for none.
    They are clipped by the norm of their own gradient.
    """
    saves_frozen: bool = True
    """Whether checkpoints hold parameters that are not trained; false where all of them are in the model's folder."""

    @classmethod
    def of(cls, model: ModelPlan, plan: Plan) -> Self | None:
        """The feature as the run file has it; None where it is off. ConfigError where its settings are wrong."""
        raise NotImplementedError(cls)

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
