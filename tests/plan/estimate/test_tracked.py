"""Memory by arithmetic against torch's tracker of the program's own modules, on fake tensors."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.objectives import read_objective
from ds_finetune.config.schema import RunConfig
from ds_finetune.config.sections import LoraConfig
from ds_finetune.families.table import FAMILIES
from ds_finetune.model.attention import compressed_attention
from ds_finetune.plan.estimate.memory import MemoryEstimate, estimate_memory
from ds_finetune.plan.estimate.rows import BACKWARD, FORWARD, Moment
from ds_finetune.plan.kernels import ChosenKernels
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.described import described_tree
from tests.model.tiny import CONFIGS
from tests.plan.estimate.test_activation_memory import config as wider_config
from tests.plan.estimate.tracked import Tracked, track

UPDATED = ("fp32 weights", "moments")
"""States that the tracked forward and backward do not have."""
MOMENTS: tuple[Moment, ...] = ("teacher", *FORWARD, *BACKWARD)


def estimate(
    tree: Mapping[str, Any],
    rows: int,
    tokens: int,
    lora: Mapping[str, Any] | None = None,
    *,
    objective: Mapping[str, Any] | None = None,
    teacher: Mapping[str, Any] | None = None,
    kernels: str = "torch",
    **train: Any,
) -> MemoryEstimate:
    section = {"max_seq_len": tokens, "micro_batch_size": rows, "global_batch_size": 2 * rows, **train}
    run = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "train": section}
    run |= {"deepspeed": {"zero_optimization": {"stage": 0}}, "lora": lora}
    run |= {} if objective is None else {"objective": objective}
    run |= {"rollout": {"prompts_per_step": rows}, "rewards": ["number"]}
    config = RunConfig.model_validate(run)
    plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cuda")
    return estimate_memory(
        replace(plan, kernels=ChosenKernels(kernels, "a test")), described_tree(tree, teacher=teacher)
    )


def bytes_at(planned: MemoryEstimate, moment: Moment) -> int:
    return sum(
        row.num_bytes for row in planned.rows if row.place == "gpu" and moment in row.when and row.name not in UPDATED
    )


def compare(
    tree: Mapping[str, Any],
    *,
    tokens: int = 4096,
    lora: Mapping[str, Any] | None = None,
    kernels: str = "torch",
    lengths: Sequence[int] = (),
    **train: Any,
) -> tuple[Tracked, int]:
    """What is tracked of two rows of two documents, or of documents of these `lengths`, and the bytes of the same by
    arithmetic.
    """
    planned = estimate(tree, 2, tokens, lora, kernels=kernels, **train)
    precision, recomputation = train.get("precision", "bf16"), train.get("activation_checkpointing", "full")
    documents = [tuple(lengths) or (tokens // 4, tokens - tokens // 4)] * 2
    tracked = track(
        tree,
        documents,
        precision=precision,
        recomputation=recomputation,
        is_tiled=train.get("tiled_mlp", False),
        lora=LoraConfig.model_validate(lora) if lora else None,
        kernels=kernels,
    )
    return tracked, max(bytes_at(planned, moment) for moment in MOMENTS)


def published(shared_data: Path, name: str, **changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((shared_data / "configs" / name / "config.json").read_text())
    return tree | changes


LITE, DISTILL = "deepseek-ai--DeepSeek-V2-Lite", "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B"
QWEN, V3 = "Qwen--Qwen3-30B-A3B", "deepseek-ai--DeepSeek-V3"
WAYS: dict[str, dict[str, Any]] = {
    "recomputed": {},
    "kept": {"activation_checkpointing": "none"},
    "selective": {"activation_checkpointing": "selective"},
    "tiled": {"tiled_mlp": True},
}


WIDER = {
    "gpt_oss": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    }
}
"""Widths of gpt-oss-20b: the copies that its attention makes are not counted, and are much of a narrow layer."""


@pytest.mark.parametrize("way", ["recomputed", "selective"])
@pytest.mark.parametrize("name", [LITE, DISTILL, QWEN])
def test_published_sizes_with_few_layers(shared_data: Path, name: str, way: str) -> None:
    tracked, planned = compare(published(shared_data, name, num_hidden_layers=2), **WAYS[way])
    assert planned == pytest.approx(tracked.peak, rel=0.02)


NARROW_V4 = {"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "q_lora_rank": 256, "o_lora_rank": 256}
NARROW_V4 |= {"moe_intermediate_size": 512, "n_routed_experts": 4, "num_experts_per_tok": 2, "vocab_size": 1024}
NARROW_V4 |= {"index_n_heads": 16, "index_head_dim": 64, "num_hash_layers": 1, "quantization_config": None}
KINDS = {"all kinds": [0, 4, 128], "window": [0, 0], "sparse": [4, 4], "heavy": [128, 128]}
"""Layers of DeepSeek-V4 by what their attention compresses."""


@pytest.fixture
def fewer_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes four times as many queries at once, so that the tracker sees fewer operations."""
    monkeypatch.setattr(compressed_attention, "_QUERIES", 256)


