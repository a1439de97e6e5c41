"""The section `objective`: its short form, and the errors for names and keys that it does not have."""

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from ds_finetune.config.invalid_keys import explain
from ds_finetune.config.objectives import OBJECTIVES, GrpoObjective
from ds_finetune.config.other_programs import NAMES_OF_OTHER_PROGRAMS
from ds_finetune.config.schema import RunConfig, dump_config, read_config
from ds_finetune.errors import ConfigError

MINIMAL = {"model": "m", "data": {"train": "a.jsonl"}, "output_dir": "o"}


def read(folder: Path, objective: object, *overrides: str) -> RunConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(MINIMAL | {"objective": objective}))
    return read_config(folder / "run.yaml", overrides)


def test_a_name_alone_is_a_section_with_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, "dpo")
    assert config.objective == read(tmp_path, {"name": "dpo", "beta": 0.1}).objective
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "again.yaml") == config
    assert read(tmp_path, "dpo", "objective.beta=0.3").objective.model_dump()["beta"] == 0.3
    assert read(tmp_path, "dpo", "objective=kto").objective.name == "kto"


@pytest.mark.parametrize(
    ("objective", "message", "hint"),
    [
        ("dpoo", "`objective` is 'dpoo', which is no objective", "did you mean `dpo`? objectives are sft, pre"),
        ("IPO", "`objective` is 'IPO'", "did you mean `{name: dpo, loss: ipo}`?"),
        ("apo-zero", "`objective` is 'apo-zero'", "did you mean `{name: dpo, loss: apo_zero}`?"),
        ("rm", "`objective` is 'rm'", "did you mean `reward`?"),
        ("PPO", "`objective` is 'PPO', which trains on sampled answers and is not", "train grpo, which compares rewards"),
        ("GRPO", "`objective` is 'GRPO'", "did you mean `grpo`?"),
        ("Dr-GRPO", "`objective` is 'Dr-GRPO'", "did you mean `{name: grpo, aggregation: fixed}`?"),
        ({"name": "grpo", "beta": 0.1}, "unknown key `objective.beta` of objective grpo", "`objective.kl_weight`?"),
        ({"name": "grpo", "epsilon": 0.1}, "unknown key `objective.epsilon` of objective grpo", "`objective.clip_low`?"),
        ({"name": "grpo", "epsilon_high": 5}, "unknown key `objective.epsilon_high` of", "For CISPO set objective.ratio_"),
        ({"name": "grpo", "top_p": 0.9}, "unknown key `objective.top_p` of objective grpo", "`rollout.temperature`?"),
        ({"name": "grpo", "group_size": 1}, "`objective.group_size` is 1: it should be at least 2", "(at least 2, by"),
        ("poetry", "`objective` is 'poetry'", "objectives are sft, pretrain, classification, dpo, simpo, cpo, orpo, reward"),
        (5, "`objective` is 5: it should be a name or a section", "objectives are sft"),
        (None, "`objective` is None: it should be a name or a section", "objectives are sft"),
        ({"beta": 0.1}, "`objective` is {'beta': 0.1}: it should be a name", "`objective: {name: dpo, beta: 0.1}`"),
        ({"name": "dpo", "bta": 1}, "unknown key `objective.bta` of objective dpo", "did you mean `beta`?"),
        (
            {"name": "simpo", "nll_weight": 1},
            "unknown key `objective.nll_weight` of objective simpo",
            "`nll_weight` is a key of dpo, cpo; known here: name, beta, gamma",
        ),
        ({"name": "dpo", "rpo_alpha": 1}, "unknown key `objective.rpo_alpha`", "did you mean `objective.nll_weight`?"),
        ({"name": "dpo", "lr": 1}, "unknown key `objective.lr` of objective dpo", "did you mean `optim.lr`?"),
        ({"name": "dpo", "beta": 0}, "`objective.beta` is 0: it should be greater than 0", "(above 0, by default 0.1)"),
        ({"name": "dpo", "loss": "bco"}, "`objective.loss` is 'bco': it should be 'sigmoid', 'robust'", "(by default"),
        ({"name": "dpo", "beta": None}, "`objective.beta` is None: it should be a valid number", "or leave it out"),
    ],
)  # fmt: skip
def test_mistakes_name_line_and_hint(tmp_path: Path, objective: object, message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, objective)
    lines = (tmp_path / "run.yaml").read_text().splitlines()
    assert hint in caught.value.hint
    key = "objective" if "`objective`" in message else message.split("`")[1].rpartition(".")[2]
    (number,) = (number for number, line in enumerate(lines, start=1) if line.strip().startswith(f"{key}:"))
    assert f"run.yaml line {number}: {message}" in caught.value.message


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("beta", "objective.beta"),
        ("dpo_beta", "objective.beta"),
        ("loss_type", "objective.loss"),
        ("pref_loss", "objective.loss"),
        ("pref_ftx", "objective.nll_weight"),
        ("simpo_gamma", "objective.gamma"),
        ("kto_chosen_weight", "objective.desirable_weight"),
        ("undesirable_weight", "objective.undesirable_weight"),
        ("ref_model", "objective.reference"),
        ("num_labels", "objective.num_labels"),
        ("rlhf_type", "objective"),
        ("num_generations", "objective.group_size"),
        ("scale_rewards", "objective.advantage"),
        ("num_iterations", "rollout.steps_per_rollout"),
        ("max_completion_length", "rollout.max_new_tokens"),
        ("top_k", "rollout.temperature"),
        ("use_vllm", "rollout.engine"),
        (
            "weight_transfer_config",
            "rollout.engine`? It is own or vllm, whose server loads weights from a folder; NCCL and",
        ),
        ("vllm_server_base_url", "rollout.address"),
    ],
)
def test_words_of_other_programs_find_their_key(key: str, meant: str) -> None:
    for tree in ({key: 1}, {"train": {key: 1}}):
        with pytest.raises(ValidationError) as invalid:
            RunConfig.model_validate(MINIMAL | tree)
        assert f"did you mean `{meant}" in explain(invalid.value, RunConfig, "run.yaml", {}).hint


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine=sglang", "`rollout.engine` is 'sglang': SGLang is not supported; vllm is"),
        ("rollout.engine=trt", "`rollout.engine` is 'trt': it should be 'own' or 'vllm'"),
        (
            "objective.reference=model",
            "`objective.reference` is 'model': of other models there is only the one at the start",
        ),
        ("objective.reference=cache", "`objective.reference` is 'cache': answers that are sampled while training"),
        (
            "rollout.address=127.0.0.1:8000",
            "`rollout.address` is '127.0.0.1:8000': it should be an address such as htt",
        ),
    ],
)
def test_what_samples_answers_is_named(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(tmp_path, {"name": "grpo"}, override)


def test_the_names_of_other_programs_mean_objectives_that_exist(tmp_path: Path) -> None:
    words = [word for text in NAMES_OF_OTHER_PROGRAMS.values() for word in text.split()]
    assert len(words) == len(set(words))
    for meant in NAMES_OF_OTHER_PROGRAMS:
        read(tmp_path, yaml.safe_load(meant))


def test_a_batch_is_the_answers_of_its_prompts(tmp_path: Path) -> None:
    """What follows from other sections is filled in, and follows an override of them."""
    config = read(tmp_path, {"name": "grpo", "aggregation": "fixed"}, "rollout.prompts_per_step=4")
    assert isinstance(config.objective, GrpoObjective)
    assert (config.train.global_batch_size, config.objective.fixed_length) == (32, 256)
    again = read_config(config, ["rollout.max_new_tokens=8", "objective.group_size=2"])
    assert isinstance(again.objective, GrpoObjective)
    assert (again.train.global_batch_size, again.objective.fixed_length) == (8, 8)
    (tmp_path / "again.yaml").write_text(dump_config(again))
    assert read_config(tmp_path / "again.yaml") == again
    given = read_config(again, ["train.global_batch_size=12", "objective.fixed_length=7"])
    assert isinstance(given.objective, GrpoObjective)
    assert (given.train.global_batch_size, given.objective.fixed_length) == (12, 7)


def test_clips_of_whole_answers_are_those_of_gspo_unless_they_are_given(tmp_path: Path) -> None:
    config = read(tmp_path, {"name": "grpo", "ratio": "sequence", "clip_high": 0.1})
    assert isinstance(config.objective, GrpoObjective)
    assert (config.objective.clip_low, config.objective.clip_high) == (3e-4, 0.1)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "again.yaml") == config
    tokens = read_config(config, ["objective.ratio=token"])
    assert isinstance(tokens.objective, GrpoObjective)
    assert (tokens.objective.clip_low, tokens.objective.clip_high) == (0.2, 0.1)


def test_an_editor_accepts_the_short_form() -> None:
    schema = RunConfig.model_json_schema(by_alias=True)["properties"]["objective"]
    assert schema["anyOf"][0]["enum"] == [*OBJECTIVES]
