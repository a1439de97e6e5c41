"""The table of model families is complete and agrees with transformers and the code that it names."""

import inspect

import pytest
import torch
import transformers.models as models
from transformers.models.auto.configuration_auto import model_type_to_module_name

from ds_finetune.export.onnx.decoder import ATTENTION
from ds_finetune.export.onnx.encoders import ENCODER_GRAPHS
from ds_finetune.export.onnx.experts import ROUTERS
from ds_finetune.families.family import Family
from ds_finetune.families.table import FAMILIES, STANDARD_SELFTEST, family_of
from ds_finetune.foreign.auto_models import AutoModelForCausalLM
from ds_finetune.reference.selftest.cells import TINY_MODELS, hf_config


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_a_row_names_code_that_there_is(family: Family) -> None:
    assert (family.experts_class is not None) == ("ep" in family.parallel_axes)
    assert family.expert_keys is not None or not (family.fused_experts or family.experts_class)
    if family.experts_class is not None:
        name = model_type_to_module_name(family.built_as or family.model_type)
        modeling = getattr(getattr(models, name), f"modeling_{name}")
        assert inspect.isclass(getattr(modeling, family.experts_class))
    if family.onnx is not None:
        assert family.onnx.attention in (ENCODER_GRAPHS if family.encoder else ATTENTION)
        assert family.onnx.router is None or family.onnx.router in ROUTERS
    if family.parallel_axes or family.has_lora:
        assert family.tiny_models is not None, "what is tested needs a tiny model"


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_tiny_model_is_of_its_family_and_has_no_experts_that_the_row_does_not_know(name: str) -> None:
    config = hf_config(name)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    family = family_of(config.model_type)
    if family.expert_keys is not None:
        router = next(module for name, module in lm.named_modules() if name.endswith((".mlp.gate", ".mlp.router")))
        experts = next(module for name, module in lm.named_modules() if name.endswith(".mlp.experts"))
        tree = config.to_dict()
        assert family.expert_keys.number(tree) == experts.num_experts == len(router.weight)
        assert family.expert_keys.per_token(tree) == router.top_k
        width = experts.intermediate_size if family.transposed_experts else experts.intermediate_dim
        assert family.expert_keys.width(tree) == width
    assert name.startswith(family.model_type)
    has_fused = any(name.endswith(".mlp.experts.gate_up_proj") for name, _ in lm.named_parameters())
    assert has_fused == (family.fused_experts or family.transposed_experts)


def test_the_standard_selftest_starts_with_deepseek() -> None:
    assert STANDARD_SELFTEST == ("deepseek_v3", "llama")


def test_a_model_type_without_a_row_has_no_further_capability() -> None:
    row = family_of("granitemoe")
    assert row.is_generic
    capabilities = (row.parallel_axes, row.has_lora, row.encoder, row.onnx, row.tiny_models)
    assert not any(capabilities)
