"""Which parameters a run trains by `train.only` and `train.freeze`."""

from collections.abc import Mapping
from typing import NamedTuple

from ds_finetune.config.sections import TrainConfig
from ds_finetune.plan.model_tensors import FullTensor
from ds_finetune.plan.name_patterns import matching, parameter_names, patterns_of


class FreezePlan(NamedTuple):
    """Trained and frozen parameters of a run with `train.only` or `train.freeze`, by name."""

    trained: Mapping[str, FullTensor]
    frozen: Mapping[str, FullTensor]

    def lines(self) -> list[tuple[str, str]]:
        """Plan lines about trained and frozen parameters."""
        return [(part, _text(found, len(self.trained) + len(self.frozen))) for part, found in self._asdict().items()]


def _text(found: Mapping[str, FullTensor], total: int) -> str:
    numel = sum(tensor.numel for tensor in found.values())
    return f"{len(found)} of {total} tensors, {numel:,} parameters: {patterns_of(list(found))}"


def plan_freezing(train: TrainConfig, tensors: Mapping[str, FullTensor]) -> FreezePlan | None:
    """Divide a model's `tensors` into trained and frozen; None where all are trained. ConfigError as of `matching`."""
    if not (train.only or train.freeze):
        return None
    known = parameter_names(tensors)
    only, freeze = (
        {name for pattern in patterns for name in matching(pattern, known, key=key, what="parameter")}
        for key, patterns in (("train.only", train.only), ("train.freeze", train.freeze))
    )
    trained = {name: each for name, each in tensors.items() if name not in freeze and (not only or name in only)}
    return FreezePlan(trained, {name: each for name, each in tensors.items() if name not in trained})
