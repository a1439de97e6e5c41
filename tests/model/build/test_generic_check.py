"""The trial of generic model types: which pack, which leak, and which have another loss; on default configurations of
transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from ds_finetune.errors import ModelError
from ds_finetune.families.configs import DENSE, GROUPED_ROUTING
from ds_finetune.model.attention.by_document import BY_LENGTHS, FLASH
from ds_finetune.model.build.generic_check import LIMIT, Trial, check_generic_type, check_trial, try_model_type
from ds_finetune.model.build.skeleton import build_skeleton, check_vocabulary, read_hf_config
from ds_finetune.model.build.tiny_config import Size, layer_kinds, layers_of_each_kind, tiny_config
from ds_finetune.model.parallel.pipeline import build_meta_model
from ds_finetune.objectives.scores import Classification, Regression, Reward
from tests.model import model_types
from tests.model.model_types import attention_of, config_of
from tests.running import start, tiny_task, torchrun

ROW_TOKENS = 2048


def _trial(kind: str, *, row_tokens: int = ROW_TOKENS, **settings: Any) -> Trial:
    config = config_of(kind, **settings)
    return try_model_type(config, attention=attention_of(config), row_tokens=row_tokens)


@pytest.mark.parametrize(
    "kind",
    [
        "smollm3",
        "granitemoe",
        "olmo2",
        "gpt_neox",
        "glm4",
        "dots1",
        "granite",
        "starcoder2",
        "doge",
        "nanochat",
        "llama4_text",
    ],
)
def test_a_type_that_keeps_documents_apart_is_trained_packed_and_padded(kind: str) -> None:
    trial = _trial(kind)
    assert not trial.untried
    assert max(trial.packed, trial.padded, trial.loss) < LIMIT / 5
    for packing in (True, False):
        check_trial(kind, trial, packing=packing)


LEAKING = [
    "falcon",
    "bloom",
    "mpt",
    "opt",
    "afmoe",
    "lfm2",
    "mamba",
    "mamba2",
    "olmo_hybrid",
    "granitemoehybrid",
]


@pytest.mark.parametrize("kind", LEAKING)
def test_a_type_whose_packed_documents_see_each_other_is_refused_packing(kind: str) -> None:
    trial = _trial(kind)
    assert trial.packed > 10 * LIMIT
    assert max(trial.padded, trial.loss) < LIMIT
    with pytest.raises(
        ModelError, match=f"model_type `{kind}`: documents of a packed row see each other, relative difference"
    ) as caught:
        check_trial(kind, trial, packing=True)
    assert caught.value.hint == "set data.packing: false"
    check_trial(kind, trial, packing=False)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("recurrent_gemma", {}),
        ("granite", {"logits_scaling": 8.0}),
        ("inkling2_text", {"final_logit_softcapping": 1e9, "vocab_size": 256, "unpadded_vocab_size": 240}),
    ],
)
def test_caps_multipliers_and_unpadded_vocabularies_are_found_by_the_logits(
    kind: str, settings: dict[str, Any]
) -> None:
    trial = _trial(kind, **settings)
    assert trial.loss > 10 * LIMIT
    with pytest.raises(ModelError, match="the loss is not that of the model's own logits"):
        check_trial(kind, trial, packing=False)


def test_a_window_counts_where_rows_are_longer() -> None:
    assert _trial("doge", row_tokens=4096).packed > LIMIT


def test_what_a_trial_refuses() -> None:
    with pytest.raises(
        ModelError, match="padding changes a document's results, relative difference 3e-01 on a tiny copy, limit 1e-04"
    ) as caught:
        check_trial("x", Trial(padded=0.3), packing=False)
    assert caught.value.hint == "set data.packing: true"
    check_trial("x", Trial(padded=0.3), packing=True)
    with pytest.raises(ModelError, match="packing could not be tried, a tiny copy fails with KeyError: 1") as caught:
        check_trial("x", Trial(untried="a tiny copy fails with KeyError: 1"), packing=True)
    assert caught.value.hint == "set data.packing: false"
    check_trial("x", Trial(untried="not built"), packing=False)


@pytest.mark.parametrize("kind", ["smollm3", "gpt2"])
def test_a_classifier_scores_as_its_own_class_does(kind: str) -> None:
    config = AutoConfig.for_model(kind, num_labels=3, pad_token_id=0)
    trial = try_model_type(config, attention="sdpa", row_tokens=64, objective=Classification(3))
    assert max(trial.packed, trial.padded, trial.loss) < LIMIT, trial
    assert not trial.untried


def test_pairs_need_documents_of_a_row_that_are_kept_apart() -> None:
    config = AutoConfig.for_model("opt", num_labels=1, pad_token_id=0)
    rows = {"attention": "sdpa", "packing": False, "row_tokens": 64, "precision": "fp32"}
    assert "padded rows" in check_generic_type(config, **rows, objective=Regression())[0]
    with pytest.raises(ModelError, match="documents of a packed row see each other") as refused:
        check_generic_type(config, **rows, objective=Reward())
    assert "both answers of a pair are in one row" in refused.value.hint


@pytest.mark.parametrize("kind", ["bamba", "olmo3", "ernie4_5_moe", "olmo_hybrid", "jamba"])
def test_a_tiny_copy_has_every_kind_of_layer(kind: str) -> None:
    config = config_of(kind)
    whole = build_meta_model(config)
    layers = layers_of_each_kind(whole)
    assert 1 < layers < config.num_hidden_layers
    tiny, one_layer = (build_meta_model(tiny_config(config, Size(4, number, ROW_TOKENS))) for number in (layers, 1))
    assert layer_kinds(tiny) == layer_kinds(whole) != layer_kinds(one_layer)
    assert sum(param.numel() for param in tiny.parameters()) < 0.05 * sum(param.numel() for param in whole.parameters())


def test_a_leak_in_a_late_layer_is_found() -> None:
    """A tiny copy of the first layers alone would have attention and nothing else."""
    layers = ["full_attention"] * 9 + ["linear_attention", "full_attention"]
    trial = _trial("olmo_hybrid", num_hidden_layers=len(layers), layer_types=layers)
    assert trial.packed > 10 * LIMIT


def test_a_model_that_cannot_be_made_small_is_refused_packing_alone() -> None:
    trial = _trial("xlstm")
    assert trial.untried
    line, *_ = check_generic_type(
        config_of("xlstm"), attention="eager", packing=False, row_tokens=ROW_TOKENS, precision="bf16"
    )
    assert "its loss is not known to be right" in line
    with pytest.raises(ModelError, match="packing could not be tried"):
        check_generic_type(config_of("xlstm"), attention="eager", packing=True, row_tokens=ROW_TOKENS, precision="bf16")


def test_flash_attention_is_tried_by_the_lengths_that_it_is_given() -> None:
    """They keep OPT's documents apart, as positions do not; OLMo Hybrid needs more; Falcon has a class of its own for
    it.
    """
    smollm, opt, hybrid, falcon = (
        try_model_type(config_of(kind), attention=FLASH, row_tokens=ROW_TOKENS)
        for kind in ("smollm3", "opt", "olmo_hybrid", "falcon")
    )
    assert max(smollm.packed, opt.packed, smollm.loss, opt.loss) < LIMIT / 5
    assert "sequences apart without" in hybrid.untried
    assert "without a GPU" in falcon.untried
    assert build_skeleton(
        config_of("smollm3", num_hidden_layers=1), attention=BY_LENGTHS, dtype=torch.float32, device="meta"
    )


def test_families_of_the_table_are_not_tried() -> None:
    config = AutoConfig.for_model("llama", **DENSE)
    assert check_generic_type(config, attention="sdpa", packing=True, row_tokens=ROW_TOKENS, precision="bf16") == ()


def test_a_type_that_does_not_run_without_its_head_is_named() -> None:
    with pytest.raises(
        ModelError,
        match=r"model_type `electra` does not run without its head .*: RuntimeError: .*cannot be multiplied",
    ):
        _trial("electra")


def test_a_type_that_transformers_cannot_build_is_named() -> None:
    with pytest.raises(ModelError, match="cannot build model_type `nemotron`: TypeError") as caught:
        _trial("nemotron", head_dim=None, num_key_value_heads=None)
    assert caught.value.hint == "check the model's config.json"


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_a_type_without_sdpa_is_told_what_there_is(kind: str) -> None:
    with pytest.raises(
        ModelError,
        match=f"model.attention sdpa is not available for model_type `{kind}`, for which transformers has eager",
    ) as caught:
        try_model_type(config_of(kind), attention="sdpa", row_tokens=ROW_TOKENS)
    assert caught.value.hint == "set model.attention: eager"


def test_widths_of_experts_that_the_grouped_product_rejects() -> None:
    config = config_of("flex_olmo", intermediate_size=14340)
    with pytest.raises(
        ModelError,
        match=r"down_proj` has rows of 14340 x 2 bytes in bf16, but torch's grouped matrix product needs a multiple of 16 bytes",
    ):
        check_generic_type(config, attention="sdpa", packing=True, row_tokens=ROW_TOKENS, precision="bf16")
    assert check_generic_type(config, attention="sdpa", packing=True, row_tokens=ROW_TOKENS, precision="fp32")


def test_a_model_without_tokens_is_refused() -> None:
    with pytest.raises(ModelError, match="model_type `vit` has no vocab_size of its own"):
        check_vocabulary(CONFIG_MAPPING["vit"](), "config.json")


@pytest.mark.parametrize("kind", ["mixtral", "olmoe"])
def test_a_balance_loss_that_is_asked_for_is_refused(kind: str, tmp_path: Path) -> None:
    tree = config_of(kind).to_dict() | {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(
        ModelError, match=r"`output_router_logits` = true turns on transformers' load-balancing loss .weight 0.02"
    ) as caught:
        read_hf_config(str(tmp_path))
    assert "output_router_logits to false" in caught.value.hint
    for plain in ({"output_router_logits": False}, {"router_aux_loss_coef": 0.0}):
        (tmp_path / "config.json").write_text(json.dumps(tree | plain))
        assert read_hf_config(str(tmp_path)).model_type == kind


def test_router_logits_without_a_loss_are_no_balance_loss(tmp_path: Path) -> None:
    tree = {"model_type": "deepseek_v3", **GROUPED_ROUTING, "output_router_logits": True}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    assert read_hf_config(str(tmp_path)).output_router_logits


def test_a_run_that_would_leak_ends_before_its_first_step(tmp_path: Path) -> None:
    """Two ranks; torchrun's report has the exit code of the first that ended."""
    run_file = tiny_task(
        tmp_path,
        model={"path": str(tmp_path / "model"), "weights": "random", "attention": "eager"},
        data={"packing": True},
    )
    tree = tiny_config(config_of("bloom"), Size(4, 2, ROW_TOKENS)).to_dict() | {"dtype": None}
    (tmp_path / "model" / "config.json").write_text(json.dumps(tree))
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    said = done.stdout + done.stderr
    assert "error: model_type `bloom`: documents of a packed row see each other" in said
    assert "hint: set data.packing: false" in said
    assert "exitcode  : 2" in said
    assert "step 1" not in said
    assert not (tmp_path / "run").exists()


