"""The sweep file, and optuna's sampler, pruner and study that it describes."""

import copy
import inspect
import json
import math
import warnings
from collections.abc import Sequence
from decimal import Decimal
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
"""Samplers that train each point of a space of choices once."""
_ONE_SEED_SAMPLERS = (*_GRID_SAMPLERS, "QMCSampler")
"""Samplers whose values of all trials are one sequence, determined by one seed."""
_SWEEP_KEYS = ("output_dir", "launch", "export", "eval.keep_best")
"""Sections and keys of a trial's run file that the sweep sets itself, so that a space cannot have them."""
_Choice = bool | int | float | str | None | list[Any] | dict[str, Any]


def import_optuna() -> Any:  # noqa: ANN401 - a module
    """The package optuna; DependencyError if the extra `sweep` is not installed."""
    require_extra("sweep", "a sweep")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Range(Section):
    """Values of one key: `choices` of any kind, or numbers from `low` to `high`, integers if both are."""

    choices: Annotated[tuple[_Choice, ...] | None, Field(min_length=1)] = None
    low: int | float | None = None
    high: int | float | None = None
    log: bool = False
    step: int | float | None = None

    @model_validator(mode="after")
    def _is_one_kind(self) -> "Range":
        given = self.model_fields_set - {"choices"}
        if (self.choices is not None and given) or (self.choices is None and None in (self.low, self.high)):
            raise ValueError("it should have either `choices`, or `low` and `high` (with `log` or `step`)")
        self.distribution()
        return self

    def distribution(self) -> Any:  # noqa: ANN401 - a class of optuna
        """The range as optuna's distribution; choices become JSON texts, because optuna accepts no lists."""
        optuna = import_optuna()
        if self.choices is not None:
            texts = dict.fromkeys(json.dumps(choice) for choice in self.choices)
            return optuna.distributions.CategoricalDistribution(tuple(texts))
        is_whole = all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))
        kind = optuna.distributions.IntDistribution if is_whole else optuna.distributions.FloatDistribution
        with warnings.catch_warnings():
            # optuna would reduce `high` to a multiple of the step, with a warning.
            warnings.simplefilter("ignore")
            step = {} if self.step is None else {"step": self.step}
            distribution = kind(self.low, self.high, log=self.log, **step)
        if distribution.high != self.high:
            raise ValueError(f"whole steps do not lead to `high`; the last value would be {distribution.high}")
        return distribution

    def points(self) -> Sequence[Any] | None:
        """All values that optuna may sample from the range; None for a range without a step."""
        distribution = self.distribution()
        if self.choices is not None:
            return distribution.choices
        if distribution.step is None or distribution.log:
            return None
        # Sums of floating-point numbers would exceed `high`: 0.1 + 6 * 0.1 > 0.7.
        low, step = Decimal(str(distribution.low)), Decimal(str(distribution.step))
        number = round((distribution.high - distribution.low) / distribution.step) + 1
        return [type(distribution.low)(low + step * each) for each in range(number)]


class Choose(Section):
    """A class of `optuna.samplers` or `optuna.pruners` by name, with its options."""

    model_config = ConfigDict(extra="allow")

    name: str


