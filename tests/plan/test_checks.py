"""The table of refused combinations: each message can be written, and the defaults are accepted."""

import string
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError, ModelError
from ds_finetune.plan import checks, inexact, model_checks, rollout_checks
from ds_finetune.plan.checks import BEFORE_MODEL, LENGTH_CHECKS, length_notes
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.model_checks import MODEL_CHECKS
from ds_finetune.plan.settings import Refusal, RunSettings
from tests.checking import CHECKS, check, settings_of, with_known

TREE = {"model": "m", "data": {"train": "t"}, "output_dir": "o"}
SECTIONS = {"lora": {}, "router": {}, "profile": {"steps": "1"}, "objective": {"name": "distill", "teacher": "t"}}
GRPO: dict[str, Any] = {"objective": {"name": "grpo"}}
STAGES: list[tuple[Iterable[Iterable[Refusal[Any]]], dict[str, Any]]] = [
    (BEFORE_MODEL.values(), {}),
    (MODEL_CHECKS.values(), {"model_json": {"model_type": "llama"}}),
    ([LENGTH_CHECKS], {"steps": 1}),
]
"""Checks by the stage that they get, each with what is known at that stage."""
ROWS_OF_STAGE = [(row, known) for tables, known in STAGES for row in chain.from_iterable(tables)]


@pytest.mark.parametrize(("row", "known"), ROWS_OF_STAGE, ids=[row.message[:40] for row, _ in ROWS_OF_STAGE])
def test_each_field_of_a_message_is_a_setting_or_a_value_of_its_check(row: Refusal, known: dict[str, Any]) -> None:
    modules = (checks, inexact, model_checks, rollout_checks)
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules)
    names = [name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(row.message + row.hint) if name]
    # Each section that may be left out is there, of objectives whose keys messages name.
    settings = [settings_of(TREE | SECTIONS | objective, **known) for objective in ({}, GRPO)]
    for name in names:
        if f'"{name}":' not in source:
            assert any(_has(run, name) for run in settings), name


def _has(run: Any, name: str) -> bool:
    try:
        attrgetter(name)(run)
    except AttributeError:
        return False
    return True


def test_the_defaults_of_the_run_file_are_refused_by_no_check() -> None:
    tree = {"zero_optimization": {"stage": 2}}
    check(settings_of(RunConfig.model_validate(TREE), deepspeed_config=tree), *BEFORE_MODEL)
    check(settings_of(RunConfig.model_validate(TREE), steps=10, rows=1000), "length of the run")


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
    settings = RunSettings.of(RunConfig.model_validate(TREE), deepspeed_config={"zero_optimization": {"stage": 2}})
    plain = replace(settings, mesh=mesh or settings.mesh)
    _check_refusal(
        subject,
        said,
        replace(_with_sections(plain, sections), deepspeed_config={"zero_optimization": {"stage": 2} | zero}),
    )
    check(plain, subject)


def grpo(**keys: object) -> dict[str, Any]:
    return {"objective": {"name": "grpo", **keys}}


