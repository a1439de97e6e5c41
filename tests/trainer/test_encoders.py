"""A whole run of each kind of encoder on pairs of texts, and its export, scored by plain transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ds_finetune.cli.main import main
from ds_finetune.config.schema import read_config
from ds_finetune.errors import ConfigError
from ds_finetune.plan.settings import RunSettings
from ds_finetune.trainer.resolve import token_limits
from tests.encoder_task import encoder_task
from tests.model.encoders import ENCODERS, encoder_config
from tests.running import start, torchrun


@pytest.mark.parametrize(
    "name", [name if name == "bert" else pytest.param(name, marks=pytest.mark.slow) for name in ENCODERS]
)
def test_a_run_is_exported_for_plain_transformers(name: str, tmp_path: Path) -> None:
    ranks = 2 if name == "bert" else 1
    run_file = encoder_task(
        tmp_path,
        name=name,
        export={"verify": False},
        data={"packing": name != "roberta"},
        checkpoint={"every": "never"},
    )
    done = start(torchrun("ds_finetune/train.py", str(run_file), ranks=ranks))
    assert done.returncode == 0, done.stderr[-4000:]
    folder = tmp_path / "run" / "export"
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    pairs = [row["sentence1"] for row in rows], [row["sentence2"] for row in rows]
    parts = tokenizer(*pairs, padding=True, return_tensors="pt", return_token_type_ids=name == "bert")
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(**parts).logits, torch.tensor([row["label"] for row in rows]))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["eval/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert set(records[-1]) >= {"train/accuracy", "eval/accuracy", "eval/f1_macro", "eval/matthews"}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("parallel.tp=2", "of model_type bert is not tested"),
        ("parallel.sp=2", "of model_type bert is not tested"),
        ("lora={}", "lora of model_type bert is not tested"),
        ("model.attention=eager", "model.attention eager is not supported for encoders such as model_type `bert`"),
        ("objective=sft", "objective sft is not supported for encoders such as model_type `bert`"),
    ],
)
def test_what_is_not_tested_is_refused(
    override: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = encoder_task(tmp_path)
    assert main(["plan", str(run_file), "--gpus", "2", "--tensors", override]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_two_positions_of_robertas_table_are_not_for_tokens(tmp_path: Path) -> None:
    config = read_config(encoder_task(tmp_path, name="roberta", train={"max_seq_len": 41}))
    with pytest.raises(ConfigError, match=r"train\.max_seq_len 41 is more than the 40 positions"):
        token_limits(RunSettings.of(config), encoder_config("roberta"))
