"""The run file: strict, with the nearest name and the line."""

from pathlib import Path

import pytest

from ds_finetune.config import RunConfig, dump_config, read_config
from ds_finetune.errors import ConfigError

MINIMAL = "model: some/model\ndata: {train: a.jsonl}\noutput_dir: runs/x\n"


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def test_minimal_file_has_defaults_and_survives_a_round_trip(run_file: Path, tmp_path: Path) -> None:
    config = read_config(run_file)
    assert (config.model.path, config.data.train, config.train.duration) == ("some/model", ("a.jsonl",), "1 epochs")
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert read_config(again) == config


def test_override_replaces_and_creates(run_file: Path) -> None:
    config = read_config(run_file, ["optim.lr=1e-3", "model.weights=random", "train.for=3 epochs", "data.train=[a.json,b.json]"])
    assert (config.optim.lr, config.model.weights, config.model.path) == (1e-3, "random", "some/model")
    assert (config.train.duration, config.data.train) == ("3 epochs", ("a.json", "b.json"))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("train: {micro_batchsize: 2}\n", "line 4: unknown key `train.micro_batchsize`", "did you mean `micro_batch_size`?"),
        ("optim: {lr: 0}\n", "line 4: `optim.lr` is 0: Input should be greater than 0", "config schema"),
        ("train: {for: 3 weeks}\n", "`train.for` is '3 weeks': `3 weeks` is not a duration", "config schema"),
        ("model: again\n", "`model` is given twice, in lines 1 and 4", "keep one"),
        ("data: [\n", "is not YAML", "indentation"),
    ],
)
def test_mistakes_name_line_and_way_out(run_file: Path, text: str, message: str, hint: str) -> None:
    run_file.write_text(MINIMAL + text if "data" not in text else text)
    with pytest.raises(ConfigError) as caught:
        read_config(run_file)
    assert message.replace("Input should be ", "") in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "override `optim.lr` is not of the form section.key=value"),
        ("output_dir.x=1", "`output_dir` is `runs/x`, not a section"),
        ("optim.lrr=1", "unknown key `optim.lrr`"),
    ],
)
def test_bad_override(run_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(run_file, [override])
    assert message in caught.value.message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml` does not exist"):
        read_config(tmp_path / "none.yaml")


def test_every_field_is_documented() -> None:
    schema = RunConfig.model_json_schema(by_alias=True)
    sections = [schema, *schema["$defs"].values()]
    silent = [f"{s['title']}.{name}" for s in sections for name, field in s["properties"].items() if not field.get("description")]
    assert not silent
