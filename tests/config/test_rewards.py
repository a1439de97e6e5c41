"""The section `rewards` of a run file: short forms, options of each reward, and mistakes."""

import re
from typing import Any

import pytest

from ds_finetune.config.rewards import OPTIONS, RewardConfig
from ds_finetune.config.schema import RunConfig, dump_config, read_config
from ds_finetune.errors import ConfigError
from ds_finetune.objectives.rewards.builtin import BUILTIN
from ds_finetune.plan.settings import RunSettings
from tests.checking import check


def run_of(rewards: Any, **other: Any) -> RunConfig:
    base = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o", "objective": "grpo"}
    return read_config({**base, "rewards": rewards, **other})


def test_short_forms() -> None:
    assert run_of("exact_match").rewards == run_of([{"reward": "exact_match"}]).rewards
    names = [reward.shown_name for reward in run_of(["format", "my/file.py:score", {"reward": "code"}]).rewards]
    assert names == ["format", "score", "code"]
    assert read_config({"model": "m", "data": {"train": "t"}, "output_dir": "o"}).rewards == ()


def test_a_run_file_is_written_and_read_again(tmp_path: Any) -> None:
    config = run_of([{"reward": "regex", "pattern": "x", "weight": -0.5}, "json", "f.py:g"])
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "run.yaml") == config


def test_columns_and_files() -> None:
    rewards = run_of(["number", "code", "json", "format", "mine.py:f", {"reward": "math", "column": "a.b"}]).rewards
    assert [reward.read_column for reward in rewards] == ["answer", "tests", "", "", "", "a.b"]
    assert ("rewards", "mine.py") in [(key, str(path)) for key, path in run_of(["mine.py:f"]).inputs()]


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (["exact"], "`exact` is no reward; did you mean `exact_match`?"),
        (["mine.py"], "`mine.py` is no reward; write `file.py:function`"),
        ([{"reward": "number", "pattern": "x"}], "`pattern` is an option of regex; `number` has column, tolerance"),
        ([{"reward": "f.py:g", "tolerance": 0.1}], "`tolerance` is an option of number; `f.py:g` has no options"),
        ([{"reward": "regex"}], "`regex` needs `pattern`"),
        ([{"reward": "regex", "pattern": "("}], "is no regular expression"),
        ([{"reward": "length"}], "`length` needs `max_tokens`"),
        ([{"reward": "length", "max_tokens": 5, "soft_tokens": 6}], "`soft_tokens` 6 is more than `max_tokens` 5"),
        (["json", {"reward": "json", "column": "a"}], "two rewards have the name `json`"),
        ([{"reward": "json", "name": "a b"}], "the name `a b` may have only letters"),
        ([{"reward": "json", "weight": 0}], "the weight of every reward is 0"),
        ([{"reward": "json", "timeout": 0}], "`rewards.timeout` is 0: it should be above 0"),
        ([{"reward": "json", "memory": "much"}], "memory of a reward `much` is not a size with a unit"),
        ([{"reward": "json", "wieght": 1}], "unknown key `rewards.wieght`"),
        ([{"weight": 1}], "`rewards.reward` is missing"),
    ],
)
def test_mistakes(rewards: Any, message: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        run_of(rewards)
    assert re.sub("greater than", "above", wrong.value.message).find(message) >= 0, wrong.value
    assert wrong.value.hint


def test_rewards_have_no_effect_without_sampled_answers() -> None:
    with pytest.raises(ConfigError, match=r"`rewards` is .* and has no effect: no answers are sampled"):
        run_of(["number"], objective="pretrain")


def test_an_objective_of_sampled_answers_needs_rewards() -> None:
    with pytest.raises(ConfigError, match="objective grpo without rewards"):
        check(RunSettings.of(run_of([])), "sampled answers")
    check(RunSettings.of(run_of(["number"])), "sampled answers")


def test_names_of_other_programs() -> None:
    with pytest.raises(ConfigError) as unknown:
        read_config({"model": "m", "data": {"train": "t"}, "output_dir": "o", "reward_funcs": ["accuracy"]})
    assert "did you mean `rewards`?" in unknown.value.hint


def test_the_options_are_fields_of_the_section_and_rewards_are_built_in() -> None:
    assert OPTIONS.keys() == BUILTIN.keys()
    assert {option for own in OPTIONS.values() for option in own} < RewardConfig.model_fields.keys()
