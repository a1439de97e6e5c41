"""Parameters that a run trains and freezes by `train.only` and `train.freeze`."""

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
        lines, total = [], len(self.trained) + len(self.frozen)
        for part, tensors in self._asdict().items():
            numel = sum(tensor.numel for tensor in tensors.values())
            names = patterns_of(list(tensors))
            lines.append((part, f"{len(tensors)} of {total} tensors, {numel:,} parameters: {names}"))
        return lines


def plan_freezing(train: TrainConfig, tensors: Mapping[str, FullTensor]) -> FreezePlan | None:
    """Divide a model's `tensors` into trained and frozen parameters; None if all are trained. ConfigError if a pattern
    matches no parameter.
    """
    if not (train.only or train.freeze):
        return None
    names = parameter_names(tensors)
    only, freeze = (
        {name for pattern in patterns for name in matching(pattern, names, key=key, what="parameter")}
        for key, patterns in (("train.only", train.only), ("train.freeze", train.freeze))
    )
    trained = {name: each for name, each in tensors.items() if name not in freeze and (not only or name in only)}
    return FreezePlan(trained, {name: each for name, each in tensors.items() if name not in trained})