def compare_v4(shared_data: Path, kinds: str, way: str, *, lengths: Sequence[int] = ()) -> None:
    layers = {"compress_ratios": KINDS[kinds], "num_hidden_layers": len(KINDS[kinds])}
    tree = published(shared_data, "deepseek-ai--DeepSeek-V4-Flash", **NARROW_V4 | layers)
    tracked, planned = compare(tree, tokens=1024, lengths=lengths, **WAYS[way])
    assert planned == pytest.approx(tracked.peak, rel=0.02)


@pytest.mark.usefixtures("fewer_operations")
@pytest.mark.parametrize("way", ["recomputed", pytest.param("selective", marks=pytest.mark.slow), "kept"])
def test_deepseek_v4(shared_data: Path, way: str) -> None:
    compare_v4(shared_data, "all kinds", way)


@pytest.mark.slow
@pytest.mark.usefixtures("fewer_operations")
@pytest.mark.parametrize("lengths", [(1024,), (37,) * 27 + (25,)], ids=["one document", "many"])
@pytest.mark.parametrize("way", ["recomputed", "selective", "kept"])
@pytest.mark.parametrize("kinds", KINDS)
def test_layers_of_deepseek_v4(shared_data: Path, kinds: str, way: str, lengths: tuple[int, ...]) -> None:
    compare_v4(shared_data, kinds, way, lengths=lengths)


FUSED = ("liger", "compile")


