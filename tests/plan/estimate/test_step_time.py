"""The roofline of a step: parts by hand, and what must grow or shrink with what."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.estimate.accelerators import Machine, accelerator, machine_of
from ds_finetune.plan.estimate.operations import RowShape
from ds_finetune.plan.estimate.step_time import TimeEstimate, estimate_time, group_rate
from ds_finetune.plan.estimate.traffic import Group
from ds_finetune.plan.model_shape import Shape
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.model.tiny import CONFIGS

H100 = machine_of(accelerator("h100-80g"))
DENSE = CONFIGS["qwen3"] | {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
SPARSE = CONFIGS["deepseek_v3"] | {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "moe_intermediate_size": 1408,
    "intermediate_size": 10944,
    "num_hidden_layers": 8,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
}
SEQ = 4096


def estimate(
    model: dict[str, Any] = DENSE,
    *,
    ranks: int = 1,
    stage: int = 1,
    machine: Machine = H100,
    rows: RowShape | None = None,
    zero: dict[str, Any] | None = None,
    **sections: Any,
) -> TimeEstimate:
    train = {"for": "100 steps", "global_batch_size": 64, "max_seq_len": SEQ, "activation_checkpointing": "none"}
    tree = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", **sections}
    tree |= {"train": train | sections.get("train", {})}
    tree |= {"deepspeed": {"zero_optimization": {"stage": stage, **(zero or {})}}}
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=World(0, ranks, 0, min(ranks, 8), "a test"), device="cuda")
    return estimate_time(plan, model, machine=machine, rows=rows or RowShape.full(SEQ))


def test_products_take_their_flops_over_what_the_peak_gives() -> None:
    found, tokens = estimate(), 64 * SEQ
    mlp = 3 * DENSE["hidden_size"] * DENSE["intermediate_size"] * DENSE["num_hidden_layers"]
    assert found.parts["dense MLPs"] == pytest.approx(6 * mlp * tokens / (0.8 * 989e12))
    pairs = 64 * SEQ**2 / 2
    attention = 2 * DENSE["num_hidden_layers"] * 2 * 32 * 128 * pairs * 3.5
    assert found.parts["attention"] == pytest.approx(attention / (0.55 * 989e12))
    assert found.seconds == sum(found.parts.values())
    assert found.tokens_per_second == pytest.approx(tokens / found.seconds)
    flops = Shape.of(DENSE).flops_per_token(SEQ)
    assert found.mfu == pytest.approx(found.tokens_per_second * flops / 989e12)
    assert 0.4 < found.mfu < 0.8


def test_frozen_weights_count_four_flops() -> None:
    frozen = estimate(lora={"rank": 8})
    products = Shape.of(DENSE).flops_per_token(0)
    attention = Shape.of(DENSE).flops_per_token(SEQ) - products
    assert frozen.mfu == pytest.approx(frozen.tokens_per_second * (products * 2 / 3 + attention) / 989e12)
    assert 0.4 < frozen.mfu < 0.8


@pytest.mark.parametrize(("precision", "peak"), [("bf16", 989e12), ("fp32", 67e12)])
def test_peaks_are_those_of_the_precision(precision: str, peak: float) -> None:
    found = estimate(train={"precision": precision})
    assert found.mfu * peak == pytest.approx(found.tokens_per_second * Shape.of(DENSE).flops_per_token(SEQ))


def test_few_tokens_take_the_time_of_reading_the_weights() -> None:
    found = estimate(rows=RowShape.full(16))
    mlp = 3 * DENSE["hidden_size"] * DENSE["intermediate_size"] * DENSE["num_hidden_layers"]
    assert found.parts["dense MLPs"] > 64 * 3 * 2 * mlp / (0.85 * 3350e9)


def test_recomputation_and_launches_are_parts() -> None:
    plain, again = estimate(), estimate(train={"activation_checkpointing": "full"})
    assert "recomputation" not in plain.parts
    assert again.parts["recomputation"] == pytest.approx(again.seconds - plain.seconds, rel=1e-6)
    # Kernels of a tiny model are shorter than the time that the host needs to start them.
    tiny = estimate(CONFIGS["llama"] | {"model_type": "llama"}, rows=RowShape.full(64))
    assert tiny.parts["kernel launches"] > tiny.seconds / 2


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2)])
def test_the_bubble_is_that_of_the_schedule(pp: int, vpp: int) -> None:
    # Without supervised tokens all stages take as long, but for what stages in the middle send to both sides.
    rows = RowShape.full(SEQ, supervised_share=0)
    found = estimate(
        ranks=pp,
        parallel={"pp": pp, "vpp": vpp, "pp_layers": [8 // pp // vpp] * pp * vpp},
        train={"micro_batch_size": 4},
        rows=rows,
    )
    others = {"gradients", "updated weights", "gradients in memory", "optimizer", "pipeline bubble"}
    computed = sum(seconds for name, seconds in found.parts.items() if name not in others)
    assert found.parts["pipeline bubble"] == pytest.approx(computed * (pp - 1) / (16 * vpp), rel=0.03)


def test_stages_wait_for_the_slowest_one() -> None:
    equal, head = (
        estimate(ranks=2, parallel={"pp": 2, "pp_layers": [4, 4]}, rows=RowShape.full(SEQ, supervised_share=share))
        for share in (0, 1)
    )
    # The first stage is as fast as before; the last one, which has the head, takes longer in each micro-batch.
    assert head.parts["pipeline bubble"] == pytest.approx(equal.parts["pipeline bubble"], rel=0.03)
    longer = head.parts["head and loss"] - equal.parts["head and loss"]
    assert head.seconds - equal.seconds == pytest.approx(longer, rel=0.03)


def test_rings_share_the_cards_of_a_node() -> None:
    share = H100.efficiency.link
    assert group_rate(H100, Group(8, 1), "all_reduce") == share * 450e9
    # 16 GPUs on two nodes: a ring leaves each node through all eight cards, here no slower than NVLink gives.
    assert group_rate(H100, Group(16, 1), "all_reduce") == share * 400e9
    # One GPU of each node: its own card alone.
    assert group_rate(H100, Group(2, 8), "all_reduce") == share * 50e9
    # Of an exchange with 15 others, 8 are on the other node.
    assert group_rate(H100, Group(16, 1), "all_to_all") == pytest.approx(share * 50e9 * 15 / 8)
    assert group_rate(H100, Group(4, 8), "send_recv") == share * 50e9


def test_a_slower_network_takes_longer() -> None:
    slow = replace(H100, accelerator=replace(H100.accelerator, inter_node_bytes_per_s=1e9))
    for sections in ({"stage": 3}, {"stage": 2}, {"stage": 1, "parallel": {"pp": 4}}, {"parallel": {"tp": 2}}):
        assert estimate(ranks=16, machine=slow, **sections).seconds > estimate(ranks=16, **sections).seconds


def test_what_grows_and_what_shrinks() -> None:
    base = estimate(ranks=8)
    assert estimate(ranks=16).seconds < base.seconds
    assert estimate(ranks=8, rows=RowShape.full(SEQ, supervised_share=0.5)).seconds < base.seconds
    assert estimate(ranks=8, rows=RowShape(SEQ, SEQ, (512,) * 8)).seconds < base.seconds
    assert estimate(ranks=8, stage=2, zero={"offload_optimizer": {"device": "cpu"}}).seconds > base.seconds
    assert estimate(ranks=8, lora={"rank": 8}).seconds < base.seconds
    assert estimate(DENSE | {"num_hidden_layers": 9}, ranks=8).seconds > base.seconds
    assert estimate(ranks=8, machine=machine_of(accelerator("a100-80g"))).seconds > 2 * base.seconds
    # Gradients are summed in each forward from ZeRO-2 on, unless the run file says otherwise.
    often = estimate(ranks=8, stage=2, zero={"overlap_comm": False})
    once = estimate(ranks=8, stage=2, zero={"overlap_comm": False}, train={"reduction_every": "step"})
    assert often.parts["gradients"] == pytest.approx(8 * once.parts["gradients"])


def test_experts_of_other_ranks_cost_exchanges() -> None:
    found = estimate(SPARSE, ranks=8, parallel={"ep": 8})
    assert found.parts["rows over ep"] > 0
    assert found.parts["routed experts"] > found.parts["shared experts"] > 0
    assert any("divided evenly over routed experts" in text for text in found.assumptions)


def test_rows_to_experts_are_hidden_beside_shared_experts_alone() -> None:
    slow = replace(H100, accelerator=replace(H100.accelerator, intra_node_bytes_per_s=40e9))
    found = estimate(SPARSE, ranks=8, machine=slow, parallel={"ep": 8})
    without = replace(slow, efficiency=replace(slow.efficiency, hidden=0.0))
    whole = estimate(SPARSE, ranks=8, machine=without, parallel={"ep": 8})
    # One way of the exchange waits for nothing but them, and the other for nothing.
    hidden = whole.parts["rows over ep"] - found.parts["rows over ep"]
    assert hidden == pytest.approx(
        min(0.8 * found.parts["shared experts"], 0.4 * whole.parts["rows over ep"]), rel=0.02
    )
    assert found.parts["rows over ep"] > whole.parts["rows over ep"] / 2


def test_references_and_teachers_add_a_forward(tmp_path: Path) -> None:
    plain, again = (
        estimate(lora={"rank": 8}, objective={"name": "dpo", "reference": reference})
        for reference in ("cache", "adapters_off")
    )
    assert again.parts["dense MLPs"] == pytest.approx(plain.parts["dense MLPs"] * 3 / 2)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    taught = estimate(objective={"name": "distill", "teacher": str(tmp_path)})
    # Forward and backward are three times a forward, and attention's backward is more than two of its forwards.
    model = taught.seconds - taught.parts["teacher"]
    products = sum(taught.parts[name] for name in ("dense MLPs", "attention projections", "head and loss"))
    assert products / 3 < taught.parts["teacher"] < model / 3
    absent = estimate(objective={"name": "distill", "teacher": "elsewhere"})
    assert any("elsewhere is no folder" in text for text in absent.assumptions)


@pytest.mark.parametrize(("duration", "steps"), [("30 steps", 30), ("1000000 tokens", 4), ("2 epochs", None)])
def test_hours_where_the_steps_are_known(duration: str, steps: int | None) -> None:
    found = estimate(ranks=8, train={"for": duration})
    assert found.steps == steps
    if steps is None:
        assert found.hours is None
        assert found.gpu_hours is None
    else:
        assert found.gpu_hours == pytest.approx(8 * steps * found.seconds / 3600)
    assert found.gpu_hours_per_billion_tokens == pytest.approx(8 * 1e9 / found.tokens_per_second / 3600)


def test_bf16_is_refused_where_there_is_none() -> None:
    with pytest.raises(ConfigError, match="bf16 on v100-32g"):
        estimate(machine=machine_of(accelerator("v100-32g")))
