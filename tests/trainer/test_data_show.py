"""What `data show` and the plan print of pairs, marked answers and labelled texts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.cli.main import main
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.console.tables import OUT
from ds_finetune.errors import DataError
from ds_finetune.system.world import World
from ds_finetune.trainer.prepare import PreparedRun, prepare_run
from ds_finetune.trainer.preview import escaped
from ds_finetune.trainer.resolve import resolve_here
from ds_finetune.trainer.show import show_plan
from tests.running import tiny_task

PAIRS = [{"prompt": "2+2?", "chosen": "4", "rejected": answer, "margin": 1.5} for answer in ("5", "22", "4")]
MARKED = [{"prompt": "2+2?", "completion": answer, "label": answer == "4"} for answer in ("4", "5", "3")]
LABELLED = [{"sentence1": "a", "sentence2": "b", "label": name} for name in ("same", "other", "none", "same")]


def config_of(folder: Path, objective: object, rows: list[dict[str, Any]], **data: object) -> RunConfig:
    run_file = tiny_task(folder, objective=objective, data={"max_dropped_ratio": 1, **data})
    for name in ("train", "eval"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_config(run_file)


def shown_data(folder: Path, capsys: pytest.CaptureFixture[str], *, samples: int = 1) -> str:
    assert main(["data", "show", str(folder / "run.yaml"), "--samples", str(samples)]) == 0
    return capsys.readouterr().out


def prepared(config: RunConfig) -> tuple[PreparedRun, str]:
    run = prepare_run(resolve_here(config, World.from_environment({})))
    with OUT.capture() as shown:
        show_plan(run)
    return run, " ".join(shown.get().split())


def test_both_sides_of_a_pair_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, "reward", PAIRS, packing=True)
    shown = shown_data(tmp_path, capsys)
    prompt = "<|bos|><|user|>2+2?<|assistant|>"
    assert f"pair 1, margin 1.5: chosen\n{prompt}⟦4<|eos|>⟧" in shown
    assert f"pair 1, margin 1.5: rejected\n{prompt}⟦5<|eos|>⟧" in shown
    assert "pair 2" not in shown
    assert re.search(r"^pairs +2 *$", shown, re.MULTILINE)
    assert "1 of 3 rows are dropped: rows whose chosen and rejected answers have the same tokens" in shown
    run, shown = prepared(config)
    assert "64 tokens a row at most, packed, for both sides of a pair together" in shown
    assert "1 packed rows of 3 rows, 2 pairs, 37 tokens, 24.3% of them supervised" in shown
    assert "data.eval repeats training data: 2 of 2 held-out pairs have the tokens of a training pair" in shown
    assert run.inputs.train.counts.read == 3


def test_a_share_that_holds_out_no_row_is_refused_as_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.1% of 3 rows; and of a share that holds out one of them both name it."""
    config_of(tmp_path, "reward", PAIRS, eval="0.1%")
    for command in (["data", "show"], ["train"]):
        assert main([*command, str(tmp_path / "run.yaml")]) == 2
        assert "data.eval has no row: " in " ".join(capsys.readouterr().err.split())
    config = config_of(tmp_path, "reward", PAIRS, eval="50%")
    note = "data.eval: [12] rows of data.train, drawn by train.seed 0, are not trained"
    shown, planned = (re.search(note, text) for text in (shown_data(tmp_path, capsys), prepared(config)[1]))
    assert shown is not None
    assert planned is not None
    assert shown[0] == planned[0]


def test_marked_answers_are_shown_with_their_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_of(tmp_path, {"name": "kto"}, MARKED)
    shown = shown_data(tmp_path, capsys, samples=2)
    assert "good answer\n<|bos|><|user|>2+2?<|assistant|>⟦4<|eos|>⟧" in shown
    assert "bad answer\n<|bos|><|user|>2+2?<|assistant|>⟦5<|eos|>⟧" in shown
    assert "answers only" not in shown
    assert re.search(r"^answers +1 good, 2 bad *$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("label", "said"), [(True, "good answers only: .* with bad ones"), (False, "bad answers only")]
)
def test_marked_answers_of_one_kind_are_noted(
    label: bool, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, "prompt": f"{number}+2?", "label": label} for number, row in enumerate(MARKED)]
    config = config_of(tmp_path, {"name": "kto"}, rows)
    assert re.search(f"data.train has {said}", shown_data(tmp_path, capsys))
    shown = prepared(config)[1]
    assert re.search(f"data.train has {said}", shown)
    assert shown.count("answers only") == 1


def test_classes_of_the_rows_are_those_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path, "classification", LABELLED)
    shown = shown_data(tmp_path, capsys, samples=2)
    assert "class 2 same\na<|unk|>b<|eos|>" in shown
    assert "⟦" not in shown
    assert re.search(r"^classes +3 \(none 25.0%, other 25.0%, same 50.0%\) *$", shown, re.MULTILINE)
    run, shown = prepared(config)
    assert "supervised" not in shown
    assert run.model.hf_config.id2label == {0: "none", 1: "other", 2: "same"}
    assert run.config.objective.model_dump()["num_labels"] == 3
    assert run.inputs.held_out["eval"].kind.labels == ("none", "other", "same")
    (tmp_path / "eval.jsonl").write_text(json.dumps({**LABELLED[0], "label": "new"}))
    with pytest.raises(DataError, match=r"eval\.jsonl line 1: column `label` is str 'new', which is no class"):
        prepared(config)


def test_what_a_terminal_hides_or_obeys_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\r\nb\tc\x1b[31m\u202ed\x07\u00a0é"
    config_of(tmp_path, "sft", [{"prompt": "2+2?", "completion": "4", "\x1b[2J": 1}])
    capsys.readouterr()
    assert escaped(text) == "a\\r\nb\\tc\\x1b[31m\\u202ed\\x07\\xa0é"
    shown = shown_data(tmp_path, capsys)
    assert "\\x1b[2J (1 rows)" in shown
    assert not any(c in shown for c in "\x1b\r\t\x07\u202e")


def test_texts_with_windows_line_ends_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "2+2?", "chosen": "4", "rejected": "5"}, {"prompt": "2+2?\r\n", "chosen": "4", "rejected": "5"}]
    config_of(tmp_path, "dpo", rows)
    shown = " ".join(shown_data(tmp_path, capsys).split())
    assert "1 of 2 rows have Windows line ends (a carriage return before the line feed)" in shown
    assert "train.jsonl line 2" in shown


def test_a_prompt_is_shown_with_what_the_rewards_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "2+2?", "answer": "4", "level": 1}, {"prompt": "3+3?", "answer": "six"}]
    sizes = {"max_new_tokens": 16, "prompts_per_step": 2}
    objective = {"name": "grpo", "group_size": 4}
    run_file = tiny_task(tmp_path, objective=objective, rewards=["number"], rollout=sizes, train={"max_seq_len": 64})
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = read_config(run_file)
    with pytest.raises(DataError, match="line 2: reward `number` cannot use column `answer`"):
        prepared(config)
    shown = shown_data(tmp_path, capsys, samples=2)
    flat = " ".join(shown.split())
    assert "prompt 1, " in flat
    assert "train.jsonl line 1 <|bos|><|user|>2+2?<|assistant|>" in flat
    assert 'rewards see {"prompt": "2+2?", "answer": "4", "level": 1}' in flat
    assert "line 2: reward `number` cannot use column `answer`: it is 'six', which has no number" in flat
    assert re.search(r"^prompts +2 *$", shown, re.MULTILINE)
    assert "longer than 48" in shown
    assert "supervised" not in shown