SAMPLED: list[tuple[str, dict[str, Any], dict[str, Any], Mesh | None]] = [
    (
        "train.global_batch_size 48 is not rollout.prompts_per_step 32 x objective.group_size 8 = 256",
        GRPO | {"train": {"global_batch_size": 48}},
        {},
        None,
    ),
    ("rollout.temperature 0.7: answers would not be sampled", GRPO | {"rollout": {"temperature": 0.7}}, {}, None),
    (
        "rollout.max_new_tokens 256 leaves no room for a prompt in a row of train.max_seq_len 256",
        GRPO | {"train": {"max_seq_len": 256}},
        {},
        None,
    ),
    ("rollout.ahead 1 with objective.mismatch none: answers", GRPO | {"rollout": {"ahead": 1}}, {}, None),
    (
        "rollout.ahead 1 with objective.no_spread resample",
        grpo(mismatch="token", no_spread="resample") | {"rollout": {"ahead": 1}},
        {},
        None,
    ),
    (
        "reward `length` begins to fall after 256 tokens (max_tokens less soft_tokens), and rollout.max_new_tokens is "
        "256: no answer is long enough",
        GRPO | {"rewards": [{"reward": "length", "max_tokens": 300, "soft_tokens": 44}]},
        {},
        None,
    ),
    ("rollout.engine vllm without rollout.address", GRPO | {"rollout": {"engine": "vllm"}}, {}, None),
    ("objective grpo without rewards: sampled answers have no score", GRPO, {}, None),
    ("objective.ratio capped without objective.ratio_cap", grpo(ratio="capped"), {}, None),
    ("adapters_off without lora: there are no adapters", grpo(reference="adapters_off"), {}, None),
    ("objective.reference start with lora, whose", grpo(reference="start") | {"lora": {}}, {}, None),
    ("objective.kl_weight 0.1 without a reference model", grpo(kl_weight=0.1), {}, None),
    ("objective.kl_weight 0.1 without a", grpo(kl_weight=0.1, reference="none") | {"lora": {}}, {}, None),
    ("train.for `1000 tokens`: how long the sampled", GRPO | {"train": {"for": "1000 tokens"}}, {}, None),
    ("objective grpo with mtp.train true is not tested", GRPO | {"mtp": {"train": True}}, {}, None),
    ("objective grpo with indexer.train true is not tested", GRPO | {"indexer": {"train": True}}, {}, None),
    (
        "objective grpo with data.streaming true is not tested",
        GRPO | {"data": {"train": "t", "streaming": True}},
        {},
        None,
    ),
    ("objective grpo with lora.quantize nf4 is not tested", GRPO | QUANTIZED, {}, None),
    ("objective grpo with offload to nvme is not tested", GRPO, NVME, None),
    ("objective grpo with inexact option zenflow", GRPO | {"inexact": "zenflow"}, {}, None),
    ("x pp 2 is not tested", GRPO, {}, Mesh(0, 2, pp=2)),
    ("x sp 2 x tp 2 is not tested", GRPO, {}, Mesh(0, 4, sp=2, tp=2)),
]


@pytest.mark.parametrize(("said", "sections", "zero", "mesh"), SAMPLED, ids=[case[0][:50] for case in SAMPLED])
def test_what_sampled_answers_are_refused_with(
    said: str, sections: dict[str, Any], zero: dict[str, Any], mesh: Mesh | None
) -> None:
    _check_refusal("sampled answers", said, sampled(sections, zero, mesh))


def sampled(sections: dict[str, Any], zero: dict[str, Any] | None = None, mesh: Mesh | None = None) -> RunSettings:
    run = _with_sections(RunSettings.of(RunConfig.model_validate(TREE)), sections)
    return replace(run, deepspeed_config={"zero_optimization": zero or {}}, mesh=mesh or Mesh(0, 2))


def test_each_refusal_of_sampled_answers_is_tested() -> None:
    applied = {row for _, *given in SAMPLED for row in CHECKS["sampled answers"] if row.applies(sampled(*given))}
    assert applied == set(CHECKS["sampled answers"])
    for mesh in (Mesh(0, 2), Mesh(0, 2, tp=2), Mesh(0, 2, sp=2)):
        check(sampled(GRPO | {"rewards": ["number"]}, mesh=mesh), "sampled answers")


def test_a_prompt_is_a_row_of_the_data() -> None:
    """A step uses prompts_per_step rows, although its batch has more answers than the data have prompts."""
    run = settings_of(RunConfig.model_validate(TREE | GRPO), steps=10, rows=100)
    assert (run.run.train.global_batch_size, length_notes(run)) == (256, [])
    check(run, "length of the run")
    few = replace(run, rows=31)
    assert length_notes(few) == [
        "rollout.prompts_per_step 32 is more than the 31 prompts of an epoch: each step sees rows more than once"
    ]
    with pytest.raises(ConfigError, match=r"set rollout.prompts_per_step to at most 31|would be joined"):
        check(few, "length of the run")


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
            "sampled answers of the model",
            "objective grpo of a model with attention_dropout 0.1: answers",
            GRPO,
            {"model_json": LLAMA | {"attention_dropout": 0.1, "resid_pdrop": 0.0}},
            GRPO,
            {"model_json": LLAMA | {"attention_dropout": 0.0}},
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
    _check_refusal(subject, said, with_known(_with_sections(settings, sections), **fields))
    check(with_known(_with_sections(settings, accepted), **accepted_fields), subject)


def _with_sections(settings: RunSettings, sections: dict[str, Any]) -> RunSettings:
    tree = TREE | sections | {"model": {"path": "m"} | sections.get("model", {})}
    return RunSettings.of(
        RunConfig.model_validate(tree), mesh=settings.mesh, deepspeed_config=settings.deepspeed_config
    )


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
