"""`model.context`: positions and rotary scaling change together, or one error says what the model allows."""

from typing import Any

import pytest

from ds_finetune.errors import ConfigError
from ds_finetune.plan.context import extend_tree, plan_context

V3_ROPE = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10000,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def model(positions: int = 32768, rope: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A configuration as transformers reads it: qwen3's unless `changes` say otherwise."""
    plain = {"rope_type": "default", "rope_theta": 1e6}
    return {
        "model_type": "qwen3",
        "max_position_embeddings": positions,
        "rope_parameters": plain if rope is None else rope,
        **changes,
    }


def deepseek(rope: dict[str, Any], positions: int = 163840, model_type: str = "deepseek_v3") -> dict[str, Any]:
    return model(positions, rope, model_type=model_type, kv_lora_rank=512)


def test_a_model_without_scaling_gets_the_factor_of_its_positions() -> None:
    plan = plan_context(model(), 131072)
    assert plan.rope == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    }
    assert plan.lines() == [("context", "32768 -> 131072 positions, no scaling -> YaRN factor 4")]
    (note,) = plan.notes()
    assert "divided by 4 instead of 1" in note


def test_deepseek_keeps_its_keys_and_gets_another_factor() -> None:
    plan = plan_context(deepseek(V3_ROPE), 327680)
    assert plan.rope == V3_ROPE | {"factor": 80.0}
    (note,) = plan.notes()
    assert "divided by 80 instead of 40" in note


def test_latent_attention_without_scaling_gets_the_keys_of_deepseek_v3() -> None:
    plan = plan_context(deepseek({"rope_type": "default", "rope_theta": 5e4}, 8192), 131072)
    assert plan.rope["mscale"] == plan.rope["mscale_all_dim"] == 1.0


@pytest.mark.parametrize("context", [131072, 163840])
def test_a_context_that_fits_changes_nothing_and_says_so(context: int) -> None:
    plan = plan_context(deepseek(V3_ROPE), context)
    assert plan.rope == V3_ROPE
    assert not plan.is_extended
    assert plan.positions == 163840
    assert plan.notes() == ()
    ((_, text),) = plan.lines()
    assert text == f"{context} tokens; the model has 163840 positions, and nothing of it is changed"


def test_scaling_that_reaches_further_than_the_positions_stays() -> None:
    """Qwen's documents add scaling to config.json and leave its positions."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    plan = plan_context(model(40960, rope), 131072)
    assert plan.rope == rope
    assert plan.is_extended
    assert plan.positions == 131072
    assert plan.notes() == ()
    with pytest.raises(ConfigError, match=r"65536 is less than the 131072 positions .* 32768 x factor 4") as caught:
        plan_context(model(40960, rope), 65536)
    assert caught.value.hint == "set model.context: 131072"


@pytest.mark.parametrize(
    ("tree", "said", "hint"),
    [
        (model(rope={"rope_type": "llama3", "factor": 8.0}), r"more than the 32768 .* \(llama3\)", "context: 32768"),
        (model(rope={"rope_type": "longrope"}), r"\(longrope\)", "set model.context: 32768"),
        (model(rope={"full_attention": {}, "sliding_attention": {}}), "another by type of layer", "32768"),
        (model(rope={}), r"\(none\)", "32768"),
        (model(model_type="bert"), "is not tested with model_type bert", "use one of deepseek_v2"),
        (model(model_type="gemma3_text"), "is not tested with model_type gemma3_text", "use one of deepseek_v2"),
    ],
)
def test_what_cannot_be_extended_is_refused(tree: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        plan_context(tree, 131072)
    assert hint in str(caught.value.hint)


def test_a_factor_that_servers_would_round_down_is_refused() -> None:
    lost = next(n for n in range(101, 10**6) if int(100 * (n / 100)) != n)
    with pytest.raises(
        ConfigError, match=rf"model\.context {lost} is not the number of positions that vLLM computes, 100 x the factor"
    ) as caught:
        plan_context(model(100), lost)
    below = lost // 100 * 100
    assert caught.value.hint == f"set model.context to {below} or {below + 100}"


@pytest.mark.parametrize(
    "written",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": None},
    ],
)
def test_every_schema_of_config_json_is_changed(written: dict[str, Any]) -> None:
    plan = plan_context(model(), 131072)
    tree = extend_tree({"max_position_embeddings": 32768, "hidden_size": 8, **written}, plan)
    assert tree["max_position_embeddings"] == 131072
    assert tree["hidden_size"] == 8
    sections = [tree[key] for key in ("rope_parameters", "rope_scaling") if key in tree]
    assert sections
    assert all(part["rope_type"] == "yarn" and part["factor"] == 4.0 for part in sections)
    assert all(part["original_max_position_embeddings"] == 32768 for part in sections)
    assert tree.get("rope_theta") == 1e6 or tree["rope_parameters"]["rope_theta"] == 1e6