def test_a_type_that_counts_its_layers_by_another_name_is_built() -> None:
    config = tiny_config(config_of("blt"), Size(heads=4, layers=1, row_tokens=2048))
    assert not hasattr(config, "num_hidden_layers")
    outline = build_skeleton(config, attention=attention_of(config), dtype=torch.float32, device="meta")
    assert layer_kinds(outline)


@pytest.mark.slow
def test_the_table_in_the_docs() -> None:
    """Every causal model type of the installed transformers; the facts' list of types without a leak is among those
    that pack.
    """
    found = model_types.rows()
    verdicts = {row.kind: row.verdict for row in found}
    assert {kind for kind in NO_LEAK if verdicts[kind] != "packs"} == set()
    page = Path("docs/reference/model-types.md").read_text(encoding="utf-8")
    assert page == model_types.page(found)


NO_LEAK = [
    "phimoe",
    "olmo2",
    "olmo3",
    "granite",
    "granitemoe",
    "smollm3",
    "glm4",
    "dots1",
    "dots1",
    "starcoder2",
    "gpt_neox",
    "exaone4",
    "seed_oss",
    "ministral",
    "hunyuan_v1_dense",
    "ernie4_5",
    "stablelm",
    "gpt2",
    "apertus",
    "arcee",
    "nemotron",
    "doge",
    "exaone_moe",
    "ernie4_5_moe",
    "llama4_text",
]
"""Types that transformers alone was seen to pack rightly; cohere2 does so too, and is refused for another reason."""
