"""The study of a sweep, kept by optuna in a journal file: sampler, pruner, distributions and what makes it the same.

A journal of appended lines survives kill -9 and several readers (optuna 5.0.0; its SQLite storage fails where several
processes create the study).
"""

import inspect
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_finetune.config.run_file import read_yaml
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import ConfigError, DependencyError
from ds_finetune.runs.experiments.sweep_file import Choose, Range, SweepConfig
from ds_finetune.system.versions import check_versions

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler

JOURNAL = "study.journal"
_NAME = "sweep"
_MADE_FROM = "made_from"
_EXHAUSTIVE = ("BruteForceSampler", "GridSampler")
_CONSTANT_SEED = ("BruteForceSampler", "GridSampler", "QMCSampler")
"""Samplers that walk through one sequence, which their seed sets."""


def open_study(sweep: SweepConfig, say: Say) -> "Study":
    """The study of the sweep's folder, made where there is none; ConfigError where it is that of another sweep.

    The folder is there, and the caller has locked it.
    """
    optuna = import_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # For the lock that a killed sweep has left optuna 5.0.0 would wait 30 seconds (storages/journal/_file.py,
    # `JournalFileSymlinkLock`); this process has the lock of the folder itself.
    for lock in Path(sweep.output_dir).glob(f"{JOURNAL}.lock*"):
        lock.unlink(missing_ok=True)
    _cut_torn_line(Path(sweep.output_dir) / JOURNAL, say)
    storage = JournalStorage(JournalFileBackend(str(Path(sweep.output_dir) / JOURNAL)))
    sampler, pruner = make_sampler(sweep, 0), make_pruner(sweep)
    try:
        # Unlike `create_study` with `load_if_exists`, this writes nothing.
        study = optuna.load_study(study_name=_NAME, storage=storage, sampler=sampler, pruner=pruner)
    except KeyError:
        study = optuna.create_study(
            study_name=_NAME, storage=storage, direction=sweep.direction, sampler=sampler, pruner=pruner
        )
    _check_same(study, sweep)
    return study


def _cut_torn_line(journal: Path, say: Say) -> None:
    """Remove a last line without its end, which a full disk or a power failure leaves.

    optuna 5.0.0 would append to it, and could not read the file again.
    """
    if not journal.exists():
        return
    text = journal.read_bytes()
    end = text.rfind(b"\n") + 1
    if end < len(text):
        say(f"{journal}: the last line is incomplete; {len(text) - end} bytes are removed")
        with journal.open("r+b") as file:
            file.truncate(end)


def check_choices(sweep: SweepConfig) -> None:
    """ConfigError where optuna has no such sampler or pruner, or it does not take the options or the space."""
    make_sampler(sweep, 0)
    make_pruner(sweep)


def import_optuna() -> Any:  # noqa: ANN401 - a module
    """The package optuna; DependencyError where it is not installed."""
    try:
        import optuna
    except ImportError:
        raise DependencyError(
            "sweeps need optuna, which is not installed", hint="pip install 'ds_finetune[sweep]'"
        ) from None
    check_versions("sweep")
    return optuna


def distributions(sweep: SweepConfig) -> "dict[str, BaseDistribution]":
    """optuna's distribution of each key; choices are their JSON text, since optuna takes no lists."""
    return {key: _distribution(values) for key, values in sweep.space.items()}


def _distribution(values: Range) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if values.choices is not None:
        return CategoricalDistribution(values.points() or [])
    low, high = values.numbers
    if values.is_whole:
        return IntDistribution(int(low), int(high), log=values.log, step=int(values.step or 1))
    return FloatDistribution(low, high, log=values.log, step=values.step)


def run_file_values(sweep: SweepConfig, drawn: Mapping[str, Any]) -> dict[str, object]:
    """What optuna drew, as values of the run file."""
    return {key: json.loads(value) if sweep.space[key].choices is not None else value for key, value in drawn.items()}


def make_sampler(sweep: SweepConfig, number: int) -> "BaseSampler":
    """The sampler that draws trial `number`.

    Its seed is the sweep's plus `number`, so that a sweep that was interrupted draws what it would have drawn.
    """
    seed = sweep.seed if sweep.sampler.name in _CONSTANT_SEED else sweep.seed + number
    more: dict[str, Any] = {"search_space": _grid(sweep)} if sweep.sampler.name == "GridSampler" else {}
    made: BaseSampler = _make(sweep.sampler, "samplers", "Sampler", {"seed": seed, **more})
    return made


def make_pruner(sweep: SweepConfig) -> "BasePruner":
    """The pruner of the sweep."""
    made: BasePruner = _make(sweep.pruner, "pruners", "Pruner", {})
    return made


def _make(choose: Choose, module: str, kind: str, more: dict[str, Any]) -> Any:  # noqa: ANN401 - of either base class
    """An object of the class that `choose` names; ConfigError for an unknown name or options it does not take."""
    classes = getattr(import_optuna(), module)
    names = [name for name in dir(classes) if name.endswith(kind) and not name.startswith("Base")]
    if choose.name not in names:
        raise ConfigError(
            f"`{kind.lower()}: {choose.name}` is not in optuna.{module}", hint=f"known: {', '.join(names)}"
        )
    made_of = getattr(classes, choose.name)
    known = inspect.signature(made_of).parameters
    options = {**{name: value for name, value in more.items() if name in known}, **choose.options}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", import_optuna().exceptions.ExperimentalWarning)
            return made_of(**options)
    except (TypeError, ValueError, AttributeError) as wrong:
        raise ConfigError(
            f"`{kind.lower()}: {choose.name}` does not take {choose.options}: {wrong}",
            hint=f"its options: {', '.join(known)}",
        ) from None


def _grid(sweep: SweepConfig) -> dict[str, list[Any]]:
    """Every value of each key, for optuna's GridSampler; ConfigError where a range has no step."""
    points = {key: values.points() for key, values in sweep.space.items()}
    ranges = [key for key, each in points.items() if each is None]
    if ranges:
        raise ConfigError(
            f"`sampler: GridSampler` needs a list of values, and `{ranges[0]}` of the space is a range",
            hint=f"write `choices` for `{ranges[0]}`, or give it a `step`",
        )
    return {key: each for key, each in points.items() if each is not None}


def num_points(sweep: SweepConfig) -> float:
    """Points of the space that a sampler which repeats none can draw; infinite for other samplers and spaces."""
    if sweep.sampler.name not in _EXHAUSTIVE:
        return math.inf
    points = [values.points() for values in sweep.space.values()]
    return math.prod(math.inf if each is None else len(each) for each in points)


def _check_same(study: "Study", sweep: SweepConfig) -> None:
    """ConfigError where the study was made from another run file, space or metric; nothing is written then."""
    dumped = sweep.model_dump(mode="json")
    # Without these, the values of trials would have another meaning.
    same = {f"`{name}`": dumped[name] for name in ("space", "metric", "direction", "value", "ranks")}
    same = {"the run file": read_yaml(Path(sweep.run))[0], **same}
    parts = {name: json.dumps(part, sort_keys=True) for name, part in same.items()}
    earlier = study.user_attrs.get(_MADE_FROM)
    if earlier is None:
        study.set_user_attr(_MADE_FROM, parts)
        return
    changed = [name for name in parts if earlier.get(name) != parts[name]]
    if changed:
        name = changed[0]
        raise ConfigError(
            f"`{sweep.output_dir}` holds a sweep whose {' and '.join(changed)} was different: {name} was "
            f"{earlier.get(name)} and is {parts[name]}",
            hint="name another output_dir, or undo the change",
        )
