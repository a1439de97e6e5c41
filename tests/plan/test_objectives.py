"""Objectives in the plan: contradictions are refused with both values, and lines say what is computed."""

from typing import Any

import pytest

from ds_finetune.errors import ConfigError
from tests.plan.test_plan import plan_of

LORA: dict[str, Any] = {"lora": {}}
STREAM: dict[str, Any] = {"data": {"train": "a.jsonl", "streaming": True}, "train": {"for": "5 steps"}}
ONE_ROW: dict[str, Any] = {"train": {"global_batch_size": 1}}


def off(name: str) -> dict[str, Any]:
    return {"objective": {"name": name, "reference": "adapters_off"}}


@pytest.mark.parametrize(
    ("sections", "message", "hint"),
    [
        (off("dpo"), "objective.reference adapters_off without lora", "add `lora`, or set objective.reference: cache"),
        (off("kto"), "objective.reference adapters_off without lora", "objective.reference: cache"),
        (
            {"objective": "dpo"} | STREAM,
            "objective dpo with objective.reference cache and data.streaming true",
            "objective.reference: adapters_off with `lora`",
        ),
        (off("kto") | LORA | STREAM, "objective kto with data.streaming true: z0", "data.streaming: false"),
        ({"objective": "kto"} | ONE_ROW, "objective kto with train.global_batch_size 1: z0", "8 or more"),
        ({"objective": "distill"}, "objective.teacher None and objective.scores None", "give either a teacher"),
        (
            {"objective": {"name": "distill", "teacher": "t", "scores": "s"}},
            "objective.teacher 't' and objective.scores 's'",
            "give either a teacher",
        ),
        *(
            ({"objective": name, "model": {"path": "m", "loss": "liger"}}, f"model.loss liger with objective {name}", "auto")
            for name in ("dpo", "simpo", "cpo", "orpo", "kto", "reward", "classification", "distill")
        ),
    ],
)  # fmt: skip
def test_contradictions_name_both_values(sections: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(dp=1, **sections)
    assert message in caught.value.message
    assert hint in caught.value.hint


def lines_of(objective: object, **sections: Any) -> dict[str, str]:
    return dict(plan_of(objective=objective, **sections).decisions)


def test_lines_name_objective_unit_and_reference() -> None:
    assert "objective" not in lines_of("sft")
    lines = lines_of({"name": "dpo", "nll_weight": 0.2})
    assert lines["objective"] == "dpo (beta 0.1, loss sigmoid, nll_weight 0.2)"
    assert lines["reference"].startswith("the model before training; its log-probabilities are computed once")
    assert lines["loss"] == (
        "chunked kernel, mean over the pairs of the global batch, plus 0.2 x the mean cross entropy of its chosen tokens"
    )
    lines = lines_of({"name": "kto", "reference": "adapters_off"}, **LORA)
    assert lines["reference"].startswith("the model without its adapters")
    assert lines["loss"].endswith("mean over the examples of the global batch")
    assert lines_of("reward")["loss"] == "mean over the pairs of the global batch"
    assert "reference" not in lines_of("orpo")
