"""One fault for each objective, and a section of the run file whose loss the fault changes."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from ds_finetune.config.objectives import KtoObjective
from ds_finetune.objectives import grpo, preferences, scores
from ds_finetune.objectives.objective import AnswerTokens, DocumentLogProbs

FAULTY: Mapping[str, dict[str, Any]] = {
    "dpo": {"name": "dpo"},
    "ipo": {"name": "dpo", "loss": "ipo"},
    "simpo": {"name": "simpo"},
    "cpo": {"name": "cpo"},
    "orpo": {"name": "orpo"},
    "kto": {"name": "kto", "desirable_weight": 1.3},
    "reward": {"name": "reward"},
    "classification": {"name": "classification", "label_smoothing": 0.1},
    "grpo": {"name": "grpo", "group_size": 2, "aggregation": "sequence"},
}
"""Sections of the run file by the name of the fault."""


def _no_weights_of_tokens(numbers: torch.Tensor, documents: DocumentLogProbs) -> torch.Tensor:
    return numbers / documents.num_tokens.sum()


def _swapped(section: KtoObjective) -> KtoObjective:
    weights = {"desirable_weight": section.undesirable_weight, "undesirable_weight": section.desirable_weight}
    return section.model_copy(update=weights)


def _swaps_weights(original: Callable[..., None]) -> Callable[..., None]:
    return lambda objective, section: original(objective, _swapped(section))


def _without_margin(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda objective, scores, targets, weights: original(objective, scores, torch.zeros_like(targets), weights)


def _without_smoothing(*arguments: Any, label_smoothing: float, **others: Any) -> torch.Tensor:
    return functional.cross_entropy(*arguments, **others)


def _unclipped(_: Any, tokens: AnswerTokens, log_ratio: torch.Tensor) -> tuple[torch.Tensor, ...]:
    zeros = torch.zeros_like(log_ratio)
    return -log_ratio.exp() * tokens.advantage, zeros, zeros


class _Functional(ModuleType):
    """torch.nn.functional whose cross entropy ignores label smoothing."""

    cross_entropy = staticmethod(_without_smoothing)


def plant(name: str, put: Callable[[Any, str, Any], None] = setattr) -> None:
    """Break the computing code of an objective by means of `put`: setattr, or that of a monkeypatch."""
    faults: Mapping[str, tuple[Any, str, Any]] = {
        "dpo": (preferences, "logsigmoid", lambda margin: functional.logsigmoid(margin / 0.1)),
        "ipo": (preferences, "per_token", lambda ratios, _: ratios),
        "simpo": (preferences, "per_token", _no_weights_of_tokens),
        "cpo": (preferences, "Term", lambda unit, weight=1.0: _TERM(unit, 1.0 if unit == "pairs" else weight / 2)),
        "orpo": (
            preferences.OddsRatioPreference,
            "scores",
            lambda _, documents: preferences.per_token(documents.logp, documents),
        ),
        "kto": (preferences.KahnemanTversky, "__init__", _swaps_weights(preferences.KahnemanTversky.__init__)),
        "reward": (scores.Reward, "loss", _without_margin(scores.Reward.loss)),
        "classification": (scores, "functional", _Functional("functional")),
        "grpo": (grpo.PolicyGradient, "_policy", _unclipped),
    }
    put(*faults[name])


_TERM = preferences.Term
