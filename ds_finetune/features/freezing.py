"""The feature that freezes the parameters named by `train.only` and `train.freeze`."""

from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ConfigError
from ds_finetune.families.table import family_of
from ds_finetune.features.feature import Feature
from ds_finetune.model.adapters.lora import AdapterPlacement
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.model_plan import task_of
from ds_finetune.model.loss.score_head import head_parameters
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.plan.settings import RunSettings
from ds_finetune.plan.trained_parts import FreezePlan, plan_freezing


class FreezeFeature(Feature):
    """Freezes parameters. Optimizer and checkpoints leave them out; exports read them from the model's folder."""

    name = "freezing"
    saves_frozen = False

    settings: FreezePlan

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> FreezePlan | None:
        """Plan which parameters `train.only` or `train.freeze` freezes; None if neither is set. ConfigError if no
        parameter would be trained, or if a new score head would be frozen as it was randomly initialised.
        """
        task, family = task_of(run.objective), family_of(hf_config.model_type)
        freezing = plan_freezing(run.train, read_tensors(hf_config, task).by_name)
        if freezing is None:
            return None
        key = "train.freeze" if run.train.freeze else "train.only"
        if not any(not family.is_of_indexer(name) for name in freezing.trained):
            raise ConfigError(f"{key} freezes the whole model", hint=f"freeze fewer parameters, or leave {key} out")
        is_scored = run.objective.row.head == "scores"
        heads = freezing.frozen.keys() & {*head_parameters(build_meta_model(hf_config, task))} if is_scored else ()
        if heads:
            raise ConfigError(
                f"{key} freezes {', '.join(sorted(heads))}, the head of objective {run.objective.name}, which is "
                "randomly initialised because the model's folder has none",
                hint=f"change {key} so that the head is trained",
            )
        return freezing

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Freeze the planned parameters by `requires_grad = False`."""
        for name, param in lm.named_parameters():
            if name in self.settings.frozen:
                param.requires_grad_(False)
