"""The table of refused combinations: each message can be written, and the defaults are accepted."""

import string
from itertools import chain
from operator import attrgetter
from pathlib import Path

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.plan import checks, inexact
from ds_finetune.plan.checks import BEFORE_MODEL, CHECKS, check
from ds_finetune.plan.settings import Refusal, RunSettings

ROWS = [*chain.from_iterable(CHECKS.values())]
TREE = {"model": "m", "data": {"train": "t"}, "output_dir": "o"}
SECTIONS = {"lora": {}, "router": {}, "profile": {"steps": "1"}, "objective": {"name": "distill", "teacher": "t"}}
FULL = RunSettings(config=RunConfig.model_validate(TREE | SECTIONS))
"""Settings with each section that may be left out."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.message[:40])
def test_each_field_of_a_message_is_a_setting_or_a_value_of_its_check(row: Refusal) -> None:
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (checks, inexact))
    names = [name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(row.message + row.hint) if name]
    for name in names:
        if f'"{name}":' not in source:
            attrgetter(name)(FULL)


def test_the_defaults_of_the_run_file_are_refused_by_no_check() -> None:
    tree = {"zero_optimization": {"stage": 2}}
    check(
        RunSettings(config=RunConfig.model_validate(TREE), tree=tree, steps=10, rows=1000),
        *BEFORE_MODEL,
        "length of the run",
    )
