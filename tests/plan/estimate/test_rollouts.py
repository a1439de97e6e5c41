"""The memory that the sampling of answers takes, against what torch's allocator gives a batch, and by hand."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ds_finetune.config.schema import RunConfig
from ds_finetune.engine.sampling.answer_model import AnswerModel
from ds_finetune.engine.sampling.answers import PromptToSample, SamplingLimits
from ds_finetune.engine.sampling.sampler import PromptPart, TokenChoice, sample_parts
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.attention.by_document import BY_DOCUMENT
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.weights.load import initialise_weights
from ds_finetune.plan.estimate.memory import MemoryEstimate, RunMemory
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.search.fitting import Budget
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.described import described_tree
from tests.model.tiny import CONFIGS
from tests.plan.estimate.allocated_cells import LLAMA
from tests.plan.estimate.allocation_worker import peaks
from tests.planning import traces_of

LATENT: Mapping[str, Any] = CONFIGS["deepseek_v3"] | {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 6,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
PROMPT, NEW, GROUP = 32, 96, 8
GRPO: Mapping[str, Any] = {"name": "grpo", "group_size": GROUP}
CPU = torch.device("cpu")


def planned(
    *,
    ranks: int = 1,
    device: str = "cpu",
    stage: int = 0,
    rollout: Mapping[str, Any] | None = None,
    precision: str = "fp32",
    **sections: Any,
) -> Plan:
    rows = {"prompts_per_step": 2 * ranks, "max_new_tokens": NEW, **(rollout or {})}
    tree = {"model": "m", "data": {"train": "t.jsonl", "packing": True}, "output_dir": "o", "rewards": ["number"]}
    tree |= {"objective": GRPO, "rollout": rows, **sections}
    tree |= {"deepspeed": {"zero_optimization": {"stage": stage}}}
    tree["train"] = {"max_seq_len": PROMPT + NEW, "precision": precision, "activation_checkpointing": "none"}
    world = World(0, ranks, 0, ranks, "a test")
    return make_plan(RunSettings.of(RunConfig.model_validate(tree)), world=world, device=device)


def sizes(estimate: MemoryEstimate) -> dict[str, int]:
    """Bytes of the rows that are held only while answers are sampled."""
    return {row.name: row.num_bytes for row in estimate.rows if row.when == ("rollout",)}


def measured(tree: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Bytes that a batch of two groups takes at most beside the weights."""
    lm = build_skeleton(AutoConfig.for_model(**tree), attention=BY_DOCUMENT, dtype=dtype, device="cpu").eval()
    initialise_weights(lm, seed=0)
    limits = SamplingLimits(NEW, ())
    prompts = [PromptToSample(number, list(range(3, 3 + PROMPT)), 0) for number in range(2)]
    parts = [PromptPart(prompt, range(GROUP), GROUP * place) for place, prompt in enumerate(prompts)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        began = time.time_ns()
        sample_parts(AnswerModel(lm, CPU), parts, TokenChoice(limits, 0, CPU))
        ended = time.time_ns()
    assert profiler.profiler is not None
    return peaks(profiler.profiler.kineto_results.experimental_event_tree(), began, ended)["steps"]


CELLS = {
    "keys and values": (LLAMA, "fp32"),
    "16 bits": (LLAMA, "bf16"),
    "latents": (LATENT, "fp32"),
    "logits": (LLAMA | {"num_hidden_layers": 1, "vocab_size": 32768, "hidden_size": 96}, "fp32"),
}


@pytest.mark.parametrize(("tree", "precision"), CELLS.values(), ids=CELLS)
def test_memory_is_what_a_batch_takes(tree: Mapping[str, Any], precision: str) -> None:
    rows = sizes(
        RunMemory(
            planned(precision=precision, rollout={"batch_rows": 2 * GROUP}), described_tree(tree), traces_of(tree)
        ).estimate()
    )
    wanted = measured(tree, torch.float32 if precision == "fp32" else torch.bfloat16)
    assert sum(rows.values()) == pytest.approx(wanted, rel=0.1)


QWEN = LLAMA | {"model_type": "qwen3", "head_dim": 64, "num_key_value_heads": 2}
CACHED = {"llama": (LLAMA, 4 * 2 * 6 * 64), "qwen3": (QWEN, 4 * 2 * 2 * 64), "latents": (LATENT, 6 * (256 + 64))}


@pytest.mark.parametrize(("tree", "numbers"), CACHED.values(), ids=CACHED)
def test_a_cache_has_what_a_kind_of_layer_keeps(tree: Mapping[str, Any], numbers: int) -> None:
    rows = sizes(
        RunMemory(
            planned(precision="bf16", rollout={"batch_rows": GROUP}), described_tree(tree), traces_of(tree)
        ).estimate()
    )
    assert rows["keys and values of answers"] == 2 * GROUP * (PROMPT + NEW) * numbers


def test_tensor_parallel_ranks_have_a_part_of_the_heads() -> None:
    whole, half = (
        sizes(
            RunMemory(
                planned(rollout={"batch_rows": GROUP}, ranks=tp, parallel={"tp": tp}),
                described_tree(QWEN),
                traces_of(QWEN),
            ).estimate()
        )
        for tp in (1, 2)
    )
    assert whole["keys and values of answers"] == 2 * half["keys and values of answers"]


@pytest.mark.parametrize("stage", [0, 3])
def test_as_many_rows_as_memory_has_room_for(stage: int) -> None:
    plan, gib = planned(ranks=2, device="cuda", stage=stage, rollout={"prompts_per_step": 256}), 2**30
    found = [
        RunMemory(plan, described_tree(LLAMA), traces_of(LLAMA), budget=budget).estimate()
        for budget in (None, 4 * gib, 5 * gib, 80 * gib)
    ]
    caches = [sizes(each)["keys and values of answers"] for each in found]
    assert caches[1:] == sorted(caches[1:])
    answers = [cache // (2 * 4 * (PROMPT + NEW) * 4 * 6 * 64) for cache in caches]
    # The batches of 128 groups are as large as each other, and have at most 256 rows.
    assert answers[-1] == 256
    assert not any(answer % GROUP for answer in answers)
    for each, budget in zip(found[1:], (4, 5, 80), strict=True):
        assert not Budget(budget * gib, 80 * gib).excess(each)
    # Without a device nothing beyond what the steps need is taken.
    assert found[0].moment != "rollout"


def test_weights_are_whole_where_they_fit() -> None:
    wide = LLAMA | {"num_hidden_layers": 24, "hidden_size": 1536, "intermediate_size": 4096}
    plan = planned(ranks=2, device="cuda", stage=3, precision="bf16", rollout={"batch_rows": 1})
    large, small = (
        sizes(RunMemory(plan, described_tree(wide), traces_of(wide), budget=budget * 2**20).estimate())
        for budget in (80_000, 8_000)
    )
    assert large["whole weights, rollout"] > 2**29
    assert "whole weights, rollout" not in small
    assert small["gathered weights, rollout"] > 0
    assert not {
        name
        for name in sizes(RunMemory(planned(), described_tree(wide), traces_of(wide)).estimate())
        if "weights" in name
    }


def test_weights_of_the_start_are_kept_on_the_host() -> None:
    kept = planned(device="cuda", precision="bf16", stage=2, objective=GRPO | {"reference": "start"})
    rows = {row.name: row for row in RunMemory(kept, described_tree(LLAMA), traces_of(LLAMA)).estimate().rows}
    lm = build_skeleton(AutoConfig.for_model(**LLAMA), attention=BY_DOCUMENT, dtype=torch.float32, device="cpu")
    host, used = rows["weights of the start"], rows["weights of the start, in use"]
    assert (host.place, used.place, used.when) == ("host", "gpu", ("rollout",))
    assert host.num_bytes == used.num_bytes == 2 * lm.num_parameters()
    cut = planned(ranks=2, device="cuda", precision="bf16", stage=3, objective=GRPO | {"reference": "start"})
    rows = {row.name: row for row in RunMemory(cut, described_tree(LLAMA), traces_of(LLAMA)).estimate().rows}
    assert rows["weights of the start"].num_bytes == lm.num_parameters()
