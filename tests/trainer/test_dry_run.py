"""Layouts for machines that are not here: shapes, ranks and refusals from config.json alone."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ds_finetune.cli.main import main
from ds_finetune.config.schema import RunConfig
from ds_finetune.plan.estimate.memory import RunMemory
from ds_finetune.plan.estimate.traced import without_activations
from ds_finetune.plan.layer_stages import rank_weights
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.resolve import make_model_plan


@pytest.fixture(scope="module")
def deepseek_v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of DeepSeek-V3, which is transformers' default."""
    folder = tmp_path_factory.mktemp("v3")
    AutoConfig.for_model("deepseek_v3", architectures=["DeepseekV3ForCausalLM"]).save_pretrained(folder)
    return folder


def _config(model: Path, parallel: dict[str, int], stage: int) -> RunConfig:
    tree: dict[str, Any] = {"model": str(model), "data": {"train": "t.jsonl"}, "parallel": parallel, "output_dir": "o"}
    tree |= {
        "deepspeed": {"zero_optimization": {"stage": stage}},
        "train": {"for": "1 steps", "global_batch_size": 256, "micro_batch_size": 1},
    }
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("parallel", "stage", "on_a_rank"),
    [
        ({}, 3, 671_026_404_352),
        ({"tp": 8}, 3, None),
        ({"ep": 32}, 3, 671_026_404_352 - 58 * 256 * 3 * 7168 * 2048 * 31 // 32),
        ({"tp": 4, "ep": 8}, 1, None),
        ({"pp": 16, "ep": 8}, 1, None),
    ],
)
def test_every_parameter_of_deepseek_v3_is_somewhere(
    deepseek_v3: Path, parallel: dict[str, int], stage: int, on_a_rank: int | None
) -> None:
    config = _config(deepseek_v3, parallel, stage)
    plan = make_plan(RunSettings.of(config), world=World(0, 256, 0, 8, "test"), device="cuda")
    model = make_model_plan(RunSettings.of(config, mesh=plan.mesh))
    stages = [stage.kinds for stage in rank_weights(model.described, plan.parallel, zero_ranks=plan.zero_ranks)]
    kinds = [kind for stage in stages for kind in stage]
    assert sum(kind.count * math.prod(kind.full_shape) for kind in kinds) == 671_026_404_352
    everywhere = sum(kind.numel * plan.mesh.world_size / len(stages) / kind.sharers for kind in kinds)
    largest, smallest = (choose(sum(kind.numel for kind in stage) for stage in stages) for choose in (max, min))
    assert largest < 1.35 * smallest
    cut = sum(
        kind.count * math.prod(kind.full_shape) for kind in kinds if math.prod(kind.full_shape) != math.prod(kind.local)
    )
    assert everywhere >= 671_026_404_352
    assert cut > 0 or not parallel
    if on_a_rank is not None:
        assert sum(kind.numel for kind in kinds) == on_a_rank
    assert model.described.tensors.numel == 671_026_404_352
    estimate = RunMemory(plan, model.described, without_activations(model.described)).estimate()
    size = {row.name: row.num_bytes for row in estimate.rows}
    share = max(sum(kind.sharded for kind in each) for each in stages)
    assert size["fp32 weights"] + size["moments"] == 12 * share
    assert (size["weights"] == 2 * sum(kind.numel for kind in stages[estimate.stage])) == (stage < 3)


def test_the_command_shows_ranks_shapes_and_deepspeed(
    deepseek_v3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        f"model: {deepseek_v3}\ndata: {{train: t.jsonl}}\ndeepspeed: {{zero_optimization: {{stage: 3}}}}\nparallel: {{ep: 32}}\n"
        "train: {for: 1 steps, global_batch_size: 256, micro_batch_size: 1}\noutput_dir: o\n"
    )
    assert main(["plan", str(run_file), "--gpus", "256", "--tensors"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "dp 256 x ep 32, ZeRO-3",
        "671.026 B, 37.552 B on a rank",
        "8 x 4096 x 7168",
        "a group along experts spans 4 nodes",
        '"train_batch_size": 256',
    ):
        assert text in shown.replace("\n", " ") or text in shown, text
    assert main(["plan", str(run_file), "parallel.ep=3", "--gpus", "256", "--dry-run"]) == 2
    assert main(["plan", str(run_file), "parallel.tp=3", "--gpus", "240", "--dry-run"]) == 2
    assert main(["plan", str(run_file), "--gpus", "12", "--dry-run"]) == 2


def test_with_lora_adapters_alone_have_gradients_and_moments(deepseek_v3: Path) -> None:
    config = RunConfig.model_validate(_config(deepseek_v3, {}, 3).model_dump(by_alias=True) | {"lora": {"rank": 16}})
    plan = make_plan(RunSettings.of(config), world=World(0, 256, 0, 8, "test"), device="cuda")
    model = make_model_plan(RunSettings.of(config, mesh=plan.mesh))
    assert model.lora is not None
    adapters = model.lora.num_params
    # Of 61 layers 58 have 256 experts with weights [4096, 7168] and [7168, 2048].
    assert adapters > 58 * 256 * 16 * (4096 + 7168 + 7168 + 2048)
    traces = without_activations(model.described)
    size = {row.name: row.num_bytes for row in RunMemory(plan, model.described, traces).estimate().rows}
    whole = RunMemory(replace(plan, lora=None), model.described, traces).estimate()
    (weights,) = (row.num_bytes for row in whole.rows if row.name == "weights")
    assert size["gradients of this rank's part"] == 2 * -(-adapters // 256)
    assert size["fp32 weights"] + size["moments"] == 12 * -(-adapters // 256)
    assert size["weights"] == weights + 2 * -(-adapters // 256)
