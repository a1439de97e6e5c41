"""transformers' Auto classes that work without torch, extended by this program's additional model types.

Code must import the Auto classes from here: transformers' own would reject those model types.
"""

import re
from functools import cache, wraps
from typing import Any

from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_finetune.families.table import BUILT_AS, family_of
from ds_finetune.foreign.guard import Foreign

__all__ = ["CONFIG_MAPPING", "AutoConfig", "AutoTokenizer"]

OWN_TYPES = {name: built_as for name, built_as in BUILT_AS.items() if name not in CONFIG_MAPPING}
"""Model types unknown to the installed transformers, each with the type whose classes build the model."""

_CLASSES = Foreign("transformers", "models/auto/auto_factory.py, the mappings from configurations to classes")
_CONVERSIONS = Foreign("transformers", "conversion_mapping.py:2560-2592")


def register_config(name: str, *, built_as: str) -> None:
    """Register the model type `name` with `AutoConfig` and `AutoTokenizer`, which then treat it as `built_as`.

    A configuration keeps `name` as its model type. A published config.json is translated if newer releases of
    transformers have this type.
    """
    if name in CONFIG_MAPPING:
        return
    built_config, newer = CONFIG_MAPPING[built_as], family_of(name).newer
    fields: dict[str, Any] = {"model_type": name}
    if newer is not None:

        def __init__(self: Any, **config: Any) -> None:  # noqa: ANN401, N807
            built_config.__init__(self, **newer.older_config(config))

        fields |= {"__init__": __init__, "attribute_map": built_config.attribute_map | newer.keys}
    CONFIG_MAPPING.register(name, type(f"{name.title().replace('_', '')}Config", (built_config,), fields))


def without_types(error: Exception) -> str:
    """Message of an error of transformers in one line, without its list of all model types and how to install it."""
    return " ".join(re.split(r"\. Should contain one of|\n\nYou can update", str(error))[0].split())


def published_names(name: str) -> dict[str, str]:
    """Rules that turn published tensor names of a model type of `OWN_TYPES` into names in the model. Each maps a
    regular expression for a part of the name to its replacement. Rules are applied one after the other. Empty for text
    parts of multimodal models, which have no folders of their own.
    """
    if family_of(name).is_generic:
        return {}
    return {re.escape(published): own for own, published in reversed(family_of(name).published_renames)}


def register_models(name: str, *, built_as: str) -> None:
    """Register the model type `name` with the Auto classes of models, which then build and load it as `built_as`.

    transformers looks up renames of checkpoint tensors by model type too (conversion_mapping.py:2606).
    """
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForPreTraining,
        AutoModelForSequenceClassification,
        conversion_mapping,
    )

    built_config, own_config = CONFIG_MAPPING[built_as], CONFIG_MAPPING[name]
    factories = [AutoModel, AutoModelForCausalLM]
    # Newer transformers has this type but no classifier of it, and could not load a classifier trained here.
    factories += [AutoModelForSequenceClassification] if family_of(name).newer is None else []
    for factory in factories:
        classes = known = _CLASSES.attribute(factory, "_model_mapping")
        if factory is AutoModelForCausalLM and built_config not in classes:
            # transformers 5.23 has Mistral 4's causal LM only here (models/auto/modeling_auto.py:711).
            known = _CLASSES.attribute(AutoModelForPreTraining, "_model_mapping")
        if built_config in known:
            classes.register(own_config, known[built_config], exist_ok=True)
    if _CONVERSIONS.attribute(conversion_mapping, "_checkpoint_conversion_mapping_cache") is not None:
        _add_conversions(conversion_mapping, name, built_as)
        return
    # Building the mapping compiles 900 regular expressions, so it is extended only when transformers builds it.
    build = _CONVERSIONS.attribute(conversion_mapping, "_build_checkpoint_conversion_mapping")

    @wraps(build)
    def build_with_own() -> dict[str, Any]:
        conversion_mapping._checkpoint_conversion_mapping_cache = build()
        _add_conversions(conversion_mapping, name, built_as)
        return dict(conversion_mapping._checkpoint_conversion_mapping_cache)

    conversion_mapping._build_checkpoint_conversion_mapping = build_with_own


@cache
def renamings(model_type: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """transformers' rules for renaming a causal LM's checkpoint tensors: first for loading, then for saving. A rule's
    method `rename_source_key` returns the new name. Both are empty if transformers also merges or splits tensors.
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
    from transformers.core_model_loading import Split, WeightConverter, WeightRenaming

    renamings = [WeightRenaming(published, own) for published, own in published_names(name).items()]
    mapping = [*(_CONVERSIONS.attribute(module, "get_checkpoint_conversion_mapping")(built_as) or ()), *renamings]
    if joined := family_of(name).published_qkv:
        mapping.append(WeightConverter(joined, ["q_proj", "k_proj", "v_proj"], [Split(dim=0)]))
    if mapping:
        _CONVERSIONS.attribute(module, "register_checkpoint_conversion_mapping")(name, mapping, overwrite=True)


for _name, _built_as in OWN_TYPES.items():
    register_config(_name, built_as=_built_as)
