"""transformers' Auto classes that need no torch. They also know the model types of the table of families that
transformers does not.

Import them from here, so that every process of this program can read such models.
"""

from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ds_finetune.families.table import BUILT_AS
from ds_finetune.foreign.transformers_model_types import register_config

__all__ = ["CONFIG_MAPPING", "AutoConfig", "AutoTokenizer"]

for _name, _built_as in BUILT_AS.items():
    register_config(_name, built_as=_built_as)
