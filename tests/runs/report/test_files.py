"""Files beside the page: model cards, and the plot library."""

import json
import math
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from ds_finetune.runs.folder import RunFolder
from ds_finetune.runs.report.model_card import write_card_of_source, write_model_cards
from ds_finetune.runs.report.page import bokehjs
from tests.runs.report.made_runs import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run-$a")


def test_model_cards_are_those_of_the_hub(run: Path) -> None:
    assert write_model_cards(RunFolder.read(run)) == [run / "export" / "README.md", run / "export-best" / "README.md"]
    card = ModelCard.load(run / "export" / "README.md")
    data = card.data
    assert (data.base_model, data.base_model_relation) == ("deepseek-ai/DeepSeek-V2-Lite", "finetune")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.datasets == ["openai/gsm8k"], "a file is no data set of the Hub"
    assert {result.metric_type: result.metric_value for result in data.eval_results} == pytest.approx(
        {"loss": 2 + 4 / 60 + 0.25, "accuracy": 0.5, "perplexity": math.exp(2 + 4 / 60 + 0.25)}, rel=1e-4
    )
    assert "for 60 steps" in card.text
    assert "| `optim.lr` | 0.001 |" in card.text
    assert str(run.parent) not in card.content, "a card is published, and names no folder of this machine"
    best = ModelCard.load(run / "export-best" / "README.md")
    losses = [result.metric_value for result in best.data.eval_results if result.metric_type == "loss"]
    assert losses == [pytest.approx(2 + 4 / 50 + 0.25)], "of the step of its weights"


def test_the_card_of_a_copy_of_the_best_weights_has_their_step(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run / "export-best", copy)
    (copy / "verification.json").unlink()
    write_card_of_source(run / "export-best", copy)
    losses = [
        each.metric_value for each in ModelCard.load(copy / "README.md").data.eval_results if each.metric_type == "loss"
    ]
    assert losses == [pytest.approx(2 + 4 / 50 + 0.25)]


def test_the_best_step_is_that_of_a_finite_loss(run: Path) -> None:
    lines = [{"step": 10, "eval/loss": 0.5}, {"step": 20, "eval/loss": 0.4}]
    lines += [{"step": 30, "eval/loss": None, "non_finite": ["eval/loss"]}]  # type: ignore[dict-item]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "export-best" / "verification.json").unlink()
    write_model_cards(RunFolder.read(run))
    data = ModelCard.load(run / "export-best" / "README.md").data
    assert [result.metric_value for result in data.eval_results] == [0.4]


def test_an_adapter_has_the_card_of_peft_and_an_edited_card_stays(run: Path) -> None:
    adapter = run / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (run / "export" / "README.md").write_text("# mine\n")
    write_model_cards(RunFolder.read(run))
    best = run / "export-best" / "README.md"
    best.write_text(best.read_text() + "\nLicence: mine. It keeps the comment of the generated card.\n")
    edited = best.read_bytes()
    assert adapter / "README.md" in write_model_cards(RunFolder.read(run))
    data = ModelCard.load(adapter / "README.md").data
    assert (data.library_name, data.base_model_relation) == ("peft", "adapter")
    assert (run / "export" / "README.md").read_text() == "# mine\n"
    assert best.read_bytes() == edited


def test_a_card_that_nobody_edited_is_written_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a --> b, <!-- written by ds_finetune 1 -->")
    write_model_cards(RunFolder.read(run))
    card = run / "export" / "README.md"
    for lines in ([{"step": 60, "eval/loss": 0.125}], [{"step": 60, "eval/loss": 0.25}]):
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write_model_cards(RunFolder.read(run))
        assert f"{lines[0]['eval/loss']}" in card.read_text()


def test_an_export_of_a_checkpoint_has_the_card_of_its_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "verification.json").write_text('{"step": 60}')
    write_model_cards(RunFolder.read(run))
    assert write_card_of_source(run / "checkpoints" / "step-000060", out) == out / "README.md"
    assert (out / "README.md").read_bytes() == (run / "export" / "README.md").read_bytes()
    assert write_card_of_source(tmp_path / "a-model", out) is None


def test_the_chart_library_is_that_of_the_installed_package() -> None:
    assert f'"{version("bokeh")}"' in bokehjs()
