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
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.settings import Refusal, RunSettings

ROWS = [*chain.from_iterable(CHECKS.values())]
TREE = {"model": "m", "data": {"train": "t"}, "output_dir": "o"}
SECTIONS = {"lora": {}, "router": {}, "profile": {"steps": "1"}, "objective": {"name": "distill", "teacher": "t"}}
FULL = RunSettings.of(RunConfig.model_validate(TREE | SECTIONS))
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
        RunSettings.of(RunConfig.model_validate(TREE), tree=tree, steps=10, rows=1000),
        *BEFORE_MODEL,
        "length of the run",
    )


DISTILL = {"objective": {"name": "distill", "teacher": "t"}}
QUANTIZED, TP, NVME = {"lora": {"quantize": "nf4"}}, Mesh(0, 2, tp=2), {"offload_param": {"device": "nvme"}}
MUON, CLASSES = {"optim": {"name": "Muon"}}, {"objective": {"name": "classification"}}
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
        ("multi-token prediction", "mtp.train true with offload to nvme", {"mtp": {"train": True}}, NVME, None),
        ("layout", "gradient_predivide_factor 2.0 is not tested", {}, {"gradient_predivide_factor": 2.0}, TP),
        ("layout", "prescale_gradients True is not tested", {}, {"prescale_gradients": True}, TP),
        (
            "reduction of gradients",
            "train.reduction_dtype fp32 with train.precision fp16",
            {"train": {"precision": "fp16", "reduction_dtype": "fp32"}},
            {},
            None,
        ),
        ("objective", "optim.name Muon with objective classification would", MUON | CLASSES, {}, None),
        ("ranks", "is 4 seconds, and the longest of watchdog", {"watchdog": {"collective": "4 seconds"}}, {}, None),
    ],
)
def test_settings_are_refused_together(
    subject: str, said: str, sections: dict[str, Any], zero: dict[str, Any], mesh: Mesh | None
) -> None:
    """Combinations that no other test gives; each is refused by one row, and is accepted without its settings."""
    settings = RunSettings.of(RunConfig.model_validate(TREE), tree={"zero_optimization": {"stage": 2}})
    plain = replace(settings, mesh=mesh or settings.mesh)
    _check_refusal(
        subject, said, replace(_with_sections(plain, sections), tree={"zero_optimization": {"stage": 2} | zero})
    )
    check(plain, subject)


LLAMA: dict[str, Any] = {"model_type": "llama", "num_attention_heads": 3, "max_position_embeddings": 64}
TIED = {"num_hidden_layers": 4, "tie_word_embeddings": True}
INDEXED = {
    "model_type": "glm_moe_dsa",
    "index_topk": 16,
    "num_hidden_layers": 4,
    "indexer_types": ["full", "shared"] * 2,
}
PP = {"parallel": {"pp": 2}}
SHORT = {"train": {"max_seq_len": 16}}
EVEN, ODD = ((StageLayers((range(n),)), StageLayers((range(n, 4),))) for n in (2, 1))


@pytest.mark.parametrize(
    ("subject", "said", "sections", "fields", "accepted", "accepted_fields"),
    [
        (
            "activations of the model",
            "train.activation_offload true of model_type mpt is not tested",
            OFFLOAD,
            {"model_json": {"model_type": "mpt"}},
            OFFLOAD,
            {"model_json": LLAMA},
        ),
        (
            "activations of the model",
            "train.tiled_mlp true of model_type mpt is not tested",
            TILED,
            {"model_json": {"model_type": "mpt"}},
            TILED,
            {"model_json": LLAMA},
        ),
        (
            "teacher",
            "train.max_seq_len 65 is more than the 64 positions of the teacher t",
            DISTILL | {"train": {"max_seq_len": 65}},
            {"model_json": LLAMA},
            DISTILL | {"train": {"max_seq_len": 64}},
            {"model_json": LLAMA},
        ),
        (
            "teacher",
            "sp 2 with the teacher t of model_type llama and 3 attention heads is not tested",
            DISTILL | SHORT,
            {"model_json": LLAMA, "mesh": Mesh(0, 2, sp=2)},
            DISTILL | SHORT,
            {"model_json": LLAMA | {"num_attention_heads": 4}, "mesh": Mesh(0, 2, sp=2)},
        ),
        (
            "stages",
            "checkpoint.node_local true with parallel.pp 2 of a model whose first and last stage both hold",
            PP | {"checkpoint": {"node_local": True}},
            {"model_json": LLAMA | TIED},
            PP | {"checkpoint": {"node_local": True}},
            {"model_json": LLAMA | TIED | {"tie_word_embeddings": False}},
        ),
        (
            "length of documents",
            "train.max_seq_len 17 is more than index_topk 16, and a stage of parallel.pp 2 begins with layer 1",
            PP | {"train": {"max_seq_len": 17}},
            {"model_json": INDEXED, "stages": ODD},
            PP | {"train": {"max_seq_len": 17}},
            {"model_json": INDEXED, "stages": EVEN},
        ),
        (
            "length of the run",
            "profile.steps `9-11` ends at step 11, and the run has 10 steps",
            {"profile": {"steps": "9-11"}},
            {"steps": 10},
            {"profile": {"steps": "9-10"}},
            {"steps": 10},
        ),
    ],
)
def test_a_run_that_does_not_fit_its_model_or_its_length_is_refused(
    subject: str,
    said: str,
    sections: dict[str, Any],
    fields: dict[str, Any],
    accepted: dict[str, Any],
    accepted_fields: dict[str, Any],
) -> None:
    settings = RunSettings.of(RunConfig.model_validate(TREE))
    _check_refusal(subject, said, replace(_with_sections(settings, sections), **fields))
    check(replace(_with_sections(settings, accepted), **accepted_fields), subject)


def _with_sections(settings: RunSettings, sections: dict[str, Any]) -> RunSettings:
    tree = TREE | sections | {"model": {"path": "m"} | sections.get("model", {})}
    return RunSettings.of(RunConfig.model_validate(tree), mesh=settings.mesh, tree=settings.tree)


def _check_refusal(subject: str, said: str, run: RunSettings) -> None:
    """One row of the subject refuses the run with this text, and each that refuses it has a hint."""
    refused = []
    for row in CHECKS[subject]:
        try:
            row.raise_for(run)
        except (ConfigError, ModelError) as error:
            refused.append(error)
    assert len([error for error in refused if said in error.message]) == 1, refused
    assert all(error.hint for error in refused)
