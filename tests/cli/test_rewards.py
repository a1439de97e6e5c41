"""`ds-finetune rewards`: tables of scores, and what is refused before any training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.cli.main import main
from ds_finetune.cli.rewards import _result_text
from ds_finetune.objectives.rewards.pool import open_rewards
from tests.objectives.rewards.scoring import FILE, answer_of, section_of
from tests.running import tiny_task

ROWS = [{"prompt": f"{n}+{n}", "answer": str(2 * n)} for n in range(6)]


def run_rewards(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    rewards: list[Any],
    rows: list[dict[str, Any]] = ROWS,
    *options: str,
    **sections: Any,
) -> tuple[int, str, str]:
    """Exit code, output and error of the command."""
    run_file = tiny_task(folder, objective="grpo", rewards=rewards, rollout={"max_new_tokens": 8}, **sections)
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = main(["rewards", str(run_file), *(options or ("--samples", "0"))])
    captured = capsys.readouterr()
    return code, " ".join(captured.out.split()), " ".join(captured.err.split())


def test_reference_answers_and_answers_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = ["number", {"reward": f"{FILE}:right", "name": "mine"}, "format", {"reward": "length", "max_tokens": 4}]
    tiny_task(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    capsys.readouterr()
    code, out, error = run_rewards(
        tmp_path, capsys, rewards, ROWS, "--records", "4", "--samples", "2", model=str(tmp_path / "model")
    )
    assert (code, error) == (0, "")
    assert "reference answers of 4 records" in out
    assert "number │ 1.000 │ 4/4 │ 0 │ 0 │" in out
    assert "mine │ 1.000 │ - │ 0 │ 0 │" in out
    assert "format │ 0.000 │ - │ 0 │ 0 │" in out
    assert "2 answers of the model" in out
    assert "train.jsonl line 2, answer 1: number " in out
    assert "prompt: '<|bos|><|user|>1+1<|assistant|>'" in out


def test_what_was_read_of_an_answer_stands_beside_it() -> None:
    with open_rewards([section_of("number")]) as rewards:
        found = rewards.start([answer_of(text, {"answer": "6"}) for text in ("10^6", "six")]).parts()
    assert [_result_text(part) for (part,) in found] == ["0.0 (read '1000000')", "0.0 (no result read)"]


@pytest.mark.parametrize(
    ("rewards", "rows", "message"),
    [
        (["choice"], ROWS, "line 1: reward `choice` cannot use column `answer`: it is '0', which has no letter"),
        (["number"], [*ROWS, {"prompt": "x"}], "line 7: reward `number` needs column `answer`"),
        ([f"{FILE}:raises"], ROWS, "line 1: it raised ZeroDivisionError"),
        ([f"{FILE}:absent"], ROWS, "needs a function `absent`"),
        (
            ["number"],
            [{"prompt": "x", "answer": "<think>7"}],
            "reward `number` gives none of the 1 reference answers a score above 0; the first is '<think>7'",
        ),
        ([f"{FILE}:a_wrong_constant"], ROWS, "reward `a_wrong_constant` gives every answer the score -1"),
        ([f"{FILE}:not_applicable"], ROWS, "reward `not_applicable` gives every answer None"),
    ],
)
def test_refusals(
    rewards: list[Any], rows: list[dict[str, Any]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run_rewards(tmp_path, capsys, rewards, rows)
    assert code == 2
    assert message in error
    assert "hint:" in error


def test_references_in_the_form_that_each_reward_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "prompt": "x", "answer": "def f(n): return n", "tests": "assert f(3) == 3", "letter": 2, "names": ["a", "b"],
        "value": {"k": 1},
    }  # fmt: skip
    columns = {"choice": "letter", "exact_match": "names", "json": "value"}
    rewards = ["code", *({"reward": reward, "column": column} for reward, column in columns.items())]
    code, out, error = run_rewards(tmp_path, capsys, rewards, [row])
    assert (code, error) == (0, "")
    for name in ("code", *columns):
        assert f"{name} │ 1.000 │ 1/1 │ 0 │ 0 │" in out


def test_a_run_without_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", str(tiny_task(tmp_path))]) == 2
    assert "objective sft has no rewards to try" in capsys.readouterr().err
