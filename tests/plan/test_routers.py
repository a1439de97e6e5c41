"""Policies of routers in the plan: what a model cannot have is refused with the values, and lines say what is done."""

from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.build.meta_model import described
from ds_finetune.plan.trained_parts import RouterPlan, plan_routers
from ds_finetune.reference.selftest.cells import TINY_MODELS, hf_config
from tests.checking import check, settings_of
from tests.described import described_tree


def planned(
    family: str, *, lora: bool = False, changes: dict[str, Any] | None = None, **router: Any
) -> RouterPlan | None:
    section = {"router": router} if router else {}
    tree = {"model": "m", "data": {"train": "t"}, "output_dir": "o", **({"lora": {}} if lora else {})}
    config, model = RunConfig.model_validate(tree | section), TINY_MODELS[family] | (changes or {})
    check(settings_of(config, model_json=model), "type of the model")
    return plan_routers(config.router, described_tree(model))


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"family": "llama", "balance": 0.01}, "(balance 0.01) with model_type llama, which has no routed experts", "leave `router` out"),
        ({"family": "llama", "train": True}, "(train True) with model_type llama", "it is for deepseek_v2, deepseek_v3"),
        (
            {"family": "llama", "changes": {"model_type": "phimoe"}, "train": False},
            "(train False) with model_type phimoe, which is not in the table of model families",
            "it is for deepseek_v2",
        ),
        (
            {"family": "deepseek_v3", "changes": {"first_k_dense_replace": 2}, "balance": 0.1},
            "with model_type deepseek_v3, which has no routed experts",
            "leave `router` out",
        ),
        (
            {"family": "deepseek_v2", "bias_update": 0.001},
            "router.bias_update 0.001 with model_type deepseek_v2, whose routers have no bias",
            "set router.balance instead; routers of deepseek_v3",
        ),
        (
            {"family": "deepseek_v3", "balance": 0.001, "train": False},
            "router.balance 0.001 with router.train false",
            "set router.train: true, or router.balance: 0",
        ),
        ({"family": "deepseek_v3", "balance": 0.001, "lora": True}, "with lora.rank 16", "train all weights"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_have_is_refused(given: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(**given)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_routers_without_a_section_are_known_and_not_mentioned() -> None:
    assert planned("llama") is None
    found = planned("deepseek_v3_deep", lora=True)
    assert found is not None
    assert (found.layers, found.experts, found.per_token) == ((1, 2, 3), 8, 2)
    assert found.lines() == []


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"train": False}, "frozen in 3 layers, which send a token to 2 of 8 experts"),
        (
            {"balance": 0.01, "bias_update": 0.001},
            "trained in 3 layers, which send a token to 2 of 8 experts, plus 0.01 x their balance loss, a mean over the "
            "documents of the global batch, biases moved by 0.001 after each step",
        ),
    ],
)
def test_lines_say_what_is_done(section: dict[str, Any], line: str) -> None:
    found = planned("deepseek_v3_deep", **section)
    assert found is not None
    assert found.lines() == [("routers", line)]


@pytest.mark.parametrize(
    "family", [name for name in TINY_MODELS if FAMILIES[TINY_MODELS[name]["model_type"]].router is not None]
)
def test_parameters_are_those_of_the_model(family: str) -> None:
    """By the modules that transformers builds, and with the configuration that it writes."""
    from ds_finetune.model.parallel.pipeline import build_meta_model

    lm = build_meta_model(hf_config(family))
    found = plan_routers(None, described(hf_config(family)))
    assert found is not None
    for name in found.parameters():
        assert lm.get_parameter(name).shape[0] == found.experts
    routers = {name.rpartition(".")[0] for name in found.parameters()}
    like = {name for name, _ in lm.named_modules() if name.endswith(f".{found.kind.module}")}
    assert routers == like
    hashed = list(getattr(hf_config(family), "mlp_layer_types", None) or ()).count("hash_moe")
    for name in sorted(routers)[hashed:] if found.kind.bias else ():
        layer = lm.get_submodule(name.removesuffix(f".{found.kind.module}"))
        assert layer.get_buffer(str(found.kind.bias)).shape == (found.experts,)
