"""Classifiers and reward models are scored as plain loops over single texts score them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from ds_finetune import api
from ds_finetune.cli.main import main
from ds_finetune.errors import ConfigError
from ds_finetune.model.loss.score_config import SETTINGS
from tests.export.classifiers import CLASSES, EOS, WORDS, classifier, write_tokenizer

NUMBERS = {word: number for number, word in enumerate(WORDS, start=4)}


def _texts(count: int) -> list[str]:
    draw = np.random.default_rng(4)
    return [" ".join(draw.choice(WORDS, size=1 + number % 7)) for number in range(count)]


def _written(folder: Path, model: PreTrainedModel, **settings: Any) -> Path:
    model.save_pretrained(folder)
    write_tokenizer(folder, adds_eos=True)
    tree = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def _data(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def _alone(model: PreTrainedModel, text: str) -> list[float]:
    ids = torch.tensor([[*(NUMBERS[word] for word in text.split()), EOS]])
    with torch.no_grad():
        return model(ids).logits[0].double().tolist()  # type: ignore[no-any-return]


def test_classes_are_scored_as_a_plain_loop_does(tmp_path: Path) -> None:
    model = classifier("llama", num_labels=2, id2label={0: "no", 1: "yes"})
    texts = _texts(40)
    labels = [number % 3 > 0 for number in range(len(texts))]
    folder = _written(tmp_path / "model", model)
    rows = [{"text": text, "label": "yes" if is_one else "no"} for text, is_one in zip(texts, labels, strict=True)]
    report = api.evaluate(folder, _data(tmp_path, rows), batch_tokens=64)
    # Rows themselves are scored as those of a file.
    for given in (rows, Dataset.from_list(rows)):
        assert api.evaluate(folder, given, batch_tokens=64).metrics == report.metrics
    logits = [_alone(model, text) for text in texts]
    found = [scores[1] > scores[0] for scores in logits]
    pairs = list(zip(found, labels, strict=True))
    hits = {(a, b): pairs.count((a, b)) for a in (True, False) for b in (True, False)}
    tp, tn, fp, fn = (hits[key] for key in ((True, True), (False, False), (True, False), (False, True)))
    loss = sum(math.log(sum(map(math.exp, each))) - each[is_one] for each, is_one in zip(logits, labels, strict=True))
    spread = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    wanted = {
        "loss": loss / len(texts),
        "accuracy": (tp + tn) / len(texts),
        "f1": 2 * tp / (2 * tp + fp + fn),
        "matthews": (tp * tn - fp * fn) / spread if spread else 0.0,
    }
    assert {name: metric.value for name, metric in report.metrics.items()} == pytest.approx(wanted, abs=1e-5)
    assert all(metric.interval[0] <= metric.value <= metric.interval[1] for metric in report.metrics.values())
    assert report.counted == f"{sum(len(text.split()) + 1 for text in texts)} tokens of 40 examples"


def test_a_model_does_not_differ_from_itself(tmp_path: Path) -> None:
    folder = _written(tmp_path / "model", classifier("llama"))
    data = _data(tmp_path, [{"text": text, "label": number % 3} for number, text in enumerate(_texts(12))])
    report = api.evaluate(folder, {"one": data, "other": data}, baseline=folder)
    assert {(metric.difference, *metric.interval) for metric in report.metrics.values()} == {(0.0, 0.0, 0.0)}
    assert report.sets["one"] == report.sets["other"]
    assert report.documents == 24


def test_numbers_have_correlations(tmp_path: Path) -> None:
    model = classifier("llama", num_labels=1, id2label={0: "stars"}, problem_type="regression")
    texts = _texts(20)
    targets = [0.5 * number % 4 for number in range(20)]
    folder = _written(tmp_path / "model", model)
    data = _data(tmp_path, [{"text": text, "label": target} for text, target in zip(texts, targets, strict=True)])
    metrics = {name: metric.value for name, metric in api.evaluate(folder, data).metrics.items()}
    scores = np.array([_alone(model, text)[0] for text in texts])
    assert metrics["loss"] == pytest.approx(float(((scores - targets) ** 2).mean()), rel=1e-5)
    assert metrics["pearson"] == pytest.approx(float(np.corrcoef(scores, targets)[0, 1]), abs=1e-5)
    assert -1 <= metrics["spearman"] <= 1


def test_a_reward_model_is_scored_on_pairs(tmp_path: Path) -> None:
    model = classifier("llama", num_labels=1, id2label={0: "reward"})
    folder = _written(tmp_path / "model", model, **{SETTINGS: {"objective": "reward", "pooled_token": "last"}})
    texts = _texts(21)
    rows = [
        {"prompt": texts[number], "chosen": texts[number + 7], "rejected": texts[number + 13]} for number in range(7)
    ]
    report = api.evaluate(folder, _data(tmp_path, rows))
    rewards = [[_alone(model, f"{row['prompt']} {row[side]}")[0] for side in ("chosen", "rejected")] for row in rows]
    margins = [chosen - rejected for chosen, rejected in rewards]
    assert report.metrics["reward_margin"].value == pytest.approx(np.mean(margins), abs=1e-5)
    assert report.metrics["reward_accuracy"].value == np.mean([margin > 0 for margin in margins])
    assert report.unit == "pairs"
    assert main(["ask", str(folder), "charge"]) == 2


def test_without_a_padding_token_texts_are_scored_alone(tmp_path: Path) -> None:
    data = _data(tmp_path, [{"text": text, "label": number % 3} for number, text in enumerate(_texts(6))])
    reports = [
        api.evaluate(_written(tmp_path / str(pad), classifier("llama", pad_token_id=pad)), data) for pad in (2, None)
    ]
    assert reports[0].metrics["loss"].value == pytest.approx(reports[1].metrics["loss"].value, abs=1e-6)


def test_what_does_not_fit_a_classifier_is_refused(tmp_path: Path) -> None:
    folder = _written(tmp_path / "model", classifier("llama"))
    other = _written(tmp_path / "other", classifier("llama", num_labels=2, id2label={0: "no", 1: "yes"}))
    data = _data(tmp_path, [{"text": "it", "label": CLASSES[0]}])
    with pytest.raises(ConfigError, match="--extract text needs answers"):
        api.evaluate(folder, data, extract="text")
    with pytest.raises(ConfigError, match=r"--baseline .*other has the labels"):
        api.evaluate(folder, data, baseline=other)
