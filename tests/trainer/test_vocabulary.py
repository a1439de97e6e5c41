"""Runs whose tokenizer has more ids than the model: every layout, resume, exports, and what reads them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from ds_finetune.config.sections import DataConfig
from ds_finetune.errors import DataError
from ds_finetune.evaluation.evaluate import EvalRequest, evaluate_model
from ds_finetune.export.formats import ExportOptions
from ds_finetune.export.from_checkpoint import export_checkpoint
from ds_finetune.export.onnx.folder import write
from tests.model.vocabulary_worker import LAYOUTS, name_of
from tests.model.weights.test_vocabulary import loaded
from tests.model.weights.test_weights import published
from tests.running import metrics, start, tiny_task, torchrun

BEFORE, AFTER = 96, 101
GROWN = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    for family in ("deepseek_v3", "qwen2"):
        published(family, folder / family)
    done = start(torchrun("tests/model/vocabulary_worker.py", str(folder)))
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: name_of(*layout))
def test_every_layout_holds_the_same_grown_tensors(layouts: Path, layout: tuple[str, int, dict[str, int]]) -> None:
    found = torch.load(layouts / f"{name_of(*layout)}.pt", weights_only=True)
    wanted = dict(loaded(layouts / layout[0]).named_parameters())
    assert wanted.keys() <= found.keys()
    for name, param in wanted.items():
        assert torch.equal(found[name], param), name


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of three steps that were done with a model of 96 tokens and a tokenizer of 101."""
    folder = tmp_path_factory.mktemp("run") / "t"
    model = {"resize_vocabulary": True, "weights": "load", "tokenizer": str(folder / "tokenizer")}
    export: dict[str, Any] = {"verify": True}
    zero3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40}}
    run_file = tiny_task(
        folder, model=model, export=export, deepspeed=zero3, checkpoint={"every": "3 steps", "keep": 3}
    )
    shutil.copytree(folder / "model", folder / "tokenizer")
    config = AutoConfig.from_pretrained(folder / "model", vocab_size=BEFORE)
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (folder / "model" / name).unlink(missing_ok=True)
    done = start(torchrun("ds_finetune/train.py", str(run_file)))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "96 -> 101 tokens; 5 new rows" in done.stdout
    assert "verified: " in done.stdout
    return run_file


def test_the_export_has_the_new_rows_and_reloads(task: Path) -> None:
    folder = task.parent / "run" / "export"
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == AFTER
    tensors, base = load_file(folder / "model.safetensors"), load_file(task.parent / "model" / "model.safetensors")
    assert tensors.keys() == base.keys()
    for key, value in tensors.items():
        assert value.shape == (AFTER, *base[key].shape[1:]) if key in GROWN else base[key].shape
        # Three steps of a small learning rate: old rows are where they were, and not another row's.
        assert (value[: len(base[key])] - base[key]).abs().max() < 0.02
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model(torch.tensor([[1, AFTER - 1]])).logits.shape == (1, 2, AFTER)


@pytest.mark.parametrize("with_base", [False, True])
def test_a_checkpoint_is_exported_as_the_run_exported_it(task: Path, tmp_path: Path, with_base: bool) -> None:
    """Also where the base, whose config.json says the old vocabulary, is named."""
    base = task.parent / "model" if with_base else None
    export_checkpoint(task.parent / "run", tmp_path / "out", dtype="fp32", max_shard_bytes=2**30, base=base)
    theirs, ours = (
        load_file(folder / "model.safetensors") for folder in (task.parent / "run" / "export", tmp_path / "out")
    )
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == (task.parent / "run" / "export" / name).read_text()


def test_onnx_of_the_export(task: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    write(task.parent / "run" / "export", tmp_path / "onnx", ExportOptions(dtype="fp32"))
    assert json.loads((tmp_path / "onnx" / "config.json").read_text())["vocab_size"] == AFTER


def test_a_baseline_of_the_old_vocabulary(task: Path) -> None:
    """Scored on rows that it has the ids of, refused by both numbers on others."""
    data = DataConfig.model_validate(
        {"train": "none", "eval": str(task.parent / "eval.jsonl"), "packing": False, "workers": 1}
    )
    export, base = str(task.parent / "run" / "export"), str(task.parent / "model")
    assert evaluate_model(EvalRequest(export, base, data, limit=4)).documents == 4
    odd = task.parent / "odd.jsonl"
    odd.write_text(json.dumps({"prompt": "a", "completion": "~~~"}) + "\n")
    with pytest.raises(DataError, match=r"the rows have token ids up to 100 and .* a vocabulary of 96"):
        evaluate_model(EvalRequest(export, base, data.model_copy(update={"eval": (str(odd),)})))


def test_the_run_resumes_on_another_layout(task: Path) -> None:
    again = start(
        [
            "python",
            "ds_finetune/train.py",
            str(task),
            "train.for=5 steps",
            "deepspeed={zero_optimization: {stage: 1}}",
            "export.at_end=false",
        ]
    )
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert [record["step"] for record in metrics(task.parent)] == [1, 2, 3, 4, 5]
