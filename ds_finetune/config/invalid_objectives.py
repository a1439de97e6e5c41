"""Errors for an `objective` of the run file that is none, or has keys of another one."""

import difflib
from collections.abc import Mapping
from typing import Any

from ds_finetune.config.objectives import OBJECTIVES

NAMES_OF_OTHER_PROGRAMS: Mapping[str, str] = {
    "sft": "lm instruct instruction_tuning",
    "pretrain": "pt cpt clm continued_pretraining pretraining",
    "classification": "cls seq_cls sequence_classification text_classification regression",
    "reward": "rm reward_model reward_modeling bradley_terry",
    "{name: dpo, loss: ipo}": "ipo",
    "{name: dpo, loss: hinge}": "hinge slic",
    "{name: dpo, loss: robust, label_smoothing: 0.1}": "robust robust_dpo rdpo",
    "{name: dpo, loss: apo_zero}": "apo apo_zero",
    "{name: dpo, loss: apo_down}": "apo_down",
    "{name: dpo, label_smoothing: 0.1}": "cdpo",
    "{name: dpo, nll_weight: 1.0}": "rpo dpop",
    "kto": "kto_pair bco",
    "distill": "gkd distillation knowledge_distillation kd",
}
"""Objectives, each with its names in TRL, LLaMA-Factory, ms-swift, OpenRLHF and papers."""
_SAMPLING = ("grpo", "dr_grpo", "dapo", "gspo", "rloo", "ppo", "reinforce", "online_dpo", "nash_md", "xpo", "rlhf")
"""Methods that train on answers which the model samples during the training."""
_MEANT = {word: meant for meant, words in NAMES_OF_OTHER_PROGRAMS.items() for word in words.split()}


def explain_objective(error: Any) -> tuple[str, str] | None:  # noqa: ANN401 - pydantic's ErrorDetails
    """What is wrong with the objective, and a hint; None where the error is about one of its keys."""
    if tuple(error["loc"]) != ("objective",):
        return None
    names = f"objectives are {', '.join(OBJECTIVES)}"
    if error["type"] == "union_tag_not_found":
        return "`objective` has no `name`", f"write e.g. `objective: {{name: dpo, beta: 0.1}}`; {names}"
    if error["type"] != "union_tag_invalid":
        return f"`objective` is {error['input']!r}: it should be a name or a section with a name", names
    given = error["input"]["name"]
    word = str(given).lower().replace("-", "_")
    if word in _SAMPLING:
        return (
            f"`objective` is {given!r}, which trains on sampled answers and is not available in this version",
            f"TRL and verl have it; with pairs of answers train dpo (docs/how-to/preferences.md); {names}",
        )
    near = _MEANT.get(word) or next(iter(difflib.get_close_matches(word, OBJECTIVES, n=1)), None)
    hint = f"did you mean `{near}`? " if near else ""
    return f"`objective` is {given!r}, which is no objective", f"{hint}{names}"


def objectives_with(key: str) -> list[str]:
    """Names of the objectives that have a key `key`."""
    return [name for name, row in OBJECTIVES.items() if key in row.section.model_fields]
