"""The tensors of a rank, cut from those of the whole model, equal those of the modules that the rank builds."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.state.parameter_tags import parameter_groups, tag_auxiliary
from ds_finetune.families.table import FAMILIES, family_of
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.meta_model import described, layers_of_stages
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import build_skeleton, model_class
from ds_finetune.model.mtp import set_mtp_layers
from ds_finetune.model.parallel.expert import build_local_experts
from ds_finetune.model.parallel.pipeline import PipelineGroup, build_only_layers, install_pipeline_stage
from ds_finetune.model.parallel.sharding import ModelShard
from ds_finetune.model.parallel.tensor import TensorParallelGroup, install_tensor_parallel, local_config
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.estimate.traced import without_activations
from ds_finetune.plan.estimate.zero_rows import rank_elements
from ds_finetune.plan.layer_stages import RankWeights, TensorKind
from ds_finetune.plan.model_shape import Shape
from ds_finetune.plan.model_tensors import DescribedModel, part_of
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import TINY_MODELS
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import plan_model
from tests.described import described_tree
from tests.model.tiny import CONFIGS

MODELS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, **tree} for name, tree in CONFIGS.items()},
    **{f"{name} of the selftest": tree for name, tree in TINY_MODELS.items()},
    "qwen3_moe with a dense layer by steps": {"model_type": "qwen3_moe", **CONFIGS["qwen3_moe"]}
    | {"decoder_sparse_step": 2},
}
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tp": 2}, {"pp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2, "tp": 2})
RANKS = 8
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


def run_of(parallel: dict[str, Any], *, stage: int = 1, **sections: Any) -> tuple[RunConfig, Plan]:
    tree = {"model": "m", "data": {"train": "t.jsonl"}, "parallel": parallel, "output_dir": "o", **sections}
    tree |= {"deepspeed": {"zero_optimization": {"stage": stage}}}
    tree |= {"train": {"for": "1 steps", "global_batch_size": 64, "max_seq_len": 64}}
    config = RunConfig.model_validate(tree)
    return config, make_plan(RunSettings.of(config), world=World(0, RANKS, 0, RANKS, "a test"), device="cpu")


def memory_of(plan: Plan, model: DescribedModel) -> RunMemory:
    """The memory of the run without activations."""
    return RunMemory(plan, model, without_activations(model))


def legal(tree: dict[str, Any], parallel: dict[str, Any]) -> bool:
    return set(parallel) <= FAMILIES[tree["model_type"]].parallel_axes


def compare(tree: dict[str, Any], parallel: dict[str, Any], *, mtp_layers: int = 0) -> None:
    config, plan = run_of(parallel, **({"mtp": {"train": True}} if mtp_layers else {}))
    hf_config = AutoConfig.for_model(tree["model_type"], **{k: v for k, v in tree.items() if k != "model_type"})
    model = plan_model(hf_config, replace(RunSettings.of(config), mtp=type(config.mtp)()))
    if mtp_layers:
        set_mtp_layers(hf_config, mtp_layers)
        model = replace(model, stages=tuple(layers_of_stages(hf_config, config.parallel)))
    built = built_tensors(plan, model)
    computed = memory_of(plan, described(hf_config)).weights
    assert [counted(stage.kinds) for stage in computed] == [counted(stage) for stage in built]


def built_tensors(plan: Plan, model: ModelPlan) -> list[list[TensorKind]]:
    """The tensors of each pipeline stage, read off the modules that a rank builds, on torch's meta device."""
    return [_stage_tensors(plan, model, stage) for stage in range(plan.mesh.pp)]


def _stage_tensors(plan: Plan, model: ModelPlan, stage: int) -> list[TensorKind]:
    hf_config, mesh = model.hf_config, plan.mesh
    family, kind = family_of(hf_config.model_type), model_class(hf_config, model.task)
    with (
        build_local_experts(kind, family, ep_size=mesh.ep, mark=lambda _: None),
        build_only_layers(kind, model.stages[stage]),
    ):
        local = local_config(hf_config, mesh.tp)
        lm = build_skeleton(local, attention=model.attention, dtype=torch.bfloat16, device="meta", task=model.task)
    if mesh.pp > 1:
        install_pipeline_stage(lm, PipelineGroup(None, mesh.pp, stage), outputs=model.head_outputs)
    if mesh.tp > 1:
        install_tensor_parallel(lm, TensorParallelGroup(None, mesh.tp, 0), padding_idx=None)
    model_shard = ModelShard.of(mesh, family)
    kinds: Counter[tuple[str, tuple[int, ...], tuple[int, ...], int]] = Counter()
    for name, param in lm.named_parameters():
        shard = model_shard.tensor_shard(name, tuple(param.shape))
        sharers = plan.zero_ranks // (mesh.ep if shard.is_expert_parallel else 1)
        kinds[_LAYER.sub("N", name), shard.full_shape, tuple(param.shape), sharers] += 1
    return [TensorKind(name, count, whole, local, sharers) for (name, whole, local, sharers), count in kinds.items()]


