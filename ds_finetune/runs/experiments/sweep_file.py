"""The sweep file of `ds-finetune sweep`, and the optuna sampler and pruner that it names."""

import copy
import json
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ds_finetune.config.invalid_keys import explain
from ds_finetune.config.run_file import apply_override, read_yaml, set_key
from ds_finetune.config.schema import RunConfig, validate_tree
from ds_finetune.config.sections import Section, short_form
from ds_finetune.errors import ConfigError
from ds_finetune.system.versions import require_extra

_SWEEP_KEYS = ("output_dir", "launch", "export", "eval.keep_best")
"""Sections and keys of a trial's run file that the sweep itself sets. The search space cannot contain them."""
_Choice = bool | int | float | str | None | list[Any] | dict[str, Any]


def import_optuna() -> Any:  # noqa: ANN401 - a module
    """Import the package optuna; DependencyError if the extra `sweep` is not installed."""
    require_extra("sweep", "a sweep")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Range(Section):
    """The values that a sweep tries for one key of the run file: `choices`, or numbers from `low` to `high`. The
    numbers are integers if `low` and `high` are integers.
    """

    choices: Annotated[tuple[_Choice, ...] | None, Field(min_length=1)] = None
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False

    @model_validator(mode="after")
    def _check(self) -> "Range":
        range_keys = self.model_fields_set - {"choices"}
        if (self.choices is not None and range_keys) or (self.choices is None and None in (self.low, self.high)):
            raise ValueError("it should have either `choices`, or `low` and `high` (with `log`)")
        self.distribution()
        return self

    def distribution(self) -> Any:  # noqa: ANN401 - a class of optuna
        """The range as a distribution of optuna. Choices become JSON texts, because optuna accepts no lists."""
        distributions = import_optuna().distributions
        if self.choices is not None:
            return distributions.CategoricalDistribution(tuple(dict.fromkeys(map(json.dumps, self.choices))))
        is_integer = isinstance(self.low, int) and isinstance(self.high, int)
        kind = distributions.IntDistribution if is_integer else distributions.FloatDistribution
        return kind(self.low, self.high, log=self.log)


_Sampler = Literal["TPESampler", "RandomSampler", "GridSampler"]
_Pruner = Literal[
    "NopPruner", "MedianPruner", "PercentilePruner", "SuccessiveHalvingPruner", "HyperbandPruner", "ThresholdPruner"
]


class OptunaClass(Section):
    """A sampler or pruner of optuna by the name of its class, with options of that class."""

    model_config = ConfigDict(extra="allow")

    name: _Sampler | _Pruner


