"""LoRA adapters as a feature; `model/adapters/` has the modules."""

from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.features.feature import Feature
from ds_finetune.features.mtp import check_adapted
from ds_finetune.model.adapters.lora import AdapterPlacement, install_lora
from ds_finetune.model.adapters.lora_plan import LoraPlan, plan_lora
from ds_finetune.model.build.model_plan import task_of
from ds_finetune.model.loss.score_head import head_parameters
from ds_finetune.plan.settings import RunSettings


class AdapterFeature(Feature):
    """Freezes the model and trains adapters, and the whole classification head if there is one."""

    name = "adapters"
    saves_frozen = False

    settings: LoraPlan

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> LoraPlan | None:
        """On with the section `lora`."""
        if run.lora is None:
            return None
        lora = plan_lora(hf_config, run.lora, task_of(run.objective))
        if run.mtp.train:
            check_adapted(hf_config, run.mtp, lora)
        return lora

    def lines(self) -> list[tuple[str, str]]:
        """The adapted modules by kind, for the plan."""
        return self.settings.lines()

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Add the adapters after the weights are loaded, because loading checks every parameter against the files."""
        install_lora(lm, self.settings.targets, self.settings.section, seed=self.plan.train.seed, placement=placement)
        for name in head_parameters(lm):
            lm.get_parameter(name).requires_grad_(True)
