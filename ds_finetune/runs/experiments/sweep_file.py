"""The schema of a sweep file, and `read_sweep`, which checks each value of the space against the run file."""

import copy
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ds_finetune.config.invalid_keys import explain
from ds_finetune.config.run_file import Lines, read_yaml, set_key
from ds_finetune.config.schema import validate_tree
from ds_finetune.config.sections import Section, short_form
from ds_finetune.errors import ConfigError

Choice = bool | int | float | str | None | list[Any] | dict[str, Any]


class Range(Section):
    """Values of one key: `choices`, or the numbers from `low` to `high`."""

    choices: Annotated[tuple[Choice, ...] | None, Field(min_length=1)] = None
    """Values of any kind, as the run file has them."""
    low: int | float | None = None
    """Least number."""
    high: int | float | None = None
    """Greatest number; whole numbers are drawn where `low` and `high` are whole."""
    log: bool = False
    """Draw by the logarithm, for learning rates."""
    step: int | float | None = None
    """Distance of two neighbouring numbers; left out, 1 for whole numbers and none for others."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> "Range":
        given = sorted(self.model_fields_set - {"choices"})
        if (self.choices is not None and given) or (self.choices is None and None in (self.low, self.high)):
            raise ValueError("it should have either `choices`, or `low` and `high` (with `log` or `step`)")
        if self.choices is not None:
            return self
        low, high = self.numbers
        if not low < high:
            raise ValueError(f"low is {low} and high is {high}: high should be greater")
        if self.log and (low <= 0 or self.step is not None):
            raise ValueError("with `log`, `low` should be above 0 and `step` left out")
        if self.step is not None and not 0 < self.step <= high - low:
            raise ValueError(f"step is {self.step}: it should be above 0 and at most {high - low}")
        return self

    @property
    def is_whole(self) -> bool:
        """Whether whole numbers are drawn."""
        return all(isinstance(number, int) for number in (self.low, self.high, self.step or 1))

    @property
    def numbers(self) -> tuple[float, float]:
        """Least and greatest number of a range without choices."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    def points(self) -> list[Any] | None:
        """All values that optuna may draw, where they can be listed: choices are their JSON text, as optuna takes no
        lists.
        """
        if self.choices is not None:
            return list(dict.fromkeys(json.dumps(choice) for choice in self.choices))
        if self.log or (self.step is None and not self.is_whole):
            return None
        (low, high), step = self.numbers, self.step or 1
        return [low + step * number for number in range(int((high - low) / step + 1e-9) + 1)]


class Choose(Section):
    """A sampler or pruner of optuna by its name, with its options."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Class in `optuna.samplers` or `optuna.pruners`."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the class."""
        return dict(self.model_extra or {})


class SweepConfig(Section):
    """The configuration of a sweep: which run file is varied, over which space, and how trials are started."""

    run: str
    """The run file; its values hold where the space has none."""
    space: Annotated[dict[str, Range], Field(min_length=1)]
    """Values of each dotted key of the run file, e.g. `optim.lr: {low: 1.0e-6, high: 1.0e-3, log: true}`."""
    output_dir: str
    """Folder of the sweep: its study, a folder for each trial, `best.yaml` and `report.html`."""
    trials: int = Field(ge=1)
    """Number of trials, those that were pruned or have failed among them."""
    metric: str = "eval/loss"
    """A name of docs/reference/metrics.md; each record that has it is reported to the pruner."""
    direction: Literal["minimize", "maximize"] = "minimize"
    """Whether the best trial has the least or the greatest value."""
    value: Literal["last", "best"] = "last"
    """Which record of a trial counts: its last one, or its best one."""
    sampler: Annotated[Choose, BeforeValidator(short_form("name"))] = Choose(name="TPESampler")
    """What draws the values of trials, by optuna's name, with options: `{name: TPESampler, multivariate: true}`."""
    pruner: Annotated[Choose, BeforeValidator(short_form("name"))] = Choose(name="NopPruner")
    """What ends hopeless trials early, by optuna's name, e.g. `MedianPruner`; the default ends none."""
    seed: int = Field(default=0, ge=0)
    """Seed of the sampler. All trials have the run file's own `train.seed`."""
    repeats: int = Field(default=3, ge=0)
    """Seeds with which the best run file is trained again, those after the run file's own; 0 trains nothing again."""
    ranks: int = Field(default=1, ge=1)
    """Ranks of each trial."""
    parallel: int = Field(default=1, ge=1)
    """Trials at the same time on this machine, each on GPUs of its own; with `hostfile` all slots are used."""
    hostfile: str | None = None
    """Hosts whose slots the trials share; they see this folder under the same path."""
    max_failed: int = Field(default=3, ge=1)
    """Failed trials in a row after which the sweep ends."""


def read_sweep(path: Path) -> SweepConfig:
    """Read a sweep file; ConfigError names key and line, and the nearest legal key of the run file.

    Each value of `choices` and each end of a range is set in the run file by itself, and the result is checked as a run
    file is.
    """
    tree, lines = read_yaml(path)
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
    _check_free(sweep, path, lines)
    validate_tree(copy.deepcopy(base), base_lines, sweep.run)
    for key, values in sweep.space.items():
        for value in values.choices or values.numbers:
            changed = copy.deepcopy(base)
            source = f"{path} line {lines.get(('space', key), '?')}"
            set_key(changed, dict(base_lines), key, value, source=source)
            validate_tree(changed, base_lines, f"{source}: with `{key}: {value}`, {sweep.run}")
    return sweep


def _check_free(sweep: SweepConfig, path: Path, lines: Lines) -> None:
    for key in sweep.space:
        if key.split(".")[0] in _OWN_KEYS:
            raise ConfigError(
                f"{path} line {lines.get(('space', key), '?')}: `{key}` is in the space, and the sweep sets "
                f"`{key.split('.')[0]}` itself",
                hint="leave it out of the space",
            )


_OWN_KEYS = ("output_dir", "launch", "export")
"""Sections that a trial's run file has from the sweep."""


def trial_tree(sweep: SweepConfig, values: dict[str, object], output_dir: Path) -> dict[str, Any]:
    """The run file of a trial: the sweep's run file with `values`, without exports, in a folder of its own.

    The best run file is trained again with exports, so that trials need no place for them.
    """
    tree = best_tree(sweep, values, output_dir)
    tree["export"] = {"at_end": False}
    set_key(tree, {}, "eval.keep_best", False, source=sweep.run)
    return tree


def best_tree(sweep: SweepConfig, values: dict[str, object], output_dir: Path) -> dict[str, Any]:
    """The sweep's run file with `values` and a folder of its own."""
    tree, _ = read_yaml(Path(sweep.run))
    for key, value in values.items():
        set_key(tree, {}, key, value, source=sweep.run)
    tree["output_dir"] = str(output_dir)
    return tree