@pytest.mark.parametrize("way", ["recomputed", pytest.param("selective", marks=pytest.mark.slow), "kept"])
@pytest.mark.parametrize("kernels", ["liger", pytest.param("compile", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [LITE, DISTILL])
def test_fused_kernels(shared_data: Path, name: str, kernels: str, way: str) -> None:
    tracked, planned = compare(published(shared_data, name, num_hidden_layers=2), kernels=kernels, **WAYS[way])
    assert planned == pytest.approx(tracked.peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [LITE, DISTILL, QWEN])
def test_published_models(shared_data: Path, name: str, way: str) -> None:
    tracked, planned = compare(published(shared_data, name), **WAYS[way])
    assert planned == pytest.approx(tracked.peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(family: str, way: str) -> None:
    tree = wider_config(family) | {"model_type": family, "vocab_size": 1024} | WIDER.get(family, {})
    assert FAMILIES[family].parameters is not None
    tracked, planned = compare(tree, **WAYS[way])
    assert planned == pytest.approx(tracked.peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", FUSED)
@pytest.mark.parametrize("family", CONFIGS)
def test_fused_kernels_of_every_family(family: str, kernels: str, way: str) -> None:
    tree = wider_config(family) | {"model_type": family, "vocab_size": 1024} | WIDER.get(family, {})
    tracked, planned = compare(tree, kernels=kernels, **WAYS[way])
    assert planned == pytest.approx(tracked.peak, rel=0.05)


ADAPTED = {"all": [], "two": ["q_proj", "o_proj"], "experts": ["experts"], "down": ["down_proj"]}
"""Modules with adapters: nothing before the first of them has a gradient."""


def compare_adapters(shared_data: Path, name: str, targets: str, *, kernels: str, way: str) -> None:
    """Of three layers, or of two more after the dense ones of DeepSeek-V3, which has fewer experts here."""
    lora = {"rank": 16} | ({"target_modules": ADAPTED[targets]} if ADAPTED[targets] else {})
    changes: dict[str, Any] = (
        {"num_hidden_layers": 5, "n_routed_experts": 32} if name == V3 else {"num_hidden_layers": 3}
    )
    tree = published(shared_data, name, **changes)
    tree.pop("quantization_config", None)
    tracked, planned = compare(tree, lora=lora, kernels=kernels, **WAYS[way])
    assert planned == pytest.approx(tracked.peak, rel=0.02)


@pytest.mark.parametrize("kernels", ["torch", "liger"])
@pytest.mark.parametrize("name", [LITE, QWEN])
def test_adapters_of_experts(shared_data: Path, name: str, kernels: str) -> None:
    compare_adapters(shared_data, name, "experts", kernels=kernels, way="kept")


@pytest.mark.parametrize("way", ["selective", "kept"])
def test_adapters_of_dense_layers_and_shared_experts(shared_data: Path, way: str) -> None:
    """Attention is computed again while rows for routed experts have gradients, or most is held when they are added
    up.
    """
    compare_adapters(shared_data, V3, "down", kernels="liger", way=way)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["torch", *FUSED])
@pytest.mark.parametrize("way", ["recomputed", "selective", "kept"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((LITE, targets) for targets in ADAPTED),
        *((V3, targets) for targets in ("all", "experts", "down")),
        *((QWEN, targets) for targets in ("all", "two", "experts")),
        *((DISTILL, targets) for targets in ("all", "two", "down")),
    ],
)
def test_adapters(shared_data: Path, name: str, targets: str, way: str, kernels: str) -> None:
    compare_adapters(shared_data, name, targets, kernels=kernels, way=way)


STUDENT, TEACHER = (f"deepseek-ai--DeepSeek-R1-Distill-Qwen-{size}" for size in ("1.5B", "32B"))
DISTILLATION = {"name": "distill", "teacher": "a teacher"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "one teacher": DISTILLATION,
    "temperature": DISTILLATION | {"temperature": 2.0, "label_weight": 0.5},
    "dpo": {"name": "dpo"},
    "grpo": {"name": "grpo", "group_size": 2},
}


def compare_objective(
    shared_data: Path, objective: Mapping[str, Any], *, tokens: int, precision: str = "bf16"
) -> tuple[Tracked, MemoryEstimate]:
    """One layer of a student, beside two of a teacher of three times its width."""
    student = published(shared_data, STUDENT, num_hidden_layers=1, vocab_size=32768)
    teacher = None
    if objective["name"] == "distill":
        teacher = published(shared_data, TEACHER, num_hidden_layers=2, vocab_size=32768)
    planned = estimate(student, 2, tokens, objective=objective, teacher=teacher, precision=precision)
    documents = [(tokens // 4, tokens - tokens // 4)] * 2
    section = read_objective(dict(objective))
    return track(student, documents, objective=section, teacher=teacher, precision=precision), planned


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_objectives_with_another_model(shared_data: Path, objective: Mapping[str, Any]) -> None:
    tracked, planned = compare_objective(shared_data, objective, tokens=2048)
    until_loss = max(bytes_at(planned, moment) for moment in ("teacher", *FORWARD))
    assert until_loss == pytest.approx(tracked.head, rel=0.02)
    assert max(bytes_at(planned, moment) for moment in MOMENTS) == pytest.approx(tracked.peak, rel=0.02)


def test_the_forward_of_a_wide_teacher_is_the_fullest_moment(shared_data: Path) -> None:
    tracked, planned = compare_objective(shared_data, DISTILLATION, tokens=16384)
    assert planned.moment == "teacher"
    assert bytes_at(planned, "teacher") == pytest.approx(tracked.peak, rel=0.02)
