"""A task of lm-evaluation-harness, where it is installed, beside the choice that plain log-likelihoods make."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.evaluation.test_evaluate import _model
from tests.running import tiny_task


@pytest.mark.slow
def test_a_task_gives_what_plain_log_likelihoods_give(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install 'lm_eval[hf]')")
    from ds_finetune.evaluation.lm_eval_tasks import run_tasks

    tiny_task(tmp_path)
    for name, seed in (("tuned", 1), ("base", 2)):
        _model(tmp_path, name, seed)
    rows = [{"question": f"q{number}", "label": number % 2} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["a", "b"],
        "doc_to_target": "{{label}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    found = run_tasks(str(tmp_path / "tuned"), str(tmp_path / "base"), [task], limit=None)["tiny/acc,none"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    a, b = tokenizer("a", add_special_tokens=False)["input_ids"] + tokenizer("b", add_special_tokens=False)["input_ids"]
    for name, value in (("tuned", found.value), ("base", found.baseline)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            chosen = [model(tokenizer(row["question"], return_tensors="pt")["input_ids"]).logits[0, -1] for row in rows]
        assert value == pytest.approx(
            sum(int(logits[b] > logits[a]) == row["label"] for logits, row in zip(chosen, rows, strict=True)) / 12
        )
    assert found.interval[0] < found.value - found.baseline < found.interval[1]  # type: ignore[operator]
