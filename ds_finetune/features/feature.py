"""The interface of a feature: a part of a model, or of its training, that the run file turns on.

Methods are called in the order in which they are defined here. A feature overrides the ones that it needs.
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
    """Objects of a rank that the engine passes to features."""

    groups: HeadGroups
    device: torch.device
    start_teacher: Callable[[], AbstractContextManager[Teacher | None]]
    """Starts the teacher of a distillation, where this rank runs it."""


class Feature:
    """Base class of features, parts of a model or its training. Each engine has its own instance."""

    name: ClassVar[str]
    """Key of the feature in `ModelPlan.features`; for features of other packages also in the run file's `features`."""
    saves_frozen: bool = True
    """Whether checkpoints hold frozen parameters. False if the model's folder has all of them."""

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> object | None:
        """Settings of the feature from the run file and the model's configuration, for `ModelPlan.features`. None if
        the feature is off. ConfigError or ModelError if its settings are wrong.

        The method may change `hf_config`, from which models are built afterwards. The default is `features.NAME` of the
        run file, unchanged.
        """
        return run.features.get(cls.name)

    @classmethod
    def of(cls, model: ModelPlan, plan: Plan) -> Self | None:
        """Make the feature's instance for an engine, or None if the feature is off."""
        settings = model.features.get(cls.name)
        return None if settings is None else cls(settings, model, plan)

    def __init__(self, settings: Any, model: ModelPlan, plan: Plan) -> None:  # noqa: ANN401 - what `planned` gave
        self.settings, self.model, self.plan = settings, model, plan

    @property
    def own_loss(self) -> str:
        """Name of the auxiliary loss that alone trains the parameters that the feature `owns`; empty without such a
        loss. These parameters are clipped by a gradient norm of their own.
        """
        return ""

    def complete(self, plan: Plan) -> Plan:
        """Add the feature's consequences to the run's plan: parameters that it freezes, and notes."""
        return plan

    def lines(self) -> list[tuple[str, str]]:
        """Lines of the plan about the feature, as (name, text)."""
        return []

    def open(self, parts: RankParts) -> AbstractContextManager[object]:
        """Context in which the engine runs. It is entered before the model is built."""
        return nullcontext()

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Change this rank's shard of the model in place, after its weights are loaded. `placement` shards new
        parameters, which are trained if they require a gradient.
        """

    def owns(self, name: str) -> bool:
        """Whether only the loss `own_loss` trains the parameter `name`."""
        return False

    def wrap(self, trained: TrainedModel) -> TrainedModel:
        """Replace the module whose forward is the loss, before DeepSpeed wraps it."""
        return trained

    def extra_loss(self, trained: TrainedModel, parts: RankParts) -> ExtraLoss | None:
        """The feature's auxiliary loss, or None. It may register hooks in `trained`, which run after DeepSpeed's."""
        return None
