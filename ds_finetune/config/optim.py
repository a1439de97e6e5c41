"""The section `optim` of the run file."""

from typing import Annotated

from pydantic import Field, model_validator

from ds_finetune.config.schedule import SchedulerName
from ds_finetune.config.section import Section
from ds_finetune.config.value_types import WarmupText

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """Optimizer and learning rate."""

    name: str = "AdamW"
    """Optimizer by DeepSpeed's name: AdamW (Adam is the same), Lion, Adagrad, Lamb, SGD, Muon (with AdamW for
    embedding, head and vectors).
    """
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate, reached after `warmup`."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """Decay rates of the moments of Adam and Lion."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's denominator term."""
    lr_scheduler: SchedulerName = "cosine"
    """Shape after warm-up; `wsd` stays at `lr` and decays in the last tenth. `exponential_rise`, which `ds-finetune
    lr-range` uses, rises to `lr` without warm-up.
    """
    warmup: WarmupText = "3%"
    """Linear warm-up: `N steps`, or a share of the run such as `3%`."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a share of `lr`; with `exponential_rise` at the beginning, and above 0."""

    @model_validator(mode="after")
    def _has_a_first_rate(self) -> "OptimConfig":
        if self.lr_scheduler == "exponential_rise" and not self.min_lr_ratio:
            raise ValueError("min_lr_ratio is 0: with exponential_rise it should be above 0")
        return self
