"""Activations that are traced with few layers against those of all layers, and both against torch's own tracker."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ModelError
from ds_finetune.features import table
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.estimate.traced import TracedModel
from ds_finetune.plan.kernels import ChosenKernels
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import with_chunked_loss
from ds_finetune.trainer.tracing import short_model
from ds_finetune.trainer.tracing.activations import trace
from ds_finetune.trainer.tracing.cache import Traces
from tests.features.toy_feature import ToyFeature
from tests.model.tiny import CONFIGS
from tests.plan.estimate.allocated_cells import V4
from tests.planning import model_of
from tests.trainer.tracing.tracked import tracked_peak

LAYERS, TOKENS = 6, 512
UNPACKED = {"train": "none.jsonl", "packing": False}
TEACHER = CONFIGS["llama"] | {"model_type": "llama", "hidden_size": 64, "vocab_size": 4096}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "none": {"train": {"activation_checkpointing": "none"}},
    "selective": {"train": {"activation_checkpointing": "selective"}},
    "tiled": {"train": {"tiled_mlp": True}},
    "fp32": {"train": {"precision": "fp32"}},
    "lora": {"lora": {"rank": 8}},
    "lora kept": {"lora": {"rank": 8}, "train": {"activation_checkpointing": "none"}},
    "liger": {"kernels": "liger"},
    "compile": {"kernels": "compile"},
    "cpu": {"device": "cpu"},
}
AXES = {axis: {"parallel": {axis: 2}, "ranks": 2, "stage": 1} for axis in ("tp", "ep", "sp", "pp")}


def planned(
    folder: Path,
    tree: Mapping[str, Any],
    *,
    device: str = "cuda",
    ranks: int = 1,
    stage: int = 0,
    kernels: str = "torch",
    train: Mapping[str, Any] | None = None,
    **sections: Any,
) -> tuple[Plan, ModelPlan]:
    """The plan of a run with forwards of two rows, and its model with the config.json `tree`."""
    (folder / "config.json").write_text(json.dumps(tree))
    run = {
        "model": {
            "path": str(folder),
            "weights": "load" if "lora" in sections or "only" in (train or {}) else "random",
        },
        "data": {"train": "none.jsonl"},
        "output_dir": str(folder / "run"),
        "train": {"max_seq_len": TOKENS, "micro_batch_size": 2, "global_batch_size": 8, **(train or {})},
        "deepspeed": {"zero_optimization": {"stage": stage}},
        **sections,
    }
    config = RunConfig.model_validate(run)
    plan = make_plan(RunSettings.of(config), world=World(0, ranks, 0, ranks, "a test"), device=device)
    model = model_of(config)
    return with_chunked_loss(replace(plan, kernels=ChosenKernels(kernels, "a test")), model), model


def tree_of(family: str, **changes: Any) -> dict[str, Any]:
    # A larger vocabulary, which is not all that counts.
    return CONFIGS[family] | {"model_type": family, "num_hidden_layers": LAYERS, "vocab_size": 2048} | changes


def compare(folder: Path, tree: Mapping[str, Any], *, is_tracked: bool = False, **settings: Any) -> TracedModel:
    """The trace, compared with that of all layers, or where it `is_tracked` with torch's tracker, which is slow."""
    plan, model = planned(folder, tree, **settings)
    traced = trace(plan, model)
    assert len(traced.layers) == tree["num_hidden_layers"]
    most = tracked_peak(plan, model) if is_tracked else trace(plan, model, is_full=True).peak
    assert traced.peak == pytest.approx(most, rel=0.01)
    return traced


@pytest.mark.parametrize("way", ["full", "none", "selective", "fp32", "lora"])
def test_few_layers_of_deepseek_v3(tmp_path: Path, way: str) -> None:
    compare(tmp_path, tree_of("deepseek_v3"), **WAYS[way])


def test_selective_recomputation_keeps_the_first_product_of_experts(tmp_path: Path) -> None:
    """Beside what a dense layer keeps: gate and up of each token's experts in bf16."""
    tree = tree_of("deepseek_v3", first_k_dense_replace=2)
    full, selective = (trace(*planned(tmp_path, tree, **WAYS[way])).layers for way in ("full", "selective"))
    dense, sparse = (selective[number].kept - full[number].kept for number in (1, 3))
    rows = 2 * TOKENS * tree["num_experts_per_tok"]
    assert dense > 0
    assert sparse - dense == rows * 2 * tree["moe_intermediate_size"] * 2


@pytest.mark.parametrize(("family", "way"), [("qwen3_moe", "full"), ("llama", "none")])
def test_torch_counts_as_many_bytes(tmp_path: Path, family: str, way: str) -> None:
    compare(tmp_path, tree_of(family), is_tracked=True, **WAYS[way])


@pytest.mark.parametrize(("family", "axis"), [("deepseek_v2", "ep"), ("qwen3", "tp"), ("llama", "sp")])
def test_axes(tmp_path: Path, family: str, axis: str) -> None:
    compare(tmp_path, tree_of(family), **AXES[axis])


