"""Documents longer than a model with an indexer attends to are refused before step 1, with both numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.errors import FinetuneError
from ds_finetune.plan.mesh import Mesh
from ds_finetune.selftest.cells import TINY_MODELS
from ds_finetune.trainer.document_lengths import length_notes
from ds_finetune.trainer.inputs import make_model_plan, read_inputs
from tests.running import tiny_task

LIMIT = 24
CUT = {"max_truncated_ratio": 1.0}


def _run_file(folder: Path, **sections: Any) -> Path:
    run_file = tiny_task(folder, **sections)
    vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    tree = TINY_MODELS["deepseek_v32"] | {"vocab_size": vocabulary, "index_topk": LIMIT}
    (folder / "model" / "config.json").write_text(json.dumps(tree))
    return run_file


def _read(config: RunConfig) -> None:
    read_inputs(config, make_model_plan(config, Mesh(0, 1)))


@pytest.mark.parametrize(
    ("sections", "words", "hint"),
    [
        (
            {},
            ("data.train: ", "31 of 32 documents are longer than the 24 tokens", "the longest has 31"),
            f"{LIMIT}; data.",
        ),
        (
            {"data": {"streaming": True}},
            ("train.max_seq_len 64 is more than the 24 tokens", "the documents of data.streaming"),
            f"set train.max_seq_len: {LIMIT}",
        ),
        (
            {
                "train": {"max_seq_len": 24},
                "data": CUT,
                "eval": {"generate": {"prompts": 2, "max_new_tokens": 12}},
            },
            ("eval.generate: a prompt of 13 tokens in eval", "max_new_tokens 12 are more than the 24 tokens"),
            "set eval.generate.max_new_tokens to 11 or less",
        ),
    ],
    ids=["prepared", "streamed", "generated"],
)
def test_longer_documents_are_refused(
    sections: dict[str, Any], words: tuple[str, ...], hint: str, tmp_path: Path
) -> None:
    config = read_config(_run_file(tmp_path, **sections))
    with pytest.raises(FinetuneError) as caught:
        _read(config)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert hint in caught.value.hint


def test_rows_may_be_longer_than_documents(tmp_path: Path) -> None:
    """With `train.max_seq_len` at the limit the documents are cut; packed rows of short ones may be longer."""
    _read(read_config(_run_file(tmp_path, data={"packing": True} | CUT, train={"max_seq_len": LIMIT})))
    rows = tmp_path / "train.jsonl"
    short = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
    for name in (rows, tmp_path / "eval.jsonl"):
        name.write_text((json.dumps(short) + "\n") * 8)
    config = read_config(_run_file(tmp_path / "again", data={"packing": True, "train": str(rows), "eval": str(rows)}))
    _read(config)
    (note,) = length_notes(make_model_plan(config, Mesh(0, 1)))
    assert note.startswith("documents have at most index_topk 24 tokens")


def test_models_without_an_indexer_have_no_limit(tmp_path: Path) -> None:
    config = read_config(tiny_task(tmp_path))
    _read(config)
    assert length_notes(make_model_plan(config, Mesh(0, 1))) == ()
