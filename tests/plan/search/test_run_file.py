"""The overrides that a search prints for a layout: a run file with them has that layout and nothing else changed."""

from pathlib import Path

import pytest

from ds_finetune.config.run_file import write_run_file
from ds_finetune.config.schema import read_config
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import OutputError
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.search.candidates import Activations, Layout, decided, layout_overrides
from ds_finetune.plan.settings import RunSettings
from tests.conftest import ROOT
from tests.planning import layout_of

SHIPPED = sorted((ROOT / "ds_configs" / "runs").glob("*.yaml"))
LAYOUTS = (
    Layout(ParallelConfig(tp=2, ep=4), 3, "optimizer", 2, Activations(tiled_mlp=True, activation_offload=True)),
    Layout(ParallelConfig(), 3, "none", 4, Activations("none")),
    Layout(ParallelConfig(pp=2), 1, "none", 1, Activations()),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("source", SHIPPED, ids=lambda path: path.stem)
def test_a_run_with_the_overrides_has_the_layout(source: Path, layout: Layout) -> None:
    given = read_config(source)
    run = RunSettings.of(given)
    changed = read_config(source, layout_overrides(layout, run))
    assert layout_of(changed) == layout
    choices = decided(given_choices(changed.deepspeed)[0])
    sections = layout.sections(run)
    assert choices == decided(sections["deepspeed"])
    assert changed.model_copy(update={"deepspeed": None}) == given.model_copy(update=sections | {"deepspeed": None})
    assert layout_overrides(layout, RunSettings.of(changed)) == []


def test_a_run_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    write_run_file(file, "model: m\n")
    with pytest.raises(OutputError, match="exists already"):
        write_run_file(file, "model: n\n")
    assert file.read_text() == "model: m\n"
