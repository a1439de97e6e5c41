"""Continued pre-training beside a plain loop over each text: every token after the first is predicted once."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from ds_finetune import evaluate
from ds_finetune.cli.demo import write_demo
from ds_finetune.config.schema import read_config
from ds_finetune.config.sections import DataConfig
from ds_finetune.data.batches import BatchPlan
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.stream import open_stream, streaming_batches
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.objectives.labels import IGNORE_INDEX
from tests.running import metrics, start, tiny_task, torchrun

SIZE = 20
TEXTS = {"new": ["x" * 7, "abc " * 30, "q", "abcd" * 5], "old": ["hello world " * 9, "1234567890"]}
"""One is shorter than a row, some are cut, one ends where a row ends, and one is a single character."""


def write(folder: Path, name: str) -> str:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"content": text}) + "\n" for text in TEXTS[name]))
    return str(file)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that hardly changes the weights: one step on all rows, evaluated on two sets."""
    folder = tmp_path_factory.mktemp("pretrain")
    files = {name: write(folder, name) for name in TEXTS}
    run_file = tiny_task(
        folder,
        objective={"name": "pretrain", "bos": "always", "eos": False},
        data={"train": [*files.values()], "eval": files, "columns": {"text": "content"}, "packing": True},
        train={"for": "1 epochs", "global_batch_size": 8, "micro_batch_size": 2, "max_seq_len": SIZE},
        optim={"lr": 1e-12, "warmup": "0"},
        eval={"keep_best": True},
    )
    program = ["ds_finetune/train.py", str(run_file)]
    done = start(torchrun(*program, ranks=2) if request.param == 2 else ["ds-finetune", "train", str(run_file)])
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def losses(folder: Path, name: str) -> list[float]:
    """The loss of every token after the first of each text, by a loop over windows that overlap by one token."""
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    found = []
    for text in TEXTS[name]:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        start, last = 0, len(ids) - 1
        while start < last:
            window = torch.tensor(ids[start : start + SIZE])
            with torch.no_grad():
                logits = model(window[None]).logits[0, :-1].double()
            found += torch.nn.functional.cross_entropy(logits, window[1:], reduction="none").tolist()
            start += SIZE - 1
        assert len(found) == sum(
            len(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in TEXTS[name][: TEXTS[name].index(text) + 1]
        )
    return found


def test_losses_are_those_of_a_plain_loop(finished: Path) -> None:
    """Of the step, of each held-out set, and of the rows of all sets together."""
    expected = {name: losses(finished, name) for name in TEXTS}
    together = [loss for of_set in expected.values() for loss in of_set]
    records = metrics(finished)
    assert sum(record["data/supervised_tokens"] for record in records) == len(together)
    last = records[-1]
    for name, of_set in expected.items():
        assert last[f"eval/{name}/loss"] == pytest.approx(sum(of_set) / len(of_set), abs=2e-3)
        assert last[f"eval/{name}/perplexity"] == pytest.approx(math.exp(last[f"eval/{name}/loss"]))
    assert last["eval/loss"] == pytest.approx(sum(together) / len(together), abs=2e-3)
    trained = sum(record["train/loss"] * record["data/supervised_tokens"] for record in records) / len(together)
    assert trained == pytest.approx(last["eval/loss"], abs=1e-5)
    shares = [len(of_set) / len(together) for of_set in expected.values()]
    pooled = sum(share * last[f"eval/{name}/loss"] for name, share in zip(expected, shares, strict=True))
    assert last["eval/loss"] == pytest.approx(pooled, rel=1e-9)


def test_the_export_is_scored_as_the_run_was(finished: Path) -> None:
    """With the objective's first and last token, and the same cuts."""
    scored = evaluate(
        finished / "run" / "export",
        {name: finished / f"{name}.jsonl" for name in TEXTS},
        objective={"name": "pretrain", "bos": "always", "eos": False},
        columns={"text": "content"},
        max_seq_len=SIZE,
    )
    last = metrics(finished)[-1]
    assert scored.metrics["loss"].value == pytest.approx(last["eval/loss"], abs=2e-3)
    assert scored.sets["new"]["loss"].value == pytest.approx(last["eval/new/loss"], abs=2e-3)
    assert scored.tokens == sum(record["data/supervised_tokens"] for record in metrics(finished))
    for objective, text in (
        ("reward", "has neither a mean loss of tokens nor"),
        ({"name": "pretrain", "x": 1}, "is not valid: key x: "),
    ):
        with pytest.raises(ConfigError, match=text):
            evaluate("m", "a.txt", objective=objective)


def test_the_run_says_what_it_does_at_a_cut(finished: Path) -> None:
    printed = (finished / "printed.txt").read_text()
    assert "long texts are cut" in " ".join(printed.split())
    assert "eval/new/loss" in printed
    assert "eval/old/loss" in printed


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder)
    return load_tokenizer(str(folder / "model"))