@pytest.mark.parametrize("model_type", ["qwen2_moe", "modernbert"])
def test_encoders_and_types_outside_the_table(tmp_path: Path, model_type: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
    tree = {
        "model_type": model_type,
        "num_hidden_layers": LAYERS,
        "vocab_size": 2048,
        "num_experts": 4,
        "pad_token_id": 0,
        **sizes,
    }
    encoder = {"objective": {"name": "classification", "labels": ["a", "b"]}, "data": UNPACKED}
    compare(tmp_path, tree, **(encoder if model_type == "modernbert" else {}))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(tmp_path: Path, family: str, way: str) -> None:
    compare(tmp_path, tree_of(family), is_tracked=True, **WAYS[way])


@pytest.mark.parametrize("way", ["full", pytest.param("none", marks=pytest.mark.slow)])
def test_layers_of_deepseek_v4(tmp_path: Path, way: str) -> None:
    """Each kind of attention more than twice."""
    layers = {"num_hidden_layers": 8, "compress_ratios": [0, 4, 128, 4, 128, 4, 128, 0], "num_hash_layers": 1}
    compare(tmp_path, {**V4, **layers}, **WAYS[way])


def test_weights_in_four_bits(tmp_path: Path) -> None:
    tree = tree_of("llama", hidden_size=64, intermediate_size=128)
    compare(tmp_path, tree, is_tracked=True, lora={"rank": 8, "quantize": "nf4"})


def test_prediction_layer(tmp_path: Path) -> None:
    tree = tree_of("deepseek_v3", num_nextn_predict_layers=1)
    without = trace(*planned(tmp_path, tree, stage=1))
    assert compare(tmp_path, tree, stage=1, mtp={"train": True}).head > without.head


def test_first_layers_without_adapters_keep_nothing(tmp_path: Path) -> None:
    lora = {"rank": 8, "target_modules": [r"model\.layers\.[35]\.self_attn\.o_proj"]}
    traced = compare(tmp_path, tree_of("llama"), lora=lora, train={"activation_checkpointing": "none"})
    assert [layer.backward > 0 for layer in traced.layers] == [False] * 3 + [True] * 3


def test_first_layers_without_trained_parameters_keep_nothing(tmp_path: Path) -> None:
    train = {"activation_checkpointing": "none", "only": [r"model\.layers\.[35]\.self_attn\.o_proj"]}
    traced = compare(tmp_path, tree_of("llama"), train=train)
    assert [layer.backward > 0 for layer in traced.layers] == [False] * 3 + [True] * 3


def test_inputs_of_layers_leave_the_device(tmp_path: Path) -> None:
    plan, model = planned(tmp_path, tree_of("llama"), train={"activation_offload": True})
    traced, hidden = trace(plan, model), 2 * TOKENS * CONFIGS["llama"]["hidden_size"] * 2
    assert [layer.on_host for layer in traced.layers] == [hidden] * 5 + [0]
    assert [layer.kept for layer in traced.layers[1:5]] == [0] * 4


def test_teacher(tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(TEACHER))
    objective = {"name": "distill", "teacher": str(tmp_path / "teacher")}
    traced = compare(tmp_path, tree_of("llama", vocab_size=4096), objective=objective)
    assert traced.teacher > 0


def test_feature_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FEATURES", list(table.FEATURES))
    without = trace(*planned(tmp_path, tree_of("llama")))
    table.register_feature(ToyFeature)
    settings = {"toy": {"scale": 2.0, "weight": 0.1}}
    with_feature = compare(tmp_path, tree_of("llama"), features=settings)
    # The squares of hidden states in fp32 are held until the loss.
    assert with_feature.head > without.head


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, model = planned(tmp_path, tree_of("deepseek_v3"))
    data = {"train": "none.jsonl", "cache_dir": str(tmp_path / "cache")}
    config = {"model": str(tmp_path), "data": data, "output_dir": str(tmp_path / "run")}
    run, said = RunSettings.of(RunConfig.model_validate(config)), list[str]()
    first = Traces(run, lambda: model, said.append)(plan)
    assert len(said) == 1
    again = Traces(run, lambda: pytest.fail("traced again"))
    assert again(plan) == first
    assert again(replace(plan, mesh=replace(plan.mesh, dp=64))) == first
    for other in (
        replace(plan, train=plan.train.model_copy(update={"tiled_mlp": True})),
        plan.with_rows(1),
    ):
        with pytest.raises(pytest.fail.Exception, match="traced again"):
            again(other)
    (file,) = (tmp_path / "cache" / "traces").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"stands": [99]}))
    with pytest.raises(pytest.fail.Exception, match="traced again"):
        Traces(run, lambda: pytest.fail("traced again"))(plan)
    (tmp_path / "config.json").write_text(json.dumps(tree_of("deepseek_v3", vocab_size=4096)))
    with pytest.raises(pytest.fail.Exception, match="traced again"):
        Traces(run, lambda: pytest.fail("traced again"))(plan)


def test_an_error_of_a_trace_says_what_failed_and_where(tmp_path: Path) -> None:
    def build() -> ModelPlan:
        raise KeyError("no_such_key")

    plan, _ = planned(tmp_path, tree_of("llama"))
    data = {"train": "none.jsonl", "cache_dir": str(tmp_path / "cache")}
    run = RunSettings.of({"model": str(tmp_path), "data": data, "output_dir": "o"})
    place = rf"KeyError at test_activations\.py:{build.__code__.co_firstlineno + 1}: 'no_such_key'"
    with pytest.raises(ModelError, match=place) as raised:
        Traces(run, build)(plan)
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_process_computes_as_before_after_a_trace(tmp_path: Path) -> None:
    plan, model = planned(tmp_path, tree_of("deepseek_v3"))
    trace(plan, model)
    assert torch.zeros(2).sum().item() == 0
    assert model.stages == (None,)


def test_tensors_are_real_after_a_model_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is kept, as loggers keep it: its traceback must not hold the context open (on Python 3.12 it did)."""

    def fail(*_: Any) -> None:
        raise ValueError("not built")

    monkeypatch.setattr(short_model, "build_modules", fail)
    with pytest.raises(ValueError, match="not built") as kept:
        short_model.ShortModel(*planned(tmp_path, TEACHER)).__enter__()
    assert type(torch.ones(1)) is torch.Tensor
    assert kept.tb is not None
