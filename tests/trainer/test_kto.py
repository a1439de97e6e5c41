"""Runs of KTO: z0 and the reference of mismatched answers come from the data, whatever the ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune import read_config, train
from ds_finetune.errors import DataError
from tests.running import metrics, start, tiny_task, torchrun

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LEARNING = {"lr": 1e-2, "warmup": "0%", "min_lr_ratio": 1.0}


def write_run(folder: Path, *, prompts: int = 10, **sections: Any) -> Path:
    """40 answers to some prompts; those to even numbers are good and say yes."""
    rows = [
        {"prompt": f"say {WORDS[n % prompts]}", "completion": f"{'yes' if n % 2 else 'no'} {n}", "label": n % 2 == 1}
        for n in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_section = {"for": "6 steps", "global_batch_size": 8, "precision": "fp32"}
    data = str(folder / "rows.jsonl")
    return tiny_task(
        folder,
        **{
            "data": {"train": data, "eval": data},
            "train": train_section,
            "optim": LEARNING,
            "objective": {"name": "kto", "beta": 0.5},
            "export": {"at_end": False},
            **sections,
        },
    )


def records_of(run_file: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    config = read_config(run_file, [f"output_dir={run_file.parent}/{name}/run", *overrides])
    train(config)
    return metrics(Path(config.output_dir).parent)


@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_run_begins_at_its_reference_and_tells_answers_apart(tmp_path: Path, packing: str) -> None:
    records = records_of(write_run(tmp_path), "run", f"data.packing={packing}")
    first, last = records[0], records[-1]
    assert (first["train/loss"], first["train/kl"]) == (pytest.approx(0.5, abs=1e-6), pytest.approx(0.0, abs=1e-5))
    assert max(record["train/kl"] for record in records) > 0.01
    assert last["train/reward_margin"] > 0.05
    assert last["eval/reward_margin"] == pytest.approx(last["eval/reward_good"] - last["eval/reward_bad"])
    assert last["eval/reward_margin"] > 0.05
    assert last["eval/kl"] >= 0


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    """Also where they divide the rows of the baseline unequally over their forwards."""
    run_file = write_run(tmp_path)
    options = ["data.packing=true", "deepspeed.zero_optimization.stage=3", "train.micro_batch_size=1"]
    alone = records_of(run_file, "alone", *options)
    words = ["ds_finetune/train.py", str(run_file), *options, f"output_dir={tmp_path}/two/run"]
    done = start(torchrun(*words))
    assert done.returncode == 0, done.stderr
    for one, two in zip(alone, metrics(tmp_path / "two"), strict=True):
        for name in ("train/loss", "train/kl", "train/reward_margin"):
            assert two.get(name) == (pytest.approx(one[name], abs=2e-5) if name in one else None), name
    assert max(record["train/kl"] for record in alone) > 0.01


def test_adapters_are_turned_off_for_the_reference(tmp_path: Path) -> None:
    section = {"name": "kto", "beta": 0.5, "reference": "adapters_off"}
    run_file = write_run(tmp_path, objective=section, lora={"rank": 8}, model=str(tmp_path / "model"))
    kept = (tmp_path / "model" / "config.json").read_text()
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).float().save_pretrained(
        tmp_path / "model"
    )
    (tmp_path / "model" / "config.json").write_text(kept)
    records = records_of(run_file, "run")
    assert records[0]["train/loss"] == 0.5
    assert records[0]["train/kl"] == 0
    assert records[-1]["train/reward_margin"] > 0.01


def test_one_prompt_is_refused_before_step_1(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the 40 examples of data\.train have one prompt"):
        records_of(write_run(tmp_path, prompts=1), "run")
