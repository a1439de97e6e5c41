"""The interface of a feature: a part of a model, or of its training, that the run file turns on.

The engine calls a feature's methods in the order of their definition. A feature overrides those that it needs.
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
    """What the engine gives to features: this rank's process groups, its device, and how to start a teacher."""

    groups: HeadGroups
    device: torch.device
    start_teacher: Callable[[], AbstractContextManager[Teacher | None]]
    """Function that returns a context with the running teacher of a distillation, or with None on a rank without it."""


class Feature:
    """Base class of features, which are parts of a model or of its training. Each engine has its own instances."""

    name: ClassVar[str]
    """Key in `ModelPlan.features`. A feature of another package has this key in the run file's `features` too."""
    saves_frozen: bool = True
    """Whether checkpoints save frozen parameters. If not, they are read from the model's folder."""

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> object | None:
        """Read the feature's settings from the run file and the model's configuration. None turns the feature off.
        ConfigError or ModelError if the settings are wrong.

        An override may change `hf_config`, from which the model is built later. The default returns `features.NAME` of
        the run file unchanged.
        """
        return run.features.get(cls.name)

    @classmethod
    def of(cls, model: ModelPlan, plan: Plan) -> Self | None:
        """Make the feature for an engine, or None if the feature is off."""
        settings = model.features.get(cls.name)
        return None if settings is None else cls(settings, model, plan)

    def __init__(self, settings: Any, model: ModelPlan, plan: Plan) -> None:  # noqa: ANN401 - what `planned` gave
        self.settings, self.model, self.plan = settings, model, plan

    @property
    def own_loss(self) -> str:
        """Name of the feature's auxiliary loss if only it trains the parameters that the feature `owns`, else empty.
        The gradient of these parameters is clipped by its own norm.
        """
        return ""

    def complete(self, plan: Plan) -> Plan:
        """Add to the run's plan what the feature changes: which parameters it freezes, and notes for the user."""
        return plan

    def lines(self) -> list[tuple[str, str]]:
        """Lines of the printed plan about the feature, each as (name, text). The default calls the method `lines` of
        the feature's settings, if they have one.
        """
        lines = getattr(self.settings, "lines", None)
        return lines() if callable(lines) else []

    def open(self, parts: RankParts) -> AbstractContextManager[object]:
        """Context that the engine enters before it builds the model and leaves when the engine ends."""
        return nullcontext()

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Change this rank's shard of the model in place, after its weights are loaded, for example by adding adapters.
        `placement` shards new parameters; new parameters that require a gradient are trained.
        """

    def owns(self, name: str) -> bool:
        """Whether only the feature's own loss (`own_loss`) trains the parameter `name`."""
        return False

    def wrap(self, trained: TrainedModel) -> TrainedModel:
        """Replace the module whose forward computes the training loss. DeepSpeed wraps the result."""
        return trained

    def extra_loss(self, trained: TrainedModel, parts: RankParts) -> ExtraLoss | None:
        """Make the feature's auxiliary loss, or None. Hooks that it adds to `trained` run after DeepSpeed's."""
        return None
