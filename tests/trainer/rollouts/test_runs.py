"""Whole runs with rewards: they learn, resume at each step, and are the same on one rank and on two."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from ds_finetune.runs.folder import RunFolder
from tests.model.tiny import CONFIGS
from tests.running import start, torchrun
from tests.sums_task import greedy_share, sums_task

LEARNING = {
    "objective": {"group_size": 8, "advantage": "mean_std"},
    "rollout": {"prompts_per_step": 32},
    "data": {"packing": False},
    "train": {"for": "100 steps", "micro_batch_size": 64},
    "optim": {"lr": 6e-4, "lr_scheduler": "constant", "warmup": "5 steps"},
    "checkpoint": {"every": "never"},
}
TIMES = ("_seconds", "_per_second", "memory/", "comm/", "straggler")


def run(run_file: Path, *overrides: str, ranks: int = 0) -> str:
    """Train, and return what was printed."""
    words = [str(run_file), *overrides]
    done = start(torchrun("ds_finetune/train.py", *words, ranks=ranks) if ranks else ["ds-finetune", "train", *words])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def records(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The records of a file of the run."""
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def results(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bytes]:
    """The metrics of each step but times and sizes, the answers that were sampled, and the trained weights."""
    weights = (folder / "run" / "export" / "model.safetensors").read_bytes()
    return numbers(folder), records(folder, "rollouts.jsonl"), weights


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step but times and sizes."""
    return [
        {name: value for name, value in record.items() if not any(part in name for part in TIMES)}
        for record in records(folder)
    ]


def test_rewards_only_teach_what_supervised_training_left_open(tmp_path: Path) -> None:
    run_file = sums_task(tmp_path, **LEARNING)
    before = greedy_share(LlamaForCausalLM.from_pretrained(tmp_path / "model"))
    printed = run(run_file)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "run" / "export")
    assert sum(param.numel() for param in model.parameters()) < 100_000
    assert 0.4 < before < 0.75
    # At least half of what was open: how much more depends on roundings.
    assert 1 - greedy_share(model) < (1 - before) / 2
    found = records(tmp_path)
    rewards = [record["rollout/reward"] for record in found]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.3
    assert max(abs(record["train/loss"]) for record in found) < 0.1
    assert max(record["train/mismatch"] for record in found) < 1e-5
    assert "the loss is close to 0 from the beginning" in printed
    assert printed.count("ROLLOUTS of steps ") == 10


def test_a_constant_reward_prints_its_cause(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("def reward(record, text):\n    return 0.5\n")
    printed = run(sums_task(tmp_path, rewards=[f"{tmp_path}/half.py:reward"]))
    assert "0% all right, 0% all wrong, 100% between, 100% with equal rewards" in printed
    assert "have equal rewards, from which nothing is learned: use a reward that scores them differently" in printed
    assert all(record["train/grad_norm"] == 0 for record in records(tmp_path))
    rollouts = RunFolder(tmp_path / "run").records("rollouts.jsonl")
    answers = [(rollout["step"], answer) for rollout in rollouts for answer in rollout["answers"]]
    assert [step for step, _ in answers] == [1] * 8 + [2] * 8 + [3] * 8
    assert all((answer["reward"], answer["advantage"]) == (0.5, 0.0) for _, answer in answers)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Sampled answers and their rewards" in page
    assert "reward 0.5 (reward 0.5), advantage 0.0, " in page


@pytest.mark.parametrize(
    ("objective", "rollout"),
    [
        ({}, {"steps_per_rollout": 3}),
        ({"no_spread": "resample"}, {"steps_per_rollout": 3}),
        ({"mismatch": "token"}, {"steps_per_rollout": 3, "ahead": 1}),
        pytest.param({"mismatch": "geometric"}, {"ahead": 1}, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_at_each_step_bit_by_bit(
    tmp_path: Path, objective: dict[str, Any], rollout: dict[str, Any]
) -> None:
    """Also between the steps of a rollout, whose answers are read from its file, and with a rollout ahead of them."""
    whole = tmp_path / "whole"
    whole.mkdir()
    sections = {"train": {"for": "5 steps"}, "rollout": rollout, "objective": objective}
    run_file = sums_task(whole, **sections, checkpoint={"every": "1 steps", "keep": 9})
    rows = (whole / "train.jsonl").read_text().splitlines(keepends=True)
    # An epoch has seven prompts, so that the run resumes in later ones, too.
    (whole / "train.jsonl").write_text("".join(rows[14::12]))
    run(run_file)
    every = results(whole)
    expected = every[0]
    steps = rollout.get("steps_per_rollout", 1)
    assert [("rollout/reward" in record) for record in expected] == [step % steps == 0 for step in range(5)]
    assert (expected[1]["train/approx_kl"] > 0) == (steps > 1)
    assert expected[0]["train/approx_kl"] == 0
    assert [record.get("rollout/behind") for record in expected[::steps]] == (
        [0.0, *[float(steps)] * (4 // steps)] if "ahead" in rollout else [None] * (4 // steps + 1)
    )
    if "no_spread" not in objective:
        drawn = [record["rollout/prompts_drawn"] for record in expected[::steps]]
        assert drawn == [4 * min(first + steps, 5) for first in range(0, 5, steps)]
    if "ahead" in rollout:
        assert expected[0]["train/mismatch"] < 1e-5 < expected[steps]["train/mismatch"]
    for step in (1, 2, 3, 4):
        resumed = whole / "run"
        kept = tmp_path / f"kept-{step}"
        shutil.copytree(resumed, kept)
        for later in range(step + 1, 6):
            shutil.rmtree(resumed / "checkpoints" / f"step-{later:06d}")
        shutil.rmtree(resumed / "export")
        assert f"step-{step:06d}, step {step} of" in run(run_file)
        assert [record["step"] for record in numbers(whole)] == [1, 2, 3, 4, 5]
        assert results(whole) == every, step
        shutil.rmtree(resumed)
        kept.rename(resumed)


CPU = {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 3},
        pytest.param({"stage": 2}, marks=pytest.mark.slow),
        pytest.param({"stage": 3, "offload_param": CPU, "offload_optimizer": CPU}, marks=pytest.mark.slow),
    ],
    ids=lambda zero: f"stage {zero['stage']}{', offloaded' * (len(zero) > 1)}",
)
def test_the_reference_of_a_resumed_run_is_the_model_of_the_start(tmp_path: Path, zero: dict[str, Any]) -> None:
    """Whatever ranks share out: divergence, norms of gradients and weights are those of one rank."""
    folders = [tmp_path / name for name in ("one", "two")]
    sections = {"objective": {"reference": "start", "kl_weight": 0.1}, "rollout": {"steps_per_rollout": 2}}
    for ranks, folder in enumerate(folders, start=1):
        folder.mkdir()
        given = sections | ({"deepspeed": {"zero_optimization": zero}} if ranks == 2 else {})
        run_file = sums_task(folder, **given, train={"micro_batch_size": 2}, checkpoint={"every": "1 steps", "keep": 9})
        run(run_file, ranks=ranks)
    one, two = map(results, folders)
    assert one[0][0]["train/kl"] == 0
    for first, second in zip(one[0], two[0], strict=True):
        assert second["train/kl"] == pytest.approx(first["train/kl"], rel=1e-4, abs=1e-7)
        assert second["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-4)
        assert second["step"] == 1 or second["train/kl"] > 1e-4
    models = [LlamaForCausalLM.from_pretrained(folder / "run" / "export").state_dict() for folder in folders]
    # By norm: Adam makes a step of the size of the learning rate where a gradient is nothing but a rounding.
    for name, weight in models[0].items():
        assert (models[1][name] - weight).norm() <= 1e-4 * weight.norm(), name
    shutil.rmtree(folders[1] / "run" / "checkpoints" / "step-000003")
    shutil.rmtree(folders[1] / "run" / "export")
    run(run_file, ranks=2)
    assert results(folders[1]) == two


def test_a_damaged_rollout_is_not_resumed_from(tmp_path: Path) -> None:
    run_file = sums_task(tmp_path, rollout={"steps_per_rollout": 3}, checkpoint={"every": "1 steps", "keep": 9})
    run(run_file)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    shutil.rmtree(tmp_path / "run" / "export")
    (tmp_path / "run" / "rollouts" / "step-000002.pt").write_bytes(b"")
    done = start(["ds-finetune", "train", str(run_file)])
    assert done.returncode == 2
    assert "step-000002.pt` is missing, and the checkpoint needs it" in done.stderr


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ("two ranks", {}),
        ("two ranks with ZeRO-3", {"deepspeed": {"zero_optimization": {"stage": 3}}}),
        ("two ranks with LoRA", {"lora": {"rank": 4}, "objective": {"kl_weight": 0.1}}),
        pytest.param("two tensor parallel ranks", {"parallel": {"tp": 2}}, marks=pytest.mark.slow),
        pytest.param("two sequence parallel ranks", {"parallel": {"sp": 2}}, marks=pytest.mark.slow),
    ],
)
def test_ranks_make_no_difference(tmp_path: Path, layout: str, sections: dict[str, Any]) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for ranks, folder in enumerate(folders, start=1):
        folder.mkdir()
        given = {name: section for name, section in sections.items() if ranks == 2 or name != "parallel"}
        run(sums_task(folder, train={"micro_batch_size": 2}, **given), ranks=ranks)
    one, two = ([line["answers"] for line in records(folder, "rollouts.jsonl")] for folder in folders)
    assert one == two, layout
    if "lora" in sections:
        first, *_, last = numbers(folders[0])
        assert first["train/kl"] < 1e-6 < last["train/kl"]
    for first, second in zip(*map(numbers, folders), strict=True):
        shared = first.keys() & second.keys() - {"step", "train/mismatch", "train/mismatch_ess"}
        assert {"train/loss", "train/grad_norm", "rollout/reward"} <= shared
        for name in shared:
            assert first[name] == pytest.approx(second[name], rel=1e-5, abs=1e-6), (layout, name)


def test_ids_without_a_token_are_neither_sampled_nor_in_the_loss(tmp_path: Path) -> None:
    run_file = sums_task(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "model")
    tokens = model.config.vocab_size
    model.resize_token_embeddings(tokens + 4, mean_resizing=False)
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head[tokens:] = 3 * head[:4]
    model.save_pretrained(tmp_path / "model")
    run(run_file)
    for record in records(tmp_path):
        assert record["train/mismatch"] < 1e-5
        assert record["rollout/answer_tokens"] > 2


def test_experts_are_compared_in_the_first_step_of_a_rollout(tmp_path: Path) -> None:
    """Later steps have other weights; where a rollout was sampled ahead, the first one has, too."""
    steps = {"steps_per_rollout": 2, "ahead": 1}
    (tmp_path / "digits.py").write_text("def reward(record, text):\n    return sum(map(str.isdigit, text))\n")
    others = {"objective": {"mismatch": "token"}, "rewards": [f"{tmp_path}/digits.py:reward"], "optim": {"lr": 3e-2}}
    run_file = sums_task(tmp_path, rollout=steps, **others)
    ids = {"vocab_size": 14, "eos_token_id": 10, "pad_token_id": 11, "bos_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **CONFIGS["qwen3_moe"] | ids))
    model.float().save_pretrained(tmp_path / "model")
    run(run_file, "train.for=4 steps")
    first, later, ahead, last = records(tmp_path)
    assert first["router/mismatch"] == 0 < ahead["router/mismatch"] < 1
    assert not {"router/mismatch"} & (later.keys() | last.keys())


def test_groups_and_answers_may_be_left_out(tmp_path: Path) -> None:
    """What is dropped does not count in the mean; what is cut counts in its group only."""
    sections = {"objective": {"no_spread": "drop", "truncated": "mask"}, "rollout": {"max_new_tokens": 3}}
    run(sums_task(tmp_path, **sections))
    for record in records(tmp_path):
        trained = 16 * (1 - record["rollout/no_spread"])
        assert record["data/supervised_tokens"] <= 3 * trained
        assert record["data/supervised_tokens"] < record["rollout/answer_tokens"] * 16


def test_held_out_prompts_are_scored_and_the_best_weights_are_kept(tmp_path: Path) -> None:
    run_file = sums_task(
        tmp_path,
        data={"eval": str(tmp_path / "train.jsonl")},
        rollout={"eval_samples": 4},
        eval={"every": "2 steps", "keep_best": True},
    )
    run(run_file)
    found = [record for record in records(tmp_path) if "eval/reward" in record]
    assert [record["step"] for record in found] == [2, 3]
    for record in found:
        assert record["eval/pass_at_1"] == record["eval/reward"]
        assert record["eval/sampled_pass_at_1"] <= record["eval/pass_at_2"] <= record["eval/pass_at_4"] <= 1
        assert record["eval/sampled_reward"] == pytest.approx(record["eval/sampled_pass_at_1"])
    best = max(found, key=lambda record: (record["eval/reward"], -record["step"]))
    share = greedy_share(LlamaForCausalLM.from_pretrained(tmp_path / "run" / "export-best"))
    assert share == pytest.approx(best["eval/reward"], abs=1e-6)
    samples = records(tmp_path, "samples.jsonl")
    assert samples[0]["prompt"] == "0+0="
    assert samples[0]["expected"] == "00"
    assert samples[0]["scores"].startswith("reward ")
