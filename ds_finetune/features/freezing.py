"""Parameters that `train.only` and `train.freeze` keep from being trained, as a feature."""

from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.errors import ConfigError
from ds_finetune.families.table import family_of
from ds_finetune.features.feature import Feature
from ds_finetune.model.adapters.lora import AdapterPlacement
from ds_finetune.model.build.meta_model import read_tensors
from ds_finetune.model.build.model_plan import task_of
from ds_finetune.model.loss.score_head import head_parameters
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.plan.freezing import FreezePlan, plan_freezing
from ds_finetune.plan.settings import RunSettings


class FreezeFeature(Feature):
    """Keeps frozen parameters out of optimizer and checkpoints. Exports take them from the model's folder."""

    name = "freezing"
    saves_frozen = False

    settings: FreezePlan

    @classmethod
    def planned(cls, run: RunSettings, hf_config: PretrainedConfig) -> FreezePlan | None:
        """Plan which parameters `train.only` or `train.freeze` freezes; None without these keys. ConfigError if they
        leave nothing to train, or freeze a score head, whose weights are not in the model's folder.
        """
        task, family = task_of(run.objective), family_of(hf_config.model_type)
        freezing = plan_freezing(run.train, read_tensors(hf_config, task).by_name)
        if freezing is None:
            return None
        key = "train.freeze" if run.train.freeze else "train.only"
        if not any(not family.is_of_indexer(name) for name in freezing.trained):
            raise ConfigError(f"{key} leaves no parameter to train", hint=f"name fewer parameters, or leave {key} out")
        is_scored = run.objective.row.head == "scores"
        heads = freezing.frozen.keys() & {*head_parameters(build_meta_model(hf_config, task))} if is_scored else ()
        if heads:
            raise ConfigError(
                f"{key} keeps {', '.join(sorted(heads))} as initialised: the head of objective {run.objective.name} is "
                "not in the model's folder",
                hint=f"change {key} so that the head is trained",
            )
        return freezing

    def lines(self) -> list[tuple[str, str]]:
        """Lines of the plan on trained and frozen parameters."""
        return self.settings.lines()

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        """Freeze the planned parameters: they require no gradient."""
        for name, param in lm.named_parameters():
            if name in self.settings.frozen:
                param.requires_grad_(False)
