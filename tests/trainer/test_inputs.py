"""What is said of the data before a run: held-out rows that are trained on, splits that are left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ds_finetune.config.schema import read_config
from ds_finetune.console.tables import OUT
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.world import World
from ds_finetune.trainer.batches import mixture_lines
from ds_finetune.trainer.inputs import RunInputs
from ds_finetune.trainer.prepare import PreparedRun
from ds_finetune.trainer.preview import marked_spans, preview_of
from ds_finetune.trainer.show import show_plan
from tests.planning import prepared_run
from tests.running import ROWS, tiny_task


def run_of(folder: Path, **data: Any) -> PreparedRun:
    """The tiny task with other data."""
    config = read_config(tiny_task(folder, data=data))
    return prepared_run(config, make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu"))


def inputs_of(folder: Path, **data: Any) -> tuple[RunInputs, str]:
    """The inputs of the tiny task, and what is printed of them."""
    run = run_of(folder, **data)
    with OUT.capture() as shown:
        show_plan(run)
    return run.inputs, shown.get()


def test_held_out_rows_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    inputs, shown = inputs_of(tmp_path)
    assert inputs.notes == ()
    assert "held-out data" in shown
    train, held_out = (tmp_path / f"{name}.jsonl" for name in ("train", "eval"))
    repeated = held_out.read_text().splitlines()[:3]
    again = [json.dumps(json.loads(line) | {"id": 1}) for line in repeated]
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join([*train.read_text().splitlines(), *again]))
    _, shown = inputs_of(tmp_path, train=str(both))
    assert (
        f"data.eval repeats training data: 3 of {ROWS} held-out documents have the tokens of a training document"
        in shown
    )


def test_a_stream_names_files_that_are_in_both(tmp_path: Path) -> None:
    inputs, shown = inputs_of(tmp_path, streaming=True, eval=str(tmp_path / "train.jsonl"))
    assert f"data.eval has training files: {tmp_path / 'train.jsonl'}" in shown
    before = inputs.train.fingerprint()
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text() + "\n")
    assert inputs.train.fingerprint() != before


@pytest.mark.parametrize("how", ["among padding", "as the last", "in another tokenizer"])
def test_adapters_on_tokens_that_the_base_never_trained_are_noted(how: str, tmp_path: Path, shared_data: Path) -> None:
    """A token is added to the 512 of a trained model, as users do by transformers; its embedding is transformers' own."""
    source, base = shared_data / "models" / "stories260K", tmp_path / "base"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer" if how == "in another tokenizer" else base)
    model.resize_token_embeddings(513 if how == "as the last" else 576, mean_resizing=how == "as the last")
    model.save_pretrained(base)
    names = {"path": str(base)} | ({"tokenizer": str(tmp_path / "tokenizer")} if how == "in another tokenizer" else {})
    notes = []
    for text in ("Once there was a cat", "Once there was a <tool>"):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n" for n in range(8)))
        run_file = tiny_task(
            tmp_path,
            data={"train": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "rows.jsonl")},
            objective="pretrain",
            lora={"rank": 8},
        )
        config = read_config(run_file, ["model=" + json.dumps(names)])
        plan = make_plan(RunSettings.of(config), world=World(0, 1, 0, 1, "a test"), device="cpu")
        notes.append([note for note in prepared_run(config, plan).inputs.notes if "lora" in note])
    of_cat, of_tool = notes
    assert not any("<tool>" in note for note in of_cat)
    assert len(of_tool) == 1
    assert "'<tool>' (512)" in of_tool[0]


def test_splits_that_are_left_out_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    tiny_task(tmp_path)
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").rename(folder / f"{name}.jsonl")
    inputs, shown = inputs_of(tmp_path, train=str(folder), eval=str(folder))
    assert f"data.train `{folder}`: split train is read, 1 of 2 files" in shown
    assert f"data.eval `{folder}`: split test is read, 1 of 2 files" in shown
    assert inputs.held_out is not None


def test_sources_with_weights_are_named_with_their_passes(tmp_path: Path) -> None:
    tiny_task(tmp_path)
    train, held_out = (str(tmp_path / f"{name}.jsonl") for name in ("train", "eval"))
    run = run_of(tmp_path, train={train: 3, held_out: 1}, eval={"old": train, "new": held_out})
    # Three steps of eight rows.
    less, more = mixture_lines(run)
    assert more.startswith(f"{train}: 75.0% of the rows and ")
    assert more.endswith(f"of the run, 0.56 passes over {ROWS} rows")
    assert less.endswith(f"of the run, 0.19 passes over {ROWS} rows")
    with OUT.capture() as shown:
        show_plan(run)
    named = [line.split("  ")[0] for line in shown.get().splitlines()]
    assert named.count("data.train") == 2
    assert {"held-out data old", "held-out data new"} <= {*named}
    assert f"data.eval.new repeats training data: {ROWS} of {ROWS} held-out" in shown.get()
    assert run.inputs.held_out.keys() == {"eval/old", "eval/new"}
    with pytest.raises(
        ConfigError, match=r"gives weights to .*, which needs the number of rows, but with data\.streaming it"
    ):
        inputs_of(tmp_path, train={train: 3, held_out: 1}, streaming=True)
    with OUT.capture() as shown:
        OUT.print(preview_of(RunSettings.of(run.config), samples=2))
    assert f"{train}: {ROWS} of 43 rows of an epoch, drawn from {ROWS}" in shown.get()
    assert f"{held_out}: 11 of 43 rows of an epoch, drawn from {ROWS}" in shown.get()
    assert shown.get().count("⟦") == 4
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(
        DataError, match=r"gives `.*empty\.jsonl` \(1 files\) a weight, but no row of it can be trained"
    ):
        inputs_of(tmp_path, train={train: 3, str(empty): 1})


def test_printed_spans_are_the_text_that_is_trained(shared_data: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "models" / "stories260K")
    ids, answer = tokenizer("user: q\nassistant:")["input_ids"], tokenizer.encode("  b", add_special_tokens=False)
    spans = list(marked_spans([*ids, *answer], [False] * len(ids) + [True] * len(answer), tokenizer))
    assert "".join(text for text, _ in spans) == tokenizer.decode([*ids, *answer])
    assert spans[1] == ("   b", True)
