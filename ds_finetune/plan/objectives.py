"""Which objectives may be trained with which settings, and the lines of the plan about them."""

from collections.abc import Iterator

from ds_finetune.config.objectives import ObjectiveConfig, is_distillation
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError


def check_objective(config: RunConfig) -> None:
    """ConfigError where the objective contradicts other keys of the run file."""
    objective = config.objective
    if config.model.loss == "liger" and not objective.row.is_cross_entropy:
        raise ConfigError(
            f"model.loss liger with objective {objective.name}: its kernel sums the cross entropy of tokens",
            hint="set model.loss to auto",
        )
    if is_distillation(objective) and (objective.teacher is None) == (objective.scores is None):
        raise ConfigError(
            f"objective distill has objective.teacher {objective.teacher!r} and objective.scores {objective.scores!r}",
            hint="give one of them: a teacher that runs beside the model, or scores that `ds-finetune teach` wrote",
        )
    _check_reference(config)
    if "baseline" in objective.row.needs:
        _check_baseline(config)


def _check_reference(config: RunConfig) -> None:
    objective = config.objective
    source = objective.reference_source
    if source == "adapters_off" and config.lora is None:
        raise ConfigError(
            f"objective.reference {source} without lora: there are no adapters to turn off",
            hint="add `lora`, or set objective.reference to cache",
        )
    if source == "cache" and config.data.streaming:
        raise ConfigError(
            f"objective {objective.name} with objective.reference cache and data.streaming true: log-probabilities "
            "are cached for prepared rows",
            hint="set data.streaming to false, or objective.reference to adapters_off with `lora`",
        )


def _check_baseline(config: RunConfig) -> None:
    name, rows = config.objective.name, config.train.global_batch_size
    if config.data.streaming:
        raise ConfigError(
            f"objective {name} with data.streaming true: z0 needs the answer of another example for each prompt",
            hint="set data.streaming to false",
        )
    if rows == 1:
        raise ConfigError(
            f"objective {name} with train.global_batch_size {rows}: z0 is a mean over the examples of the global batch",
            hint="set train.global_batch_size to 8 or more",
        )


def objective_lines(config: RunConfig) -> list[tuple[str, str]]:
    """Name and text of what is decided about the objective, for people; nothing for `sft`."""
    objective = config.objective
    if objective.name == "sft":
        return []
    numbers = ", ".join(f"{name} {value}" for name, value in _numbers(objective))
    return [
        ("objective", f"{objective.name}{f' ({numbers})' if numbers else ''}"),
        *([] if objective.reference_source is None else [("reference", _REFERENCES[objective.reference_source])]),
    ]


_REFERENCES = {
    "cache": "the model before training; its log-probabilities are computed once and cached",
    "adapters_off": "the model without its adapters, in a further forward of each step",
}


def _numbers(objective: ObjectiveConfig) -> Iterator[tuple[str, object]]:
    """Keys of the objective and their values, but for those that are empty or have a line of their own."""
    for name in type(objective).model_fields:
        value = getattr(objective, name)
        if name not in ("name", "reference") and value not in (None, (), 0.0, "none"):
            yield name, value


def loss_text(config: RunConfig, *, kernel: str) -> str:
    """What the loss is a mean over, and the kernel of the head where the model predicts tokens."""
    objective = config.objective
    text = f"mean over the {objective.row.unit} of the global batch"
    if objective.chosen_weight:
        text += f", plus {objective.chosen_weight:g} x the mean cross entropy of its chosen tokens"
    return text if objective.row.head == "scores" else f"{kernel} kernel, {text}"
