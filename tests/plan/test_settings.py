"""Settings of a run: the sections of its run file, and what is known beside them."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.config.sections import ParallelConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings, sections_of
from ds_finetune.system.world import World

TREE = {"model": "m", "data": {"train": "t"}, "output_dir": "o"}


def test_settings_of_a_file_of_its_tree_and_of_its_configuration_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(TREE))
    config = read_config(file)
    assert RunSettings.of(file) == RunSettings.of(TREE) == RunSettings.of(config)
    assert sections_of(RunSettings.of(file)) == sections_of(config)


def test_every_section_is_one_of_the_run_file() -> None:
    names, of_ranks = (
        {each.name for each in fields(RunSettings)},
        {"mesh", "device", "deepspeed_config", "accumulation"},
    )
    assert sections_of(RunSettings.of(TREE)).keys() == names - of_ranks
    assert names - of_ranks == RunConfig.model_fields.keys() - {"log", "launch", "output_dir"}


def test_what_a_run_file_may_not_say_is_refused() -> None:
    with pytest.raises(ConfigError, match="parralel"):
        RunSettings.of(TREE | {"parralel": {"tp": 2}})
    with pytest.raises(AttributeError):
        RunSettings.of(TREE).parralel  # type: ignore[attr-defined] # noqa: B018


def test_a_changed_section_changes_the_plan() -> None:
    run, world = RunSettings.of(TREE | {"deepspeed": {"zero_optimization": {"stage": 1}}}), World(0, 2, 0, 2, "a test")
    changed = replace(run, parallel=ParallelConfig(tp=2))
    assert [make_plan(each, world=world, device="cpu").dp for each in (run, changed)] == [2, 1]
