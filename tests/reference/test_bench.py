"""The bench trains the same steps as the plain loops it is compared with."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.reference.bench.step_speed import SpeedComparison, time_by_turns
from tests.running import start, tiny_task
from tests.teachers import write_teacher


@pytest.mark.parametrize("packing", [True, False])
def test_all_contestants_have_the_same_losses(tmp_path: Path, packing: bool) -> None:
    run_file = tiny_task(tmp_path, data={"packing": packing}, train={"for": "4 steps"})
    done = start(["ds-finetune", "bench", str(run_file), "--steps", "2"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()[-4:]
    assert float(lines[0].split("differ by")[1].split(",")[0]) < 1e-5
    assert [line.split("  ")[0] for line in lines[1:]] == ["ds_finetune", "plain loop, padded", "plain loop, packed"]
    assert "1.00 x" in lines[1]


def test_what_a_device_still_has_to_do_belongs_to_the_step_that_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's work goes on after the call returns: it is waited for before the clock is read, before a step and after
    it.
    """
    clock = pending = 0

    def finish() -> None:
        nonlocal clock, pending
        clock, pending = clock + pending, 0

    def asynchronous(_: Any) -> float:
        nonlocal pending
        pending = 3
        return 1.0

    monkeypatch.setattr(time, "perf_counter", lambda: clock)

    batches: Any = [SimpleNamespace(num_supervised_tokens=1, num_tokens=1)] * 3
    seconds = time_by_turns({"gpu": asynchronous, "next": lambda _: 1.0}, iter(batches), finish=finish).seconds
    assert seconds == {"gpu": [3, 3], "next": [0, 0]}


def test_the_faster_loop_has_the_larger_ratio() -> None:
    found = dict(SpeedComparison({"ours": [2.0, 2.0], "slower": [4.0, 4.0], "faster": [1.0, 1.0]}, 100, 0.0).lines())
    assert [found[name].rsplit(", ")[-1] for name in ("ours", "slower", "faster")] == ["1.00 x", "0.50 x", "2.00 x"]
    assert found["speed (x)"] == "that of ours is 1; more is faster"


def test_ratios_are_of_medians_and_rates_of_sums() -> None:
    contest = SpeedComparison({"a": [1.0, 1.0, 4.0], "b": [2.0, 2.0, 2.0]}, tokens=600, largest_loss_difference=0.0)
    assert dict(contest.lines())["a"] == "1.000 s/step, 100 tokens/s, 1.00 x"
    assert dict(contest.lines())["b"] == "2.000 s/step, 100 tokens/s, 0.50 x"


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    done = start(
        ["ds-finetune", "bench", str(tiny_task(tmp_path))],
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    )
    assert done.returncode == 2
    assert "rank 0 of 2" in done.stderr


@pytest.mark.parametrize("objective", ["orpo", "kto", "reward", "classification"])
def test_loops_of_other_objectives_have_the_same_losses(tmp_path: Path, objective: str) -> None:
    """Language models with the log-probabilities of documents, z0 among them, and models with a score."""
    run_file = _task_of(tmp_path, objective)
    done = start(["ds-finetune", "bench", str(run_file), f"objective={objective}", "--steps", "2"])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("differ by")[1].split(",")[0]) < 1e-5


@pytest.mark.parametrize("source", ["teacher", pytest.param("scores", marks=pytest.mark.slow)])
def test_loops_of_a_distillation_have_the_same_losses(tmp_path: Path, source: str) -> None:
    run_file = tiny_task(tmp_path, data={"packing": source == "scores"}, train={"for": "4 steps"})
    write_teacher(tmp_path / "teacher", tmp_path / "model")
    if source == "scores":
        done = start(["ds-finetune", "teach", *(str(tmp_path / name) for name in ("teacher", "run.yaml", "scores"))])
        assert done.returncode == 0, done.stderr
    objective = f"objective={{name: distill, {source}: {tmp_path / source}, label_weight: 0.3}}"
    done = start(["ds-finetune", "bench", str(run_file), objective, "--steps", "2"])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("differ by")[1].split(",")[0]) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (["objective={name: kto, reference: adapters_off}"], 1e-5),
        *(
            pytest.param(arguments, limit, marks=pytest.mark.slow)
            for arguments, limit in (
                (["objective=sft"], 1e-5),
                (["objective=sft", "lora.quantize=nf4"], 1e-5),
                (["objective=sft", "lora.quantize=nf4", "train.precision=bf16"], 3e-2),
                (["objective=dpo"], 1e-5),
                (["objective=classification"], 1e-5),
            )
        ),
    ],
)
def test_loops_with_adapters_have_the_same_losses(tmp_path: Path, arguments: list[str], limit: float) -> None:
    """The plain loops train peft's adapters; over weights in four bits those of transformers and bitsandbytes."""
    pytest.importorskip("peft", reason="peft is not installed")
    if "lora.quantize=nf4" in arguments:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    name = arguments[0].removeprefix("objective=").removeprefix("{name: ").split(",")[0]
    run_file = tiny_task(tmp_path, train={"for": "4 steps"}) if name == "sft" else _task_of(tmp_path, name)
    _write_weights(tmp_path / "model")
    lora = ["model=" + str(tmp_path / "model"), "lora={rank: 8, alpha: 16}", "optim.lr=0.01"]
    done = start(["ds-finetune", "bench", str(run_file), *lora, *arguments, "--steps", "2"])
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("differ by")[1].split(",")[0]) < limit


def test_four_bits_of_other_bits_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    run_file = tiny_task(tmp_path)
    _write_weights(tmp_path / "model", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    lora = ["model=" + str(tmp_path / "model"), "lora={rank: 8, quantize: nf4}"]
    done = start(["ds-finetune", "bench", str(run_file), *lora])
    assert done.returncode == 2
    assert "in nf4 with transformers, since its weights are stored in fp8" in done.stderr


def _write_weights(folder: Path, **settings: Any) -> None:
    """Write weights of rows of whole blocks of 64 numbers beside the tokenizer."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "q_lora_rank": 64, "kv_lora_rank": 64, "v_head_dim": 32}
    tree = json.loads((folder / "config.json").read_text()) | sizes
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**tree)).float().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(tree | settings))


def _task_of(folder: Path, objective: str) -> Path:
    """The tiny task with rows for the objective; most answers of KTO are good, so that z0 is soon above 0."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"] * 4
    rows = []
    for number, word in enumerate(words):
        preference = {"prompt": f"say {word}", "chosen": f"{word} {number}", "rejected": f"no {word}"}
        marked = {"prompt": f"say {word}", "completion": f"yes {number}", "label": number % 8 > 0}
        labelled = {"text": f"{word} {number}", "label": number % 2}
        rows.append({"kto": marked, "classification": labelled}.get(objective, preference))
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_task(folder, data={"train": str(data), "eval": []}, train={"for": "4 steps", "global_batch_size": 4})
