"""The model of a run file, as the engine takes it."""

from ds_finetune.config.schema import RunConfig
from ds_finetune.model.build import read_hf_config
from ds_finetune.model.model_plan import ModelPlan, plan_model


def model_of(config: RunConfig) -> ModelPlan:
    return plan_model(read_hf_config(config.model.path), config.model, config.parallel, config.lora)