class SweepConfig(Section):
    """Keys of a sweep file, which says what `ds-finetune sweep` tries and how often."""

    page: ClassVar[str] = "docs/how-to/sweeps.md"

    run: str
    space: Annotated[dict[str, Range], Field(min_length=1)]
    output_dir: str
    trials: int = Field(ge=1)
    metric: str = "eval/loss"
    direction: Literal["minimize", "maximize"] = "minimize"
    sampler: Annotated[OptunaClass, BeforeValidator(short_form("name"))] = OptunaClass(name="TPESampler")
    pruner: Annotated[OptunaClass, BeforeValidator(short_form("name"))] = OptunaClass(name="NopPruner")
    seed: int = Field(default=0, ge=0)
    ranks: int = Field(default=1, ge=1)
    parallel: int = Field(default=1, ge=1)

    def grid(self) -> list[dict[str, Any]]:
        """The first `trials` combinations of choices, as parameters of optuna's trials. Empty if the sampler is no
        grid.
        """
        is_grid = self.sampler.name == "GridSampler"
        choices = [values.distribution().choices for values in self.space.values()] if is_grid else [()]
        return [dict(zip(self.space, each, strict=True)) for each in islice(product(*choices), self.trials)]

    def values_of(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Convert optuna's `parameters` of a trial to values by key of the run file."""
        return {key: json.loads(value) if self.space[key].choices else value for key, value in parameters.items()}

    def run_tree(self, values: dict[str, Any], output_dir: Path) -> dict[str, Any]:
        """The run file of a trial: the sweep's run file with `values` for some keys and another `output_dir`."""
        tree, _ = read_yaml(Path(self.run))
        for key, value in values.items():
            set_key(tree, {}, key, value, source=self.run)
        return {**tree, "output_dir": str(output_dir)}


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep file. ConfigError names a wrong key with its line and the nearest valid key.

    The run file is also validated with each choice of a key, and with both ends of a range.
    """
    tree, lines = read_yaml(path)
    for override in overrides:
        apply_override(tree, lines, override)
    if "run" not in tree and {"model", "data"} <= tree.keys():
        raise ConfigError(
            f"{path} is a run file, but a sweep needs a sweep file, which names a run file",
            hint=f"write one with `run: {path}`, `trials: 12` and `space: {{optim.lr: {{low: 1.0e-6, high: 1.0e-3}}}}`",
        )
    try:
        sweep = SweepConfig.model_validate(tree)
    except ValidationError as invalid:
        raise explain(invalid, SweepConfig, str(path), lines) from None
    base, base_lines = read_yaml(Path(sweep.run))
    _check_metric(sweep, validate_tree(copy.deepcopy(base), base_lines, sweep.run))
    for key, values in sweep.space.items():
        source = f"{path} line {lines.get(('space', key), '?')}"
        if reserved := [own for own in _SWEEP_KEYS if key in (own, own.split(".")[0]) or key.startswith(f"{own}.")]:
            raise ConfigError(
                f"{source}: the space has `{key}`, but the sweep itself sets `{reserved[0]}`",
                hint=f"remove `{key}` from the space",
            )
        if inner := [other for other in sweep.space if other.startswith(f"{key}.")]:
            raise ConfigError(f"{source}: the space has `{key}` and its key `{inner[0]}`", hint=f"remove `{inner[0]}`")
        if sweep.sampler.name == "GridSampler" and values.choices is None:
            raise ConfigError(
                f"{source}: `sampler: GridSampler` needs lists of values, but the space has a range for `{key}`",
                hint=f"write `choices` for `{key}`",
            )
        for value in values.choices or (values.low, values.high):
            changed = copy.deepcopy(base)
            set_key(changed, dict(base_lines), key, value, source=source)
            validate_tree(changed, base_lines, f"{source}: with `{key}: {value}`, {sweep.run}")
    return sweep


def _check_metric(sweep: SweepConfig, config: RunConfig) -> None:
    if not sweep.metric.startswith("eval/"):
        return
    if not config.data.held_out_sets:
        raise ConfigError(
            f"the metric of the sweep is `{sweep.metric}`, but {sweep.run} has no `data.eval`",
            hint="name held-out data in data.eval, or a metric of training such as train/loss",
        )
    if config.eval.every is None and "eval.every" not in sweep.space and sweep.pruner.name != "NopPruner":
        raise ConfigError(
            f"`pruner: {sweep.pruner.name}` needs evaluations during a trial, but {sweep.run} has no `eval.every`, so "
            "held-out data is evaluated only at the end",
            hint="set eval.every to e.g. `50 steps`, or leave `pruner` out",
        )


def make_sampler(sweep: SweepConfig, number: int) -> Any:  # noqa: ANN401 - of optuna
    """Make the optuna sampler for trial `number`; ConfigError if the sampler refuses the sweep file's options.

    A sampler gets the seed of the sweep plus `number`, so that a resumed sweep samples what an uninterrupted one does.
    """
    return make_chosen(sweep.sampler, "sampler", seed=sweep.seed + number)


def make_chosen(chosen: OptunaClass, kind: str, **own_options: object) -> Any:  # noqa: ANN401 - of either class
    """Make the sampler or pruner (`kind`) that a sweep file names. ConfigError if its class refuses the options."""
    options = chosen.model_extra or {}
    # The trials of a grid are put into optuna's queue, and no sampler chooses their values.
    name = "RandomSampler" if chosen.name == "GridSampler" else chosen.name
    try:
        return getattr(getattr(import_optuna(), f"{kind}s"), name)(**own_options, **options)
    except (AttributeError, TypeError, ValueError) as wrong:
        hint = f"read the options of {name} in the documentation of optuna"
        raise ConfigError(f"`{kind}: {chosen.name}` does not accept {options}: {wrong}", hint=hint) from None
