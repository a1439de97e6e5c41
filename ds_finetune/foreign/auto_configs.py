"""transformers' Auto classes that work without torch, extended by this program's additional model types.

Code must import the Auto classes from here: transformers' own would reject those model types.
"""

from functools import cache, wraps
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_finetune.families.table import BUILT_AS
from ds_finetune.foreign.guard import Foreign

__all__ = ["CONFIG_MAPPING", "AutoConfig", "AutoTokenizer"]

_CLASSES = Foreign("transformers", "models/auto/auto_factory.py, the mappings from configurations to classes")
_CONVERSIONS = Foreign("transformers", "conversion_mapping.py:2560-2592")


def register_config(name: str, *, built_as: str) -> None:
    """Register the model type `name` with `AutoConfig` and `AutoTokenizer`, which then treat it as `built_as`.

    A configuration keeps `name` as its model type.
    """
    if name not in CONFIG_MAPPING:
        title = name.title().replace("_", "")
        CONFIG_MAPPING.register(name, type(f"{title}Config", (CONFIG_MAPPING[built_as],), {"model_type": name}))


def register_models(name: str, *, built_as: str) -> None:
    """Register the model type `name` with the Auto classes of models, which then build and load it as `built_as`.

    transformers looks up renames of checkpoint tensors by model type too (conversion_mapping.py:2606).
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, conversion_mapping

    register_config(name, built_as=built_as)
    built_config, own_config = CONFIG_MAPPING[built_as], CONFIG_MAPPING[name]
    for factory in (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification):
        classes = _CLASSES.attribute(factory, "_model_mapping")
        if built_config in classes:
            classes.register(own_config, classes[built_config], exist_ok=True)
    if _CONVERSIONS.attribute(conversion_mapping, "_checkpoint_conversion_mapping_cache") is not None:
        _add_conversions(conversion_mapping, name, built_as)
        return
    # Building the mapping compiles 900 regular expressions, so it is extended only once transformers builds it.
    build = _CONVERSIONS.attribute(conversion_mapping, "_build_checkpoint_conversion_mapping")

    @wraps(build)
    def build_with_own() -> dict[str, Any]:
        conversion_mapping._checkpoint_conversion_mapping_cache = build()
        _add_conversions(conversion_mapping, name, built_as)
        return dict(conversion_mapping._checkpoint_conversion_mapping_cache)

    conversion_mapping._build_checkpoint_conversion_mapping = build_with_own


@cache
def renamings(model_type: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """transformers' rules for renaming a causal LM's checkpoint tensors: those for loading, and those for saving. A
    rule's method `rename_source_key` returns the new name. No rules are returned if transformers also merges or splits
    tensors.
    """
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightRenaming
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    of = _CONVERSIONS.attribute(conversion_mapping, "get_checkpoint_conversion_mapping")
    loading = of(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")) or of(model_type) or ()
    if not all(type(each) is WeightRenaming for each in loading):
        return (), ()
    return tuple(loading), tuple(each.reverse_transform() for each in reversed(loading))


def _add_conversions(module: Any, name: str, built_as: str) -> None:  # noqa: ANN401
    mapping = _CONVERSIONS.attribute(module, "get_checkpoint_conversion_mapping")(built_as)
    register = _CONVERSIONS.attribute(module, "register_checkpoint_conversion_mapping")
    if mapping is not None:
        register(name, mapping, overwrite=True)


for _name, _built_as in BUILT_AS.items():
    register_config(_name, built_as=_built_as)
