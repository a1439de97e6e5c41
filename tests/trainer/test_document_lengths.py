"""Documents longer than `index_topk` are refused before step 1 where the indexer is not run, with both numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.errors import FinetuneError
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.settings import RunSettings
from ds_finetune.reference.selftest.cells import TINY_MODELS
from ds_finetune.trainer.document_lengths import length_notes
from ds_finetune.trainer.inputs import read_inputs
from ds_finetune.trainer.resolve import make_model_plan
from tests.running import tiny_task

ONE_RANK = Mesh(0, 1)

LIMIT = 24
CUT = {"max_truncated_ratio": 1.0}
EAGER = {"model": {"attention": "eager"}}


def _run_file(folder: Path, family: str = "deepseek_v32", **sections: Any) -> Path:
    run_file = tiny_task(folder, **sections)
    vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    tree = TINY_MODELS[family] | {"vocab_size": vocabulary, "index_topk": LIMIT}
    (folder / "model" / "config.json").write_text(json.dumps(tree))
    return run_file


def _read(config: RunConfig, mesh: Mesh = ONE_RANK) -> tuple[str, ...]:
    """Check the documents of a run; returns the note on them."""
    model = make_model_plan(RunSettings.of(config, mesh=mesh))
    read_inputs(RunSettings.of(config), model)
    return length_notes(model, max_seq_len=config.train.max_seq_len)


@pytest.mark.parametrize(
    ("family", "mesh", "sections", "words", "hint"),
    [
        (
            "deepseek_v32",
            ONE_RANK,
            EAGER,
            "data.train: 31 of 32 documents are longer than index_topk 24 (the longest has 31 tokens), and on them "
            "sparse attention with model.attention eager is not tested",
            "set model.attention: sdpa; or set train.max_seq_len: 24, so that data.long_rows decides",
        ),
        (
            "glm_moe_dsa",
            Mesh(0, 1, pp=2),
            {"parallel": {"pp": 2}},
            "sparse attention where a stage of parallel.pp 2 begins with layer 1, without an indexer is not tested",
            "set parallel.pp: 1, or other parallel.pp_layers; or set train.max_seq_len: 24",
        ),
        (
            "deepseek_v32",
            ONE_RANK,
            EAGER | {"data": {"streaming": True}},
            "train.max_seq_len 64 is more than index_topk 24: with data.streaming the lengths are not known before",
            "set train.max_seq_len: 24, or model.attention: sdpa",
        ),
        (
            "deepseek_v32",
            ONE_RANK,
            EAGER
            | {
                "train": {"max_seq_len": LIMIT},
                "data": CUT,
                "eval": {"generate": {"prompts": 2, "max_new_tokens": 12}},
            },
            "a prompt of 13 tokens in eval and max_new_tokens 12 add up to more than index_topk 24",
            "set model.attention: sdpa, or fewer max_new_tokens",
        ),
    ],
    ids=["eager", "pp", "streamed", "generated"],
)
def test_longer_documents_are_refused_where_the_indexer_is_not_run(
    family: str, mesh: Mesh, sections: dict[str, Any], words: str, hint: str, tmp_path: Path
) -> None:
    config = read_config(_run_file(tmp_path, family, **sections))
    with pytest.raises(FinetuneError) as caught:
        _read(config, mesh)
    assert words in caught.value.message
    assert hint in caught.value.hint


def test_the_plan_says_whether_the_indexer_is_run(tmp_path: Path) -> None:
    (note,) = _read(read_config(_run_file(tmp_path / "long")))
    assert note == "in documents longer than index_topk 24 the indexer chooses tokens; it is not trained"
    short = {"data": {"packing": True} | CUT, "train": {"max_seq_len": LIMIT}}
    (note,) = _read(read_config(_run_file(tmp_path / "short", **EAGER | short)))
    assert note == "documents have at most index_topk 24 tokens and are attended to in full: the indexer is not run"
    assert _read(read_config(tiny_task(tmp_path / "v3"))) == ()


def test_the_plan_says_how_indexers_are_trained(tmp_path: Path) -> None:
    (note,) = _read(read_config(_run_file(tmp_path / "sparse", indexer={"train": True})))
    assert note == "in documents longer than index_topk 24 the indexer chooses tokens; it is trained"
    dense = {"indexer": {"train": True, "stage": "dense_warmup"}}
    (note,) = _read(read_config(_run_file(tmp_path / "dense", **dense)))
    assert note == "documents are attended to in full, also those longer than index_topk 24: only indexers are trained"
    short = {"data": {"packing": True} | CUT, "train": {"max_seq_len": LIMIT}}
    (note,) = _read(read_config(_run_file(tmp_path / "short", indexer={"train": True}, **short)))
    assert note == "documents have at most index_topk 24 tokens and are attended to in full: the indexer is trained"


def test_rows_may_be_longer_than_documents(tmp_path: Path) -> None:
    short = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps(short) + "\n") * 8)
    config = read_config(_run_file(tmp_path, **EAGER, data={"packing": True, "train": str(rows), "eval": str(rows)}))
    assert config.train.max_seq_len > LIMIT
    # The refusals of the test above raise here.
    (note,) = _read(config)
    assert note == "documents have at most index_topk 24 tokens and are attended to in full: the indexer is not run"
