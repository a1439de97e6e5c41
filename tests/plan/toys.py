"""A model family and a feature that another package adds, for tests of plans."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ds_finetune.families import table
from ds_finetune.families.family import Family
from ds_finetune.features import table as features
from ds_finetune.foreign.auto_configs import CONFIG_MAPPING, AutoConfig
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.foreign.guard import replaced
from tests.features.toy_feature import ToyFeature


class GatedConfig(LlamaConfig):
    model_type = "gated_llama"


def gate(module: Any, _: Any, named: dict[str, Any], given: Any) -> Any:
    """The outputs of attention, multiplied by a gate of three numbers for each."""
    states, *rest = given
    return states * module.g_proj(named["hidden_states"]).unflatten(-1, (3, -1)).sum(-2).sigmoid(), *rest


class GatedForCausalLM(LlamaForCausalLM):
    """Llama with a gate in each attention."""

    config_class = GatedConfig

    def __init__(self, config: GatedConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.g_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
            layer.self_attn.register_forward_hook(gate, with_kwargs=True)


@contextmanager
def toys_registered() -> Iterator[None]:
    """Context in which the family `gated_llama` and the feature `toy` are registered."""
    row = Family("gated_llama", has_lora=True)
    with ExitStack() as stack:
        stack.enter_context(replaced(table, "FAMILIES", {**table.FAMILIES, "gated_llama": row}))
        stack.enter_context(replaced(features, "FEATURES", [*features.FEATURES, ToyFeature]))
        AutoConfig.register("gated_llama", GatedConfig)
        stack.callback(CONFIG_MAPPING._extra_content.pop, "gated_llama")
        AutoModelForCausalLM.register(GatedConfig, GatedForCausalLM)
        stack.callback(AutoModelForCausalLM._model_mapping._extra_content.pop, GatedConfig)
        yield
