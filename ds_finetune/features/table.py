"""The table of features. Other packages can add features to it."""

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from transformers import PretrainedConfig

from ds_finetune.errors import ConfigError
from ds_finetune.features.adapters import AdapterFeature, FreezeFeature
from ds_finetune.features.feature import Feature
from ds_finetune.features.indexer import IndexerFeature
from ds_finetune.features.mtp import MtpFeature
from ds_finetune.features.routers import RouterFeature
from ds_finetune.features.teacher import TeacherFeature
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.settings import RunSettings

FEATURES: list[type[Feature]] = [
    RouterFeature,
    IndexerFeature,
    MtpFeature,
    AdapterFeature,
    FreezeFeature,
    TeacherFeature,
]
"""All features. Planning, installation and the sum of losses follow this order."""
_BUILT_IN = len(FEATURES)
ENTRY_POINTS = "ds_finetune.features"
"""Entry-point group in which an installed package names its `Feature` classes."""


def register_feature(feature: type[Feature]) -> None:
    """Add a feature of another package to the table. Its settings are the run file's `features.NAME`."""
    assert feature.name not in {other.name for other in FEATURES}, feature.name
    FEATURES.append(feature)


def plan_features(run: RunSettings, hf_config: PretrainedConfig) -> dict[str, Any]:
    """Plan all features. Returns the settings of those that are on, by name. Raises what `Feature.planned` raises, and
    ConfigError if the run file has settings of an unknown feature.
    """
    _load_entry_points()
    added = [feature.name for feature in FEATURES[_BUILT_IN:]]
    for name, settings in run.features.items():
        if name not in added:
            raise ConfigError(
                f"features.{name} has settings {dict(settings)}, but no installed package registers a feature {name}",
                hint=f"install the package of this feature; registered features: {', '.join(added) or 'none'}",
            )
    settings_by_name = ((feature.name, feature.planned(run, hf_config)) for feature in FEATURES)
    return {name: planned for name, planned in settings_by_name if planned is not None}


def features_of(model: ModelPlan, plan: Plan) -> tuple[Feature, ...]:
    """Make the features of an engine that the plan turns on, in the order of the table of features."""
    built = (feature.of(model, plan) for feature in FEATURES)
    return tuple(feature for feature in built if feature is not None)


@cache
def _load_entry_points() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        register_feature(entry.load())