class SweepConfig(Section):
    """The keys of a sweep file."""

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

    def num_points(self) -> float:
        """Number of points of the space for a grid sampler; infinite for other samplers."""
        points = [values.points() or () for values in self.space.values()]
        return math.prod(map(len, points)) if self.sampler.name in _GRID_SAMPLERS else math.inf

    def values_of(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """The run file's values for the parameters of an optuna trial."""
        return {key: json.loads(value) if self.space[key].choices else value for key, value in parameters.items()}

    def run_tree(self, values: dict[str, Any], output_dir: Path) -> dict[str, Any]:
        """The run file with `values` and the trial's `output_dir`."""
        tree, _ = read_yaml(Path(self.run))
        for key, value in values.items():
            set_key(tree, {}, key, value, source=self.run)
        return {**tree, "output_dir": str(output_dir)}


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep file; ConfigError names key and line, and the nearest valid key of the run file.

    Each choice and each end of a range is set in the run file alone, and the result is validated as a run file.
    """
    tree, lines = read_yaml(path)
    for override in overrides:
        apply_override(tree, lines, override)
    if "run" not in tree and {"model", "data"} <= tree.keys():
        raise ConfigError(
            f"{path} is a run file, and a sweep needs a sweep file that names it",
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
                f"{source}: `{key}` is in the space, and the sweep sets `{reserved[0]}` itself",
                hint="leave it out of the space",
            )
        if inner := [other for other in sweep.space if other.startswith(f"{key}.")]:
            raise ConfigError(f"{source}: the space has `{key}` and `{inner[0]}` of it", hint="leave one of them out")
        for value in values.choices or (values.low, values.high):
            changed = copy.deepcopy(base)
            set_key(changed, dict(base_lines), key, value, source=source)
            validate_tree(changed, base_lines, f"{source}: with `{key}: {value}`, {sweep.run}")
    return sweep


def _check_metric(sweep: SweepConfig, config: RunConfig) -> None:
    """ConfigError where no trial will record the metric, or a pruner would never get a value of it."""
    if not sweep.metric.startswith("eval/"):
        return
    if not config.data.held_out_sets:
        raise ConfigError(
            f"the sweep's metric is `{sweep.metric}`, and {sweep.run} has no `data.eval`",
            hint="name held-out data in data.eval, or a metric of training such as train/loss",
        )
    if config.eval.every is None and "eval.every" not in sweep.space and sweep.pruner.name != "NopPruner":
        raise ConfigError(
            f"`pruner: {sweep.pruner.name}` needs values while a trial runs, and {sweep.run} has no `eval.every`: "
            "held-out data is evaluated only at the end",
            hint="set eval.every to e.g. `50 steps`, or leave `pruner` out",
        )


def make_sampler(sweep: SweepConfig, number: int) -> Any:  # noqa: ANN401 - of optuna
    """The sampler of trial `number`.

    Its seed is the sweep's plus `number`, so that a resumed sweep samples the values of an uninterrupted one.
    """
    seed = sweep.seed if sweep.sampler.name in _ONE_SEED_SAMPLERS else sweep.seed + number
    own_options: dict[str, Any] = {"seed": seed}
    if sweep.sampler.name in _GRID_SAMPLERS:
        own_options["search_space"] = {key: values.points() for key, values in sweep.space.items()}
        if ranges := [key for key, points in own_options["search_space"].items() if points is None]:
            raise ConfigError(
                f"`sampler: {sweep.sampler.name}` needs lists of values, and `{ranges[0]}` of the space is a range",
                hint=f"write `choices` for `{ranges[0]}`, or give it a `step`",
            )
    return _make(sweep.sampler, "sampler", own_options)


def make_pruner(sweep: SweepConfig) -> Any:  # noqa: ANN401 - of optuna
    """The sweep's pruner."""
    return _make(sweep.pruner, "pruner", {})


def _make(choose: Choose, kind: str, own_options: dict[str, Any]) -> Any:  # noqa: ANN401 - of either base class
    """An instance of the class that `choose` names; ConfigError for an unknown name or option."""
    optuna = import_optuna()
    classes, options = getattr(optuna, f"{kind}s"), choose.model_extra or {}
    names = [name for name in dir(classes) if name.lower().endswith(kind) and not name.startswith("Base")]
    if choose.name not in names:
        raise ConfigError(f"`{kind}: {choose.name}` is not in optuna.{kind}s", hint=f"known: {', '.join(names)}")
    signature = inspect.signature(made_of := getattr(classes, choose.name)).parameters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return made_of(**({name: value for name, value in own_options.items() if name in signature} | options))
    except (TypeError, ValueError, AttributeError) as wrong:
        hint = f"its options: {', '.join(signature)}"
        raise ConfigError(f"`{kind}: {choose.name}` does not take {options}: {wrong}", hint=hint) from None
