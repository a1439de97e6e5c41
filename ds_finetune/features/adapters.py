"""LoRA adapters as a feature; `model/adapters/` has their modules."""

from typing import Self

from transformers import PreTrainedModel

from ds_finetune.features.feature import Feature
from ds_finetune.model.adapters.lora import AdapterPlacement, install_lora
from ds_finetune.model.adapters.lora_plan import LoraPlan
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.loss.score_head import head_parameters
from ds_finetune.plan.plan import Plan


class AdapterFeature(Feature):
    """Freezes the model and trains adapters, and the whole score head where there is one."""

    name = "adapters"
    saves_frozen = False

    def __init__(self, plan: LoraPlan, seed: int) -> None:
        self._plan, self._seed = plan, seed

    @classmethod
    def of(cls, model: ModelPlan, plan: Plan) -> Self | None:
        """With the section `lora`."""
        return None if model.lora is None else cls(model.lora, plan.seed)

    def lines(self) -> list[tuple[str, str]]:
        """What is adapted, kind by kind."""
        return self._plan.lines()

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Add the adapters after the weights, because loading checks every parameter against the files."""
        install_lora(lm, self._plan.targets, self._plan.section, seed=self._seed, placement=placement)
        for name in head_parameters(lm):
            lm.get_parameter(name).requires_grad_(True)
