"""transformers' Auto classes for models, extended by this program's additional model types."""

from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSequenceClassification

from ds_finetune.foreign.auto_configs import OWN_TYPES, register_models

__all__ = ["AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoModelForSequenceClassification"]

for _name, _built_as in OWN_TYPES.items():
    register_models(_name, built_as=_built_as)
