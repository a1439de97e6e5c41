"""The sweep file of `ds-finetune sweep`, and the optuna sampler and pruner that it names."""

import copy
import inspect
import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ds_finetune.config.invalid_keys import explain
from ds_finetune.config.run_file import apply_override, read_yaml, set_key
from ds_finetune.config.schema import RunConfig, validate_tree
from ds_finetune.config.sections import Section, short_form
from ds_finetune.errors import ConfigError
from ds_finetune.system.versions import require_extra

_GRID_SAMPLERS = ("BruteForceSampler", "GridSampler")
"""Samplers of optuna that train one trial with each combination of choices."""
_ONE_SEED_SAMPLERS = (*_GRID_SAMPLERS, "QMCSampler")
"""Samplers of optuna that need the same seed in all trials, because one seed determines the values of all trials."""
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
    step: int | float | None = None

    @model_validator(mode="after")
    def _check(self) -> "Range":
        given = self.model_fields_set - {"choices"}
        if (self.choices is not None and given) or (self.choices is None and None in (self.low, self.high)):
            raise ValueError("it should have either `choices`, or `low` and `high` (with `log` or `step`)")
        self.distribution()
        return self

    def distribution(self) -> Any:  # noqa: ANN401 - a class of optuna
        """The range as a distribution of optuna. Choices become JSON texts, because optuna accepts no lists."""
        distributions = import_optuna().distributions
        if self.choices is not None:
            return distributions.CategoricalDistribution(tuple(dict.fromkeys(map(json.dumps, self.choices))))
        is_whole = all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))
        kind = distributions.IntDistribution if is_whole else distributions.FloatDistribution
        with warnings.catch_warnings():
            # optuna would reduce `high` to a multiple of the step and only warn. The result is checked below instead.
            warnings.simplefilter("ignore")
            step = {} if self.step is None else {"step": self.step}
            distribution = kind(self.low, self.high, log=self.log, **step)
        if distribution.high != self.high:
            raise ValueError(f"`high` is not whole steps above `low`; the last value would be {distribution.high}")
        return distribution


class Choose(Section):
    """A class of `optuna.samplers` or `optuna.pruners`, chosen by its name, with options for it."""

    model_config = ConfigDict(extra="allow")

    name: str


class SweepConfig(Section):
    """Keys of a sweep file, which says what `ds-finetune sweep` tries and how often."""

    page: ClassVar[str] = "docs/how-to/sweeps.md"

    run: str
    space: Annotated[dict[str, Range], Field(min_length=1)]
    output_dir: str
    trials: int = Field(ge=1)
    metric: str = "eval/loss"
    direction: Literal["minimize", "maximize"] = "minimize"
    value: Literal["last", "best"] = "last"
    sampler: Annotated[Choose, BeforeValidator(short_form("name"))] = Choose(name="TPESampler")
    pruner: Annotated[Choose, BeforeValidator(short_form("name"))] = Choose(name="NopPruner")
    seed: int = Field(default=0, ge=0)
    ranks: int = Field(default=1, ge=1)
    parallel: int = Field(default=1, ge=1)
    hostfile: str | None = None
    max_failed: int = Field(default=3, ge=1)

    @property
    def most_trials(self) -> float:
        """Number of trials of the sweep. A grid has at most as many trials as there are combinations of choices."""
        choices = (values.distribution().choices if values.choices else () for values in self.space.values())
        is_grid = self.sampler.name in _GRID_SAMPLERS
        return min(self.trials, math.prod(map(len, choices))) if is_grid else self.trials

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
            raise ConfigError(f"{source}: the space has `{key}` and its key `{inner[0]}`", hint="remove one of them")
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
    """Make the optuna sampler for trial `number`. ConfigError if optuna has no such sampler or option.

    The seed of the sampler is that of the sweep plus `number`. So a resumed sweep samples the same values as an
    uninterrupted one.
    """
    is_grid = sweep.sampler.name in _GRID_SAMPLERS
    if is_grid and (ranges := [key for key, values in sweep.space.items() if values.choices is None]):
        raise ConfigError(
            f"`sampler: {sweep.sampler.name}` needs lists of values, but the space has a range for `{ranges[0]}`",
            hint=f"write `choices` for `{ranges[0]}`",
        )
    own_options: dict[str, Any] = {"seed": sweep.seed + number * (sweep.sampler.name not in _ONE_SEED_SAMPLERS)}
    if is_grid:
        own_options["search_space"] = {key: values.distribution().choices for key, values in sweep.space.items()}
    return make_chosen(sweep.sampler, "sampler", own_options)


def make_chosen(choose: Choose, kind: str, own_options: dict[str, Any]) -> Any:  # noqa: ANN401 - of either base class
    """Make the optuna sampler or pruner (`kind`) that a sweep file names; ConfigError if optuna has no such class."""
    optuna = import_optuna()
    classes, options = getattr(optuna, f"{kind}s"), choose.model_extra or {}
    names = [name for name in dir(classes) if name.lower().endswith(kind) and not name.startswith("Base")]
    if choose.name not in names:
        raise ConfigError(f"optuna.{kind}s has no class `{choose.name}`", hint=f"choose one of {', '.join(names)}")
    made_class = getattr(classes, choose.name)
    parameters = inspect.signature(made_class).parameters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return made_class(**{name: value for name, value in own_options.items() if name in parameters} | options)
    except (TypeError, ValueError, AttributeError) as wrong:
        hint = f"use its options: {', '.join(parameters)}"
        raise ConfigError(f"`{kind}: {choose.name}` does not accept {options}: {wrong}", hint=hint) from None
