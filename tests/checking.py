"""Settings of a run at each stage, and the checks of any of them by subject."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ds_finetune.config.schedule import LrSchedule
from ds_finetune.plan.checks import BEFORE_MODEL, LENGTH_CHECKS
from ds_finetune.plan.model_checks import MODEL_CHECKS
from ds_finetune.plan.settings import LengthSettings, ModelSettings, Refusal, RunSettings

CHECKS: dict[str, Iterable[Refusal[Any]]] = {**BEFORE_MODEL, **MODEL_CHECKS, "length of the run": LENGTH_CHECKS}


def settings_of(source: Any, **known: Any) -> Any:
    """The settings of a run file with what is `known`: those with a model, with a length, or neither."""
    run = source if isinstance(source, RunSettings) else RunSettings.of(source)
    return with_known(run, **known)


def with_known(settings: Any, **known: Any) -> Any:
    """The settings with what is `known`, of the stage at which that is."""
    run = settings if isinstance(settings, RunSettings) else settings.run
    of_run = {name: value for name, value in known.items() if name in RunSettings.__dataclass_fields__}
    run, others = replace(run, **of_run), {name: value for name, value in known.items() if name not in of_run}
    if any(name in others for name in ("steps", "warmup", "rows", "steps_per_epoch")):
        schedule = LrSchedule(
            name="cosine",
            lr=1e-5,
            min_lr_ratio=0.0,
            warmup_steps=others.get("warmup", 0),
            steps=others.get("steps", 0),
        )
        return LengthSettings(run, schedule, others.get("rows"), others.get("steps_per_epoch", math.inf))
    if others:
        return ModelSettings(run, others.pop("model_json", {}), **others)
    return run if isinstance(settings, RunSettings) else replace(settings, run=run)


def check(run: Any, *subjects: str) -> None:
    """ConfigError or ModelError for the first combination of settings that is refused."""
    for subject in subjects:
        for row in CHECKS[subject]:
            row.raise_for(run)
