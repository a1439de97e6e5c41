"""Scores answers by the rewards of a run file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.rewards import RewardConfig
from ds_finetune.objectives.rewards.answers import AnswerToScore
from ds_finetune.objectives.rewards.pool import open_rewards

FILE = Path(__file__).parent / "cases.py"


def answer_of(text: str, record: Mapping[str, Any] | None = None, **other: Any) -> AnswerToScore:
    given = {"prompt": "2+2=", "ids": [1, 2, 3], "finish": "stop", "where": "rows.jsonl line 7, answer 3"}
    return AnswerToScore(record={"answer": "4"} if record is None else record, text=text, **(given | other))


def section_of(value: Any) -> RewardConfig:
    """The section of a name, a mapping, or a function of `cases.py` as `:NAME`."""
    if isinstance(value, str):
        value = {"reward": value}
    if value["reward"].startswith(":"):
        value = {**value, "reward": f"{FILE}{value['reward']}"}
    return RewardConfig.model_validate(value)


def scores_of(sections: list[Any], answers: list[AnswerToScore], **options: Any) -> NDArray[np.float64]:
    """Scores [answers, rewards], from one process."""
    with open_rewards([section_of(section) for section in sections], **({"workers": 1} | options)) as rewards:
        return rewards.start(answers).result()
