"""Settings of a run at each stage, and the checks of any of them by subject."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ds_finetune.config.schema import read_config
from ds_finetune.plan.checks import BEFORE_MODEL, LENGTH_CHECKS
from ds_finetune.plan.model_checks import MODEL_CHECKS
from ds_finetune.plan.settings import LengthSettings, ModelSettings, Refusal, RunSettings, Sections, sections_of

CHECKS: dict[str, Iterable[Refusal[Any]]] = {**BEFORE_MODEL, **MODEL_CHECKS, "length of the run": LENGTH_CHECKS}


def settings_of(source: Any, **known: Any) -> Any:
    """The settings of a run file with what is `known`: those with a model, with a length, or neither."""
    sections = sections_of(source if isinstance(source, Sections) else read_config(source))
    if "steps" in known:
        defaults = {"steps": 0, "warmup": 0, "rows": None, "steps_per_epoch": math.inf}
        return LengthSettings(**sections, **{name: known.get(name, value) for name, value in defaults.items()})
    if "model_json" in known or "positions" in known or "stages" in known:
        return ModelSettings(**sections, **({"model_json": {}} | known))
    return RunSettings(**sections, **known)


def with_known(run: Sections, **known: Any) -> Any:
    """The settings with what is `known`, of the stage at which that is."""
    if any(name not in type(run).__dataclass_fields__ for name in known):
        kept = {name: value for name, value in vars(run).items() if name not in sections_of(run)}
        return settings_of(run, **(kept | known))
    return replace(run, **known)


def check(run: Sections, *subjects: str) -> None:
    """ConfigError or ModelError for the first combination of settings that is refused."""
    for subject in subjects:
        for row in CHECKS[subject]:
            row.raise_for(run)