def rows_of(folder: Path, tokenizer: PreTrainedTokenizerBase, objective: Any, **data: Any) -> PreparedRows:
    given = {"train": write(folder, "new"), "columns": {"text": "content"}, "packing": False, "max_dropped_ratio": 1}
    tree = {"model": "m", "data": given | data | {"cache_dir": str(folder / "cache")}, "objective": objective}
    (folder / "run.json").write_text(json.dumps(tree | {"output_dir": "o"}))
    config = read_config(folder / "run.json")
    kind = RowKind.of(config.objective)
    return prepare_rows(config.data, "train", tokenizer=tokenizer, limits=TokenLimits(SIZE, 128), kind=kind)


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("bos", ["auto", "always", "never"])
def test_texts_begin_and_end_by_the_rules(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, bos: str, eos: bool, adds_bos: bool
) -> None:
    tokenizer.add_bos_token = adds_bos
    rows = rows_of(tmp_path, tokenizer, {"name": "pretrain", "bos": bos, "eos": eos})
    begins = bos == "always" or (bos == "auto" and adds_bos)
    documents = [rows.document(number)[0] for number in range(rows.counts.documents)]
    first = [tokenizer.bos_token_id] * begins
    last = [tokenizer.eos_token_id] * eos
    whole = [[*first, *tokenizer(text, add_special_tokens=False)["input_ids"], *last] for text in TEXTS["new"]]
    assert documents[0] == whole[0]
    assert rows.counts.supervised == sum(len(ids) - 1 for ids in whole)
    # A single character without a first or a last token is nothing to predict.
    assert rows.counts.nothing_supervised == (0 if begins or eos else 1)
    assert rows.counts.truncated_tokens == 0
    joined: list[int] = []
    for before, after in pairwise([[], *documents]):
        is_next_piece = len(before) == SIZE and after[0] == before[-1] and len(joined) > 0
        joined += after[1:] if is_next_piece else after
    assert sorted(joined) == sorted(i for ids in whole if len(ids) > 1 for i in ids)


def test_a_stream_cuts_texts_alike(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_bos_token = False
    config = DataConfig.model_validate({"train": write(tmp_path, "old"), "columns": {"text": "content"}})
    kind = RowKind("text", "pretrain", bos="never")
    rows = open_stream(config, "train", tokenizer=tokenizer, limits=TokenLimits(SIZE, 128), kind=kind)
    plan = BatchPlan(7, 1, 0, 1, 0, shuffle=False, pad_token_id=0, row_len=SIZE)
    (batch,) = streaming_batches(rows, plan, steps=1)
    targets = sum(int((micro.labels != IGNORE_INDEX).sum()) for micro in batch.micro)
    assert targets == batch.num_supervised_tokens == sum(map(len, TEXTS["old"]))


def test_a_text_longer_than_the_models_rows_is_no_warning(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """It is cut; transformers would say that it leads to indexing errors."""
    tokenizer.model_max_length = 5
    logging.get_logger().addHandler(caplog.handler)
    rows_of(tmp_path, tokenizer, "pretrain")
    logging.get_logger().removeHandler(caplog.handler)
    assert "Token indices" not in caplog.text


@pytest.mark.parametrize(
    ("row", "hint"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "objective sft"),
        ({"prompt": "a", "completion": "b"}, "objective sft"),
        ({"body": "a"}, "name them under data.columns"),
    ],
)
def test_rows_that_are_no_plain_text_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], hint: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(
        DataError, match=r"rows\.jsonl line 1 has columns .* pretrain is trained on plain text"
    ) as caught:
        rows_of(tmp_path, tokenizer, "pretrain", train=str(file), columns={})
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"layout": "messages"}, "data.layout is messages, and objective pretrain is trained on plain text"),
        (
            {"train_on": "last_assistant"},
            "`data.train_on` is 'last_assistant' and has no effect: objective is pretrain",
        ),
    ],
)
def test_keys_of_dialogue_are_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, data: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of(tmp_path, tokenizer, "pretrain", **data)
    assert text in caught.value.message


def test_a_first_token_that_the_tokenizer_lacks_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    name, tokenizer.bos_token = tokenizer.bos_token, None
    try:
        with pytest.raises(DataError, match=r"has no bos_token, and objective\.bos is always"):
            rows_of(tmp_path, tokenizer, {"name": "pretrain", "bos": "always"})
    finally:
        tokenizer.bos_token = name
