"""The model of a run file as the engine takes it, and a run as the trainer prepares it."""

from ds_finetune.config.schema import RunConfig
from ds_finetune.model.build.model_plan import ModelPlan, task_of
from ds_finetune.model.build.skeleton import read_hf_config
from ds_finetune.model.loss.score_config import set_classes
from ds_finetune.objectives.objective import ScoreObjective, make_objective
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.prepare import PreparedRun, read_run
from ds_finetune.trainer.resolve import ResolvedRun, plan_model


def model_of(config: RunConfig) -> ModelPlan:
    objective = make_objective(config.objective)
    hf_config = read_hf_config(config.model.path, task=task_of(objective))
    if isinstance(objective, ScoreObjective):
        set_classes(hf_config, config.objective, outputs=objective.num_outputs)
    return plan_model(hf_config, config)


def prepared_run(config: RunConfig, plan: Plan) -> PreparedRun:
    """The run of `config` with this plan, without the checks that a real start does."""
    return read_run(ResolvedRun(config, plan, model_of(config)))
