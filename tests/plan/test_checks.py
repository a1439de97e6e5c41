"""The table of refused combinations: each message can be written, and the defaults are accepted."""

import string
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.plan import checks, inexact
from ds_finetune.plan.checks import BEFORE_MODEL, CHECKS, check
from ds_finetune.plan.mesh import Mesh
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


QUANTIZED, TP, NVME = {"lora": {"quantize": "nf4"}}, Mesh(0, 2, tp=2), {"offload_param": {"device": "nvme"}}
OFFLOAD, TILED = {"train": {"activation_offload": True}}, {"train": {"tiled_mlp": True}}


@pytest.mark.parametrize(
    ("subject", "said", "sections", "zero", "mesh"),
    [
        ("activations", "activation_offload true with mtp.train true", OFFLOAD | {"mtp": {"train": True}}, {}, None),
        ("activations", "activation_offload true with indexer.train", OFFLOAD | {"indexer": {"train": True}}, {}, None),
        ("activations", "activation_offload true with lora.quantize nf4", OFFLOAD | QUANTIZED, {}, None),
        ("activations", "tiled_mlp true with mtp.train true", TILED | {"mtp": {"train": True}}, {}, None),
        ("activations", "tiled_mlp true with indexer.train true", TILED | {"indexer": {"train": True}}, {}, None),
        ("activations", "tiled_mlp true with lora.quantize nf4", TILED | QUANTIZED, {}, None),
        (
            "LoRA",
            "lora with model.resize_vocabulary true",
            {"lora": {}, "model": {"resize_vocabulary": True}},
            {},
            None,
        ),
        ("LoRA", "lora with model.context", {"lora": {}, "model": {"context": 8192}}, {}, None),
        ("LoRA", "lora with offload to nvme", {"lora": {}}, NVME, None),
        ("LoRA", "lora with optim.name Muon", {"lora": {}, "optim": {"name": "Muon"}}, {}, None),
        ("LoRA", "lora with zero_quantized_weights true", {"lora": {}}, {"zero_quantized_weights": True}, None),
        ("LoRA", "lora with zero_quantized_gradients true", {"lora": {}}, {"zero_quantized_gradients": True}, None),
        ("multi-token prediction", "mtp.train true with offload to nvme", {"mtp": {"train": True}}, NVME, None),
        ("layout", "zero_quantized_weights True is not tested", {}, {"zero_quantized_weights": True}, TP),
        ("layout", "gradient_predivide_factor 2.0 is not tested", {}, {"gradient_predivide_factor": 2.0}, TP),
        ("ranks", "is 4 seconds, and the longest of watchdog", {"watchdog": {"collective": "4 seconds"}}, {}, None),
    ],
)
def test_settings_are_refused_together(
    subject: str, said: str, sections: dict[str, Any], zero: dict[str, Any], mesh: Mesh | None
) -> None:
    """Combinations that no other test gives; each is refused by one row, and is accepted without its settings."""
    tree = TREE | sections | {"model": {"path": "m"} | sections.get("model", {})}
    settings = RunSettings(config=RunConfig.model_validate(TREE), tree={"zero_optimization": {"stage": 2}})
    plain = replace(settings, mesh=mesh or settings.mesh)
    run = replace(plain, config=RunConfig.model_validate(tree), tree={"zero_optimization": {"stage": 2} | zero})
    found = []
    for row in CHECKS[subject]:
        try:
            row.raise_for(run)
        except (ConfigError, ModelError) as refused:
            found.append(refused)
    assert [error.message for error in found if said in error.message], found
    assert all(error.hint for error in found)
    for row in CHECKS[subject]:
        row.raise_for(plain)
