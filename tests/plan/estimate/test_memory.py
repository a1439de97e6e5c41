"""The memory of a rank by arithmetic."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel
from ds_finetune.plan.layer_stages import rank_weights
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.plan import Plan, make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from tests.described import described_tree
from tests.planning import few_bytes, traces_of

Tree = dict[str, Any]


def published(shared_data: Path, name: str) -> DescribedModel:
    return described_tree(json.loads((shared_data / "configs" / name / "config.json").read_text()))


def test_states_of_deepseek_v3_over_512_ranks(shared_data: Path) -> None:
    tree = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "parallel": {"ep": 32}}
    tree |= {"deepspeed": {"zero_optimization": {"stage": 3}}, "train": {"global_batch_size": 512}}
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=World(0, 512, 0, 8, "a test"), device="cuda")
    estimate = RunMemory(plan, model := published(shared_data, "deepseek-ai--DeepSeek-V3"), few_bytes(model)).estimate()
    sizes = {row.name: row.num_bytes for row in estimate.rows}
    assert sizes["fp32 weights"] == pytest.approx(4 * 671_026_404_352 / 512, rel=1e-3)
    assert sizes["moments"] == 2 * sizes["fp32 weights"]


def test_no_torch_is_imported() -> None:
    code = "import sys, ds_finetune.plan.estimate.memory; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@dataclass(frozen=True)
class _Numbered(TracedLayer):
    number: int


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("recomputes", [True, False])
def test_the_first_of_equal_stages_needs_most(vpp: int, recomputes: bool, shared_data: Path) -> None:
    tree = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "parallel": {"pp": 8, "vpp": vpp}}
    tree |= {"deepspeed": {"zero_optimization": {"stage": 1}}}
    tree |= {"train": {"global_batch_size": 16, "activation_checkpointing": "full" if recomputes else "none"}}
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=World(0, 8, 0, 8, "a test"), device="cuda")
    model = published(shared_data, "deepseek-ai--DeepSeek-R1-Distill-Qwen-7B")
    numbers = count()

    def different(plan: Plan) -> TracedModel:
        """The same activations, with a number by which no layer is equal to another."""
        found = few_bytes(model)(plan)
        return replace(found, layers=tuple(_Numbered(**vars(layer), number=next(numbers)) for layer in found.layers))

    kinds = list(RunMemory(plan, model, few_bytes(model)).stages())
    every = list(RunMemory(plan, model, different).stages())
    assert len(kinds) < len(every) == 8
    for fullest in (lambda each: each.device_bytes, lambda each: each.host_bytes):
        assert max(map(fullest, kinds)) == max(map(fullest, every))


def test_hierarchical_partitions_hold_second_weights(shared_data: Path) -> None:
    tree: dict[str, Any] = {
        "model": "m",
        "data": {"train": "t.jsonl"},
        "output_dir": "o",
        "inexact": "hierarchical_partition",
    }
    tree |= {"deepspeed": {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}}
    tree |= {"train": {"global_batch_size": 8, "precision": "bf16"}, "checkpoint": {"every": "never"}}
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=World(0, 4, 0, 4, "a test"), device="cuda")
    model = published(shared_data, "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B")
    (row,) = (row for row in RunMemory(plan, model, few_bytes(model)).estimate().rows if row.name == "second weights")
    (weights,) = rank_weights(model, plan.parallel, zero_ranks=plan.zero_ranks)
    assert (row.num_bytes, row.place) == (2 * weights.numel // 2, "gpu")


def test_nvme_needs_buffers_on_the_host(shared_data: Path) -> None:
    """8.19 B weights on 8 ranks: DeepSpeed pins four fp32 buffers of a sub-group, at most 10^9 elements each."""
    nvme = {"device": "nvme", "nvme_path": "/nvme"}
    zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme | {"buffer_count": 2, "max_in_cpu": 1e8}}
    tree: Tree = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o"}
    tree |= {"deepspeed": {"zero_optimization": zero}, "train": {"global_batch_size": 8, "precision": "bf16"}}
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=World(0, 8, 0, 8, "a test"), device="cuda")
    rows = RunMemory(plan, model := published(shared_data, "Qwen--Qwen3-8B"), few_bytes(model)).estimate().rows
    sizes = {row.name: row.num_bytes for row in rows if row.place == "host"}
    assert sizes["buffers between optimizer and NVMe"] == 4 * 4 * 10**9
    assert sizes["buffers between weights and NVMe"] == 2 * 2 * 10**8
    assert sizes["weights of NVMe that stay on the host"] == 2 * 10**8


def planned(shared_data: Path, *, ranks: int = 16, stage: int = 2, parallel: Tree | None = None, **train: Any) -> int:
    """Bytes on the device of a rank that trains DeepSeek-V2-Lite, without communicators, of which axes need more."""
    model = {"path": "m", "kernels": "torch"}
    tree: Tree = {"model": model, "data": {"train": "t.jsonl"}, "output_dir": "o", "parallel": parallel or {}}
    tree |= {"deepspeed": {"zero_optimization": {"stage": stage}}, "train": {"global_batch_size": 64, **train}}
    config = RunConfig.model_validate(tree)
    plan = make_plan(RunSettings.of(config), world=World(0, ranks, 0, 8, "a test"), device="cuda")
    lite = published(shared_data, "deepseek-ai--DeepSeek-V2-Lite")
    estimate = RunMemory(plan, lite, traces_of(lite)).estimate()
    return estimate.device_bytes - sum(row.num_bytes for row in estimate.rows if row.name == "communicators")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_rows_and_longer_ones_need_more(shared_data: Path, stage: int) -> None:
    by_rows = [planned(shared_data, stage=stage, micro_batch_size=rows) for rows in (1, 2, 4)]
    by_length = [planned(shared_data, stage=stage, max_seq_len=tokens) for tokens in (1024, 2048, 8192, 32768)]
    kept = [planned(shared_data, stage=stage, activation_checkpointing=each) for each in ("full", "selective", "none")]
    for needs in (by_rows, by_length, kept):
        assert needs == sorted(needs)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_need_less(shared_data: Path, stage: int) -> None:
    layouts: list[tuple[int, Tree]] = [(8, {}), (16, {}), (64, {})]
    needs = [planned(shared_data, stage=stage, ranks=ranks, parallel=sizes) for ranks, sizes in layouts]
    assert needs == sorted(needs, reverse=True)
    # With tp a rank has more of what is not cut, of which ZeRO-3 would have given it less.
    for axis in ("tp", "ep") if stage < 3 else ("ep",):
        split = [planned(shared_data, stage=stage, parallel={axis: size}) for size in (1, 2, 4)]
        assert split == sorted(split, reverse=True), axis


def test_zero_stages_need_less(shared_data: Path) -> None:
    needs = [planned(shared_data, stage=stage) for stage in (1, 2)]
    assert needs == sorted(needs, reverse=True)


@pytest.mark.parametrize(
    ("ranks", "device", "parallel", "gib"),
    [
        (8, "cuda", {}, 2 * 0.5),
        (16, "cuda", {"ep": 16}, 4 * 0.5 + 7 * 4 / 9),
        (8, "cuda", {"tp": 2}, 3 * 0.5),
        # Chunks of stages have four groups for what goes between them.
        (8, "cuda", {"pp": 2, "vpp": 2}, 7 * 0.5),
        (1, "cuda", {}, 0),
        (2, "cpu", {}, 0),
    ],
)
def test_communicators_take_memory_besides_torchs(
    shared_data: Path, ranks: int, device: str, parallel: Tree, gib: float
) -> None:
    tree: Tree = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "parallel": parallel}
    tree |= {"deepspeed": {"zero_optimization": {"stage": 1}}}
    config = RunConfig.model_validate(tree | {"train": {"global_batch_size": 16}})
    plan = make_plan(RunSettings.of(config), world=World(0, ranks, 0, min(ranks, 8), "a test"), device=device)
    rows = (
        RunMemory(plan, model := published(shared_data, "deepseek-ai--DeepSeek-V2-Lite"), few_bytes(model))
        .estimate()
        .rows
    )
    found = sum(row.num_bytes for row in rows if row.name == "communicators")
    assert found / 2**30 == pytest.approx(gib)