def counted(kinds: Sequence[TensorKind]) -> Counter[TensorKind]:
    """Tensors by all but their number; two kinds of layers may have some in common."""
    found: Counter[TensorKind] = Counter()
    for kind in kinds:
        found[replace(kind, count=0)] += kind.count
    return found


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each model with one layout, so that each family has several."""
    for number, (name, tree) in enumerate(MODELS.items()):
        fitting = [parallel for parallel in LAYOUTS if legal(tree, parallel)]
        yield name, fitting[number % len(fitting)]


@pytest.mark.parametrize(("name", "parallel"), cases())
def test_tensors_of_a_rank(name: str, parallel: dict[str, Any]) -> None:
    compare(MODELS[name], parallel)


@pytest.mark.parametrize("name", ["deepseek_v3_deep", "qwen2_deep", "llama_deep"])
def test_tensors_of_a_rank_with_several_chunks(name: str) -> None:
    compare(TINY_MODELS[name], {"pp": 2, "vpp": 2})


@pytest.mark.slow
@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_tensors_of_a_rank_in_every_layout(name: str, parallel: dict[str, Any]) -> None:
    if legal(MODELS[name], parallel):
        compare(MODELS[name], parallel)


@pytest.mark.parametrize("parallel", [{}, {"pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"])
def test_tensors_with_a_prediction_layer(name: str, parallel: dict[str, Any]) -> None:
    compare(MODELS[name], parallel, mtp_layers=1)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen2", "llama"])
def test_tensors_of_a_reward_model(name: str) -> None:
    config, plan = run_of({"pp": 2}, objective={"name": "reward"})
    tree = MODELS[name]
    hf_config = AutoConfig.for_model(name, **{k: v for k, v in tree.items() if k != "model_type"}, num_labels=1)
    built = built_tensors(plan, plan_model(hf_config, RunSettings.of(config)))
    assert [counted(s.kinds) for s in memory_of(plan, described_tree(tree, scores=1)).weights] == [
        counted(stage) for stage in built
    ]


PUBLISHED = (
    ("deepseek-ai--DeepSeek-V3", {"pp": 2, "tp": 2}),
    ("deepseek-ai--DeepSeek-V3.2", {"ep": 4}),
    ("deepseek-ai--DeepSeek-V2-Lite", {"tp": 2, "ep": 2}),
    ("deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B", {"pp": 2}),
    ("Qwen--Qwen3-30B-A3B", {"ep": 8}),
    ("deepseek-ai--DeepSeek-V4-Flash", {}),
    ("deepseek-ai--DeepSeek-V4-Pro", {}),
)


@pytest.mark.parametrize(("name", "parallel"), [PUBLISHED[3]], ids=str)
def test_tensors_of_a_published_model(shared_data: Path, name: str, parallel: dict[str, Any]) -> None:
    compare(json.loads((shared_data / "configs" / name / "config.json").read_text()), parallel)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallel"), PUBLISHED, ids=str)
def test_tensors_of_published_models(shared_data: Path, name: str, parallel: dict[str, Any]) -> None:
    compare(json.loads((shared_data / "configs" / name / "config.json").read_text()), parallel)


def _by_part(weights: RankWeights) -> Counter[str]:
    """Elements of a rank by part of the model."""
    found: Counter[str] = Counter()
    for kind in weights.kinds:
        found[part_of(kind.name)] += kind.numel
    return found


def test_totals_of_published_models(shared_data: Path) -> None:
    for folder in sorted((shared_data / "configs").iterdir()):
        tree = json.loads((folder / "config.json").read_text())
        _, plan = run_of({})
        model = described_tree(tree)
        (whole,) = memory_of(plan, model).weights
        assert whole.numel == Shape.of(model).total_params, folder.name
        assert sum(_by_part(whole).values()) == whole.numel


# transformers' default configuration of each type is that of a published model, whose size its publisher tells.
@pytest.mark.parametrize(
    ("model_type", "billions"),
    [
        ("exaone", 7.82),  # EXAONE 3.0 7.8B
        ("glm_moe_dsa", 744),  # GLM-5
        ("gpt_oss", 117),  # gpt-oss-120b
        ("minimax_m2", 229),  # MiniMax-M2
        ("mistral", 7.24),  # Mistral-7B-v0.1
        ("phi3", 3.82),  # Phi-3-mini-4k
        ("sarvam_mla", 106),  # Sarvam 105B
        ("sarvam_moe", 32.2),  # Sarvam 30B, of which 2 are embeddings and head
    ],
)
def test_totals_of_default_configurations(model_type: str, billions: float) -> None:
    total = Shape.of(described_tree({"model_type": model_type})).total_params
    assert float(f"{total / 1e9:.3g}") == billions


@pytest.mark.parametrize(("name", "billions", "active"), [("Flash", 284.3, 13.6), ("Pro", 1573.0, 49.3)])
def test_totals_of_deepseek_v4(name: str, billions: float, active: float, shared_data: Path) -> None:
    folder = shared_data / "configs" / f"deepseek-ai--DeepSeek-V4-{name}"
    shape = Shape.of(described_tree(json.loads((folder / "config.json").read_text())))
    assert round(shape.total_params / 1e9, 1) == billions
    assert round(shape.active_params / 1e9, 1) == active


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_adapters_of_experts_are_shared_by_the_ranks_that_hold_them(ep: int) -> None:
    tree, rank = described_tree({"model_type": "qwen3_moe", **CONFIGS["qwen3_moe"]}), 8
    _, plan = run_of({"ep": ep}, lora={"rank": rank}, model={"path": "m", "weights": "load"})
    (weights,), (whole,) = memory_of(plan, tree).weights, memory_of(run_of({})[1], tree).weights
    adapted = [kind for kind in whole.kinds if ".layers." in kind.name and len(kind.full_shape) > 1]
    sizes = Counter[bool]()
    for kind in adapted:
        is_router = part_of(kind.name) == "router"
        sizes[len(kind.full_shape) == 3] += (
            0 if is_router else kind.numel // prod(kind.full_shape[-2:]) * rank * sum(kind.full_shape[-2:])
        )
    numbers = rank_elements(plan, memory_of(plan, tree).trained, weights)
    assert numbers.trained == sizes[True] // ep + sizes[False]
    assert numbers.sharded_trained == sizes[True] // RANKS + sizes[False] // RANKS
    assert numbers.largest_group == (numbers.sharded_trained if ep == 1 else max(sizes.values()) // RANKS)


@pytest.mark.parametrize("detach", [False, True])
def test_the_largest_group_is_that_of_the_optimizer(detach: bool) -> None:
    """With `mtp.detach` a prediction layer has a loss, and so an optimizer group, of its own."""
    tree = {"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"]}
    model, (_, plan) = described_tree(tree, mtp_layers=1), run_of({}, mtp={"train": True, "detach": detach})
    memory, trained = memory_of(plan, model), nn.ParameterDict()
    for name, tensor in model.tensors.by_name.items():
        trained[name.replace(".", "|")] = parameter = nn.Parameter(torch.empty(tensor.shape, device="meta"))
        if detach and name.startswith(f"model.layers.{tree['num_hidden_layers']}."):
            tag_auxiliary(parameter, "mtp")
    groups = parameter_groups(trained, plan, Groups(None, None, None, None, None))
    numbers = rank_elements(plan, memory.trained, memory.weights[0])
    assert numbers.largest_group == max(sum(-(-p.numel() // RANKS) for p in group["params"]) for group in groups)


@pytest.mark.parametrize("stage", [0, 1])
def test_only_named_parameters_are_counted_as_trained(stage: int) -> None:
    """Of both pipeline stages of a model, by the shapes of its own modules."""
    tree = described_tree(MODELS["qwen3"] | {"num_hidden_layers": 4})
    _, plan = run_of({"pp": 2}, model={"path": "m", "weights": "load"})
    named = replace(plan, train=plan.train.model_copy(update={"only": ("o_proj",), "freeze": (r".*\.[03]\..*",)}))
    weights = memory_of(plan, tree).weights[stage]
    (projection,) = (kind for kind in weights.kinds if kind.name.endswith("o_proj.weight"))
    assert rank_elements(named, memory_of(named, tree).trained, weights).trained == prod(projection.full_shape)
    assert rank_elements(plan, memory_of(plan, tree).trained, weights).trained == weights.numel


def test_parts_of_a_model() -> None:
    _, plan = run_of({})
    model = described_tree(MODELS["deepseek_v3"])
    (whole,) = memory_of(plan, model).weights
    assert _by_part(whole) == Shape.of(model).parts
    assert part_of("model.layers.N.self_attn.q_a_layernorm.weight") == "norms"
