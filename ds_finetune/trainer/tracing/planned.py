"""Traces of a run that is only planned; only config.json is read of its model."""

from dataclasses import replace
from typing import TYPE_CHECKING

from ds_finetune.config.sections import ParallelConfig
from ds_finetune.console.phase_line import Say
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.settings import RunSettings
from ds_finetune.trainer.tracing.cache import Traces

if TYPE_CHECKING:
    from ds_finetune.model.build.model_plan import ModelPlan


def planned_traces(run: RunSettings, say: Say) -> Traces:
    """Activations of the run's model by layout; ConfigError or ModelError where it cannot be built."""
    return Traces(run, lambda: _plan_model(run), say)


def _plan_model(run: RunSettings) -> "ModelPlan":
    # Imported only if something must be traced, since it imports torch.
    from ds_finetune.model.build.model_plan import task_of
    from ds_finetune.model.build.skeleton import TOKENIZER_PATTERNS, read_hf_config
    from ds_finetune.model.loss.score_config import set_classes
    from ds_finetune.trainer.resolve import plan_model, with_classes

    # The plan checks the layout, so one rank suffices here.
    run = with_classes(replace(run, parallel=ParallelConfig(), mesh=Mesh(0, 1)), is_config_only=True)
    hf_config = read_hf_config(run.model.path, files=TOKENIZER_PATTERNS, task=task_of(run.objective))
    if run.objective.row.head == "scores":
        set_classes(hf_config, run.objective, outputs=run.objective.num_outputs)
    return plan_model(hf_config, run)
