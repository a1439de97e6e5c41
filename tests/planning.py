"""The model of a run file as the engine takes it, and a run as the trainer prepares it."""

from ds_finetune.config.schema import RunConfig
from ds_finetune.model.build import read_hf_config
from ds_finetune.model.model_plan import ModelPlan, plan_model
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.inputs import read_inputs
from ds_finetune.trainer.prepare import PreparedRun, estimate_model, make_schedule


def model_of(config: RunConfig) -> ModelPlan:
    hf_config = read_hf_config(config.model.path)
    return plan_model(hf_config, config.model, config.parallel, config.lora, config.objective)


def prepared_run(config: RunConfig, plan: Plan) -> PreparedRun:
    """The run of `config` with this plan, without the checks that a real start does."""
    model = model_of(config)
    inputs = read_inputs(config, model)
    return PreparedRun(config, plan, inputs, make_schedule(config, inputs), estimate_model(config, plan, model))
