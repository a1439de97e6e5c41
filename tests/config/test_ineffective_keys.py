"""Settings that nothing would read, or that do not fit the length of the run, are refused or reported."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_finetune.config.schema import RunConfig, dump_config, read_config
from ds_finetune.errors import ConfigError
from ds_finetune.plan.checks import length_notes
from tests.checking import check, settings_of
from tests.conftest import ROOT

MINIMAL: dict[str, Any] = {"model": "m", "data": {"train": "a.jsonl"}, "output_dir": "o"}
EVAL = {"data": {"train": "a.jsonl", "eval": "b.jsonl"}}


def read(folder: Path, tree: dict[str, Any], *overrides: str) -> RunConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(MINIMAL | tree))
    return read_config(folder / "run.yaml", overrides)


def objective(name: str, *, train_on: str | None = None, **keys: object) -> dict[str, Any]:
    data = {"train": "a", **({"train_on": train_on} if train_on else {})}
    return {"objective": {"name": name, **keys}, "data": data}


CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"eval": {"every": "5 steps"}}, "eval.every", "there is no data.eval"),
    ({"eval": {"patience": 2}}, "eval.patience", "there is no data.eval"),
    ({"eval": {"generate": {"prompts": 4}}}, "eval.generate.prompts", "there is no data.eval"),
    (EVAL | {"eval": {"patience": 2}}, "eval.patience", "the only evaluation is at the end"),
    (
        EVAL | {"eval": {"generate": {"max_new_tokens": 5}}},
        "eval.generate.max_new_tokens",
        "eval.generate.prompts is 0",
    ),
    ({"checkpoint": {"every": "never", "resume": "runs/x"}}, "checkpoint.resume", "checkpoint.every is never"),
    ({"checkpoint": {"every": "never", "keep": 5}}, "checkpoint.keep", "checkpoint.every is never"),
    ({"optim": {"lr_scheduler": "constant", "min_lr_ratio": 0.5}}, "optim.min_lr_ratio", "lr_scheduler is constant"),
    ({"optim": {"name": "SGD", "betas": [0.9, 0.9]}}, "optim.betas", "the optimizer of optim.name has no betas"),
    ({"optim": {"name": "Adafactor", "eps": 1e-6}}, "optim.eps", "the optimizer of optim.name has no eps"),
    ({"optim": {"name": "Lion", "eps": 1e-6}}, "optim.eps", "the optimizer of optim.name has no eps"),
    ({"data": {"train": "a", "streaming": True, "cache_dir": "c"}}, "data.cache_dir", "prepares and caches nothing"),
    ({"data": {"train": "a", "layout": "text", "reasoning": "strip"}}, "data.reasoning", "data.layout is text"),
    (
        {"data": {"train": "a", "long_rows": "drop", "max_truncated_ratio": 0.2}},
        "data.max_truncated_ratio",
        "nothing is truncated",
    ),
    ({"export": {"at_end": False, "max_shard_size": "1GB"}}, "export.max_shard_size", "nothing is exported"),
    (
        objective("dpo", loss="hinge", label_smoothing=0.1),
        "objective.label_smoothing",
        "objective.loss has no label smoothing",
    ),
    (objective("dpo", loss="robust"), "objective.loss", "the same as sigmoid"),
    (objective("classification", num_labels=1, label_smoothing=0.1), "objective.label_smoothing", "a regression"),
    (objective("distill", scores="s", teacher_offload="cpu"), "objective.teacher_offload", "no objective.teacher"),
    (objective("dpo", train_on="all"), "data.train_on", "the last turn of the assistant"),
    (objective("reward", train_on="all"), "data.train_on", "no token is supervised"),
    (objective("pretrain", train_on="last_assistant"), "data.train_on", "every token of plain text"),
    ({"rollout": {"max_new_tokens": 5}}, "rollout.max_new_tokens", "no answers are sampled"),
    ({"objective": "grpo", "rollout": {"address": "http://a:1"}}, "rollout.address", "rollout.engine is own"),
    (objective("grpo", train_on="all"), "data.train_on", "trains answers that the model writes"),
    (
        objective("grpo", ratio="capped", ratio_cap=5, clip_low=0.1),
        "objective.clip_low",
        "only bound is objective.ratio_cap",
    ),
    (objective("grpo", ratio_cap=5), "objective.ratio_cap", "objective.ratio is not capped"),
    (objective("grpo", mismatch_cap=5), "objective.mismatch_cap", "objective.mismatch is none"),
    (objective("grpo", fixed_length=5), "objective.fixed_length", "objective.aggregation is not fixed"),
    (EVAL | {"objective": "reward", "eval": {"generate": {"prompts": 4}}}, "eval.generate.prompts", "scores texts"),
    (EVAL | {"objective": "grpo", "eval": {"generate": {"prompts": 4}}}, "eval.generate.prompts", "the rewards score"),
]


@pytest.mark.parametrize(("tree", "key", "reason"), CASES, ids=[key for _, key, _ in CASES])
def test_a_key_without_effect_is_refused(tmp_path: Path, tree: dict[str, Any], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, tree)
    assert f"run.yaml line {_line(tmp_path / 'run.yaml', key)}: `{key}` is " in caught.value.message
    assert "and has no effect: " in caught.value.message
    assert reason in caught.value.message
    assert f"leave `{key}` out, or " in caught.value.hint


def _line(path: Path, key: str) -> int:
    name = key.rpartition(".")[2]
    return next(
        number
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.strip().startswith(f"{name}:")
    )


@pytest.mark.parametrize(
    "tree",
    [
        {"eval": {"keep_best": False}, "checkpoint": {"every": "never", "resume": "never"}},
        {"checkpoint": {"every": "never", "asynchronous": False}},
        EVAL | {"eval": {"every": "5 steps", "patience": 2, "generate": {"prompts": 2, "max_new_tokens": 5}}},
        EVAL | {"export": {"at_end": False, "max_shard_size": "1GB"}},
        {"data": {"train": "a", "layout": "text", "train_on": "all", "template": "plain"}},
        objective("dpo", loss="robust", label_smoothing=0.1, train_on="last_assistant"),
        objective("dpo", label_smoothing=0.1),
        objective("classification", label_smoothing=0.1),
        objective("pretrain", train_on="all"),
    ],
)
def test_what_has_an_effect_or_asks_for_what_happens_anyway_is_taken(tmp_path: Path, tree: dict[str, Any]) -> None:
    config = read(tmp_path, tree)
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert read_config(tmp_path / "again.yaml") == config


def test_an_override_without_effect_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.yaml: `eval.every` is '5 steps' and has no effect"):
        read(tmp_path, {}, "eval.every=5 steps")


def test_every_run_file_of_the_project_is_taken() -> None:
    files = sorted((ROOT / "ds_configs" / "runs").glob("*.yaml"))
    assert files
    assert all(read_config(path) for path in files)


def _checked(tree: dict[str, Any], *, steps: int = 100, warmup: int = 3, rows: int | None = 1000) -> list[str]:
    run = settings_of(RunConfig.model_validate(MINIMAL | tree), steps=steps, warmup=warmup, rows=rows)
    check(run, "length of the run")
    return length_notes(run)


@pytest.mark.parametrize(
    ("tree", "given", "message"),
    [
        (
            {"optim": {"warmup": "200 steps"}},
            {"warmup": 200},
            "optim.warmup `200 steps` is 200 steps, and the run has 100",
        ),
        (
            EVAL | {"eval": {"every": "40 steps", "patience": 2}},
            {},
            "eval.patience 2 cannot end a run of 100 steps early",
        ),
        (
            {"train": {"for": "3 epochs"}},
            {"rows": 10},
            "train.global_batch_size 32 is more than the 10 packed rows of an epoch",
        ),
        ({"train": {"for": "1e6 tokens"}}, {"rows": 10}, "the epochs of `1000000 tokens` would be joined"),
    ],
)
def test_what_is_larger_than_the_run_is_refused(tree: dict[str, Any], given: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _checked(tree, **given)
    assert message in caught.value.message
    assert caught.value.hint


def test_what_fits_the_run() -> None:
    assert _checked({"train": {"for": "3 epochs"}}, rows=32, steps=3, warmup=3) == []
    assert _checked(EVAL | {"eval": {"every": "40 steps", "patience": 1}}) == []
    assert _checked({}, rows=None) == []
    (line,) = _checked({"train": {"for": "9 steps"}}, rows=10)
    assert (
        line
        == "train.global_batch_size 32 is more than the 10 packed rows of an epoch: each step sees rows more than once"
    )
