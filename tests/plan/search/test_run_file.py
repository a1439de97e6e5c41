"""Run files that are written with another layout: comments stay, and `train` reads the layout back."""

from pathlib import Path

import pytest
import yaml

from ds_finetune.config.edit_run_file import override_values, with_values, write_run_file, written_run_file
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import OutputError
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.search.candidates import Activations, Layout, decided, layout_keys
from ds_finetune.plan.settings import RunSettings
from tests.conftest import ROOT
from tests.planning import layout_of

SHIPPED = sorted((ROOT / "ds_configs" / "runs").glob("*.yaml"))
LAYOUTS = (
    Layout(ParallelConfig(tp=2, ep=4), 3, "optimizer", 2, Activations(tiled_mlp=True, activation_offload=True)),
    Layout(ParallelConfig(), 3, "none", 4, Activations("none")),
    Layout(ParallelConfig(pp=2), 1, "none", 1, Activations()),
)
BLOCKS = """\
# A run.
model: {path: a}   # the model
data:
  train: x.jsonl  # rows
# The sizes were measured.
parallel:
  tp: 4   # heads
  pp: 2
train:
  for: 1 steps
  # a comment inside
  max_seq_len: 8
output_dir: o"""


def _written(source: Path, layout: Layout) -> tuple[str, RunConfig]:
    given = read_config(source)
    run = RunSettings.of(given)
    keys, sections = layout_keys(layout, run), layout.sections(run)
    wanted = given.model_copy(update=sections | {"deepspeed": keys.get("deepspeed", given.deepspeed)})
    text = written_run_file(source, keys, wanted, header=["a layout"])
    return text, given.model_copy(update=sections)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_run_file_keeps_its_comments(source: Path, layout: Layout, tmp_path: Path) -> None:
    text, wanted = _written(source, layout)
    comments = [line for line in source.read_text().splitlines() if line.strip().startswith("#")]
    assert [line for line in text.splitlines() if line.strip().startswith("#")] == ["# a layout", *comments]
    file = tmp_path / "run.yaml"
    write_run_file(file, text, option="--write")
    found = read_config(file)
    assert layout_of(found) == layout
    choices = {"deepspeed": decided(given_choices(found.deepspeed)[0])}
    assert found.model_copy(update=choices) == wanted.model_copy(update={"deepspeed": decided(wanted.deepspeed)})
    with pytest.raises(OutputError, match="exists already"):
        write_run_file(file, text, option="--write")


def test_blocks_and_short_forms_are_edited_where_they_are(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text(BLOCKS)
    text, _ = _written(source, LAYOUTS[0])
    assert "parallel: {tp: 2, ep: 4}\ntrain:\n  for: 1 steps\n  # a comment inside\n  max_seq_len: 8\n" in text
    assert (
        "  micro_batch_size: 2\n  activation_checkpointing: full\n  activation_offload: true\n  tiled_mlp: true\n"
        in text
    )
    assert "# The sizes were measured." in text
    changed = with_values("model: a/b  # short\n", dict(override_values(["model.attention=eager", "optim.lr=1e-3"])))
    assert changed == "model: {path: a/b, attention: eager}  # short\noptim: {lr: 1e-3}\n"


def test_a_file_that_cannot_be_edited_is_written_anew(tmp_path: Path) -> None:
    source = tmp_path / "run.yaml"
    source.write_text("data: &data {train: t.jsonl}\nmodel: m\ntrain: {<<: {for: 1 steps}}\noutput_dir: o\n")
    text, wanted = _written(source, LAYOUTS[1])
    assert RunConfig.model_validate(yaml.safe_load(text)).train == wanted.train
