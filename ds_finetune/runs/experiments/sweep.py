"""`ds-finetune sweep`: trials as processes of the ordinary command, drawn and pruned by optuna."""

import json
import math
import shutil
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_finetune.checkpoint.locking import LOCK, lock_folder
from ds_finetune.config.run_file import read_yaml
from ds_finetune.config.schema import validate_tree
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import ConfigError, RunError
from ds_finetune.export.output_folder import check_out_empty
from ds_finetune.runs.experiments.jobs import (
    CHECKPOINTS,
    RUN,
    ChildRun,
    ExperimentJob,
    is_stopped_code,
    places,
    run_jobs,
    yaml_text,
)
from ds_finetune.runs.experiments.pages import REPORT, write_sweep_page
from ds_finetune.runs.experiments.study import (
    JOURNAL,
    check_choices,
    distributions,
    make_sampler,
    num_points,
    open_study,
    run_file_values,
)
from ds_finetune.runs.experiments.sweep_file import SweepConfig, best_tree, trial_tree
from ds_finetune.runs.metrics import MetricsReader
from ds_finetune.system.whole_file import replace_file

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial, TrialState

RESULT, BEST = "sweep.json", "best.yaml"
_FORMAT = 1
_TRIALS = "trials"
_REASON, _SECONDS, _REPEATS, _EXHAUSTED = "reason", "seconds", "repeats", "exhausted"
"""Attributes of trials and of the study."""
_LOCK_SECONDS = 0.0


@dataclass(frozen=True)
class Repeat:
    """One training of the best run file with a seed of its own."""

    trial: int
    """Number of the trial whose values it has."""
    seed: int
    value: float | None
    reason: str = ""


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found."""

    best_number: int
    best_value: float
    best_values: dict[str, object]
    folder: Path
    repeats: tuple[Repeat, ...] = ()

    def lines(self) -> list[tuple[str, str]]:
        """Names and texts for a table."""
        rows = [("best trial", f"{self.best_number}: {self.best_value:.6g}")]
        rows += [(key, str(value)) for key, value in self.best_values.items()]
        rows += [(f"again, seed {each.seed}", each.reason or f"{each.value:.6g}") for each in self.repeats]
        values = [each.value for each in self.repeats if each.value is not None]
        if len(values) > 1:
            rows.append(("mean, spread", f"{statistics.mean(values):.6g}, {max(values) - min(values):.2g}"))
        return [*rows, ("run file", str(self.folder / BEST)), ("report", str(self.folder / REPORT))]


def run_sweep(sweep: SweepConfig, say: Say) -> SweepResult:
    """Run the trials that are left, write the best run file, and train it with several seeds.

    A sweep that was interrupted, also by kill -9, goes on: trials that were running are resumed in their folders.
    JobsInterruptedError after a signal, once all runs have saved; RunError where trials fail one after another or none
    has a value; ConfigError and OutputError before anything is written, the latter where `output_dir` holds files and
    no sweep.
    """
    folder = Path(sweep.output_dir)
    places_of_trials = places(ranks=sweep.ranks, parallel=sweep.parallel, hostfile=sweep.hostfile, folder=folder)
    check_metric(sweep)
    check_choices(sweep)
    if not (folder / JOURNAL).is_file():
        # A sweep that was killed before it began its journal has left nothing but its lock.
        check_out_empty(
            folder, f"output_dir `{folder}` is not empty and holds no sweep", may_hold=lambda entry: entry.name == LOCK
        )
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, seconds=_LOCK_SECONDS, say=say):
        study = open_study(sweep, say)
        say(f"{len(study.trials)} of {sweep.trials} trials begun, {len(places_of_trials)} at once")
        trials = _Trials(sweep, study, say)
        run_jobs(trials.jobs(), places_of_trials)
        best = trials.best()
        (folder / BEST).write_text(yaml_text(best_tree(sweep, best.best_values, folder / "best")), encoding="utf-8")
        run_jobs(trials.repeat_jobs(best), places_of_trials)
        write_sweep_page(folder, write_result(sweep, study))
    return replace(best, repeats=_repeats_of(study, best))


def check_metric(sweep: SweepConfig) -> None:
    """ConfigError where no record of a trial will have the metric, or a pruner would never see one."""
    tree, lines = read_yaml(Path(sweep.run))
    config = validate_tree(tree, lines, sweep.run)
    if sweep.metric.startswith("eval/") and not config.data.held_out_sets:
        raise ConfigError(
            f"the sweep's metric is `{sweep.metric}`, and {sweep.run} has no `data.eval`",
            hint="name held-out data in data.eval, or a metric of training such as train/loss",
        )
    is_at_end = sweep.metric.startswith("eval/") and config.eval.every is None and "eval.every" not in sweep.space
    if is_at_end and sweep.pruner.name != "NopPruner":
        raise ConfigError(
            f"`pruner: {sweep.pruner.name}` needs values while a trial runs, and {sweep.run} has no `eval.every`: "
            "held-out data is evaluated only at the end",
            hint="set eval.every to e.g. `50 steps`, or leave `pruner` out",
        )


class _Trials:
    """The trials of a study: those that were running first, then new ones, and at last the best one with more seeds."""

    def __init__(self, sweep: SweepConfig, study: "Study", say: Say) -> None:
        self.sweep, self.study, self.say = sweep, study, say

    def jobs(self) -> Iterator[ExperimentJob]:
        """Trials to start; RunError where several in a row have failed."""
        from optuna.trial import Trial, TrialState

        for frozen in self.study.get_trials(states=(TrialState.RUNNING,)):
            yield _TrialJob(self, Trial(self.study, frozen._trial_id), frozen)
        while not self._is_done():
            self._check_failures()
            self.study.sampler = make_sampler(self.sweep, len(self.study.get_trials(deepcopy=False)))
            trial = self.study.ask(distributions(self.sweep))
            frozen = next(each for each in self.study.get_trials(deepcopy=False) if each.number == trial.number)
            yield _TrialJob(self, trial, frozen)

    def repeat_jobs(self, best: SweepResult) -> Iterator[ExperimentJob]:
        """The trainings of the best values that are left, with exports, and with other seeds than the trials have."""
        config = validate_tree(best_tree(self.sweep, best.best_values, best.folder), {}, self.sweep.run)
        known = {each.seed for each in _repeats_of(self.study, best) if not each.reason}
        first = config.train.seed + 1
        for seed in range(first, first + self.sweep.repeats):
            if seed not in known:
                yield _RepeatJob(self, best, seed)

    def tell(self, trial: "Trial", value: float | None, state: "TrialState") -> None:
        """Tell the study how a trial has ended.

        After its last value, a sampler with a list of values calls `Study.stop`, which only `optimize` allows; the
        trial is stored before that (optuna 5.0.0, samplers/_grid.py, `after_trial`).
        """
        try:
            self.study.tell(trial, value, state)
        except RuntimeError as error:
            if "Study.stop" not in str(error):
                raise
            self.study.set_user_attr(_EXHAUSTED, True)

    def _is_done(self) -> bool:
        begun = self.study.get_trials(deepcopy=False)
        if len(begun) >= self.sweep.trials or self.study.user_attrs.get(_EXHAUSTED):
            return True
        # While the last points of a list still run, optuna 5.0.0 would draw one of them again (samplers/_grid.py).
        points = {json.dumps(each.params, sort_keys=True) for each in begun}
        return len(points) >= num_points(self.sweep)

    def best(self) -> SweepResult:
        """The best trial; RunError where none has a value."""
        from optuna.trial import TrialState

        self._check_failures()
        if not self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            raise RunError(
                f"none of {len(self.study.trials)} trials has a value of {self.sweep.metric}: {self._last_reason()}",
                hint=f"see {Path(self.sweep.output_dir) / _TRIALS}",
            )
        best = self.study.best_trial
        assert best.value is not None
        values = run_file_values(self.sweep, best.params)
        return SweepResult(best.number, best.value, values, Path(self.sweep.output_dir))

    def _check_failures(self) -> None:
        from optuna.trial import TrialState

        ended = [each for each in self.study.get_trials(deepcopy=False) if each.state.is_finished()]
        last = ended[-self.sweep.max_failed :]
        if len(last) == self.sweep.max_failed and all(each.state == TrialState.FAIL for each in last):
            raise RunError(
                f"the last {len(last)} trials have failed; {self._last_reason()}",
                hint=f"fix the cause and name another output_dir, or raise max_failed ({self.sweep.max_failed})",
            )

    def _last_reason(self) -> str:
        trials = [each for each in self.study.get_trials(deepcopy=False) if _REASON in each.user_attrs]
        return f"trial {trials[-1].number}: {trials[-1].user_attrs[_REASON]}" if trials else "no trial has ended"


class _TrialJob(ExperimentJob):
    """One trial: reports each value to the pruner, and tells the study how it ended."""

    def __init__(self, trials: _Trials, trial: "Trial", frozen: "FrozenTrial") -> None:
        folder = Path(trials.sweep.output_dir) / _TRIALS / f"{trial.number:04}"
        self._values = run_file_values(trials.sweep, frozen.params)
        super().__init__(folder, trial_tree(trials.sweep, self._values, folder / RUN))
        self._trials, self._trial = trials, trial
        self._reported = max(frozen.intermediate_values, default=-1)
        self._is_pruned = False

    def progressed(self, child: ChildRun) -> None:
        """Report new values, and end the run where the pruner says so."""
        curve = child.metrics.curves.get(self._trials.sweep.metric)
        if curve is None:
            return
        for step, value in zip(*curve.since(0), strict=True):
            if step <= self._reported or self._is_pruned:
                continue
            self._reported = step
            if math.isfinite(value):
                self._trial.report(value, step)
                self._is_pruned = self._trial.should_prune()
        if self._is_pruned:
            child.stop()

    def ended(self, child: ChildRun, code: int) -> None:
        """Tell the study; checkpoints of the trial are removed."""
        from optuna.trial import TrialState

        sweep, trial = self._trials.sweep, self._trial
        value = value_of(sweep, child)
        trial.set_user_attr(_SECONDS, trial.user_attrs.get(_SECONDS, 0.0) + child.seconds)
        state, text = TrialState.COMPLETE, f"{sweep.metric} {value}"
        if self._is_pruned and is_stopped_code(code):
            state, text = TrialState.PRUNED, f"pruned after step {self._reported}, {sweep.metric} {value}"
        elif has_diverged(child.metrics, code, value):
            # Not a failure: a sampler learns from a pruned trial that these values are bad.
            state, text = TrialState.PRUNED, f"diverged, {sweep.metric} {value}"
        elif code or value is None:
            reason = child.why_failed(code) if code else f"{sweep.metric} is missing"
            state, text = TrialState.FAIL, f"failed: {reason}"
        if state != TrialState.COMPLETE:
            trial.set_user_attr(_REASON, text.removeprefix("failed: ").removeprefix("pruned "))
        self._trials.tell(trial, value if state == TrialState.COMPLETE else None, state)
        shutil.rmtree(self.folder / RUN / CHECKPOINTS, ignore_errors=True)
        drawn = ", ".join(
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in self._values.items()
        )
        self._trials.say(f"trial {trial.number}: {drawn}: {text} ({child.seconds:.0f} s)")
        write_result(sweep, self._trials.study)


class _RepeatJob(ExperimentJob):
    """The best run file with one seed."""

    def __init__(self, trials: _Trials, best: SweepResult, seed: int) -> None:
        folder = best.folder / f"best-{best.best_number:04}-seed-{seed}"
        super().__init__(folder, best_tree(trials.sweep, {**best.best_values, "train.seed": seed}, folder / RUN))
        self._trials, self._number, self._seed = trials, best.best_number, seed

    def ended(self, child: ChildRun, code: int) -> None:
        """Keep the value in the study."""
        sweep, study = self._trials.sweep, self._trials.study
        value = None if code else value_of(sweep, child)
        reason = "" if value is not None else child.why_failed(code) if code else f"{sweep.metric} is missing"
        if value is not None and not math.isfinite(value):
            value, reason = None, f"diverged, {sweep.metric} {value}"
        repeat = Repeat(self._number, self._seed, value, reason)
        kept = [each for each in _all_repeats(study) if (each.trial, each.seed) != (repeat.trial, repeat.seed)]
        study.set_user_attr(_REPEATS, [asdict(each) for each in (*kept, repeat)])
        self._trials.say(f"best run file, seed {self._seed}: {reason or f'{sweep.metric} {value:.6g}'}")


def _all_repeats(study: "Study") -> list[Repeat]:
    """The trainings that repeated a best trial with another seed, also those of trials that were the best earlier."""
    return [Repeat(**each) for each in study.user_attrs.get(_REPEATS, [])]


def _repeats_of(study: "Study", best: SweepResult) -> tuple[Repeat, ...]:
    found = [each for each in _all_repeats(study) if each.trial == best.best_number]
    return tuple(sorted(found, key=lambda each: each.seed))


def value_of(sweep: SweepConfig, child: ChildRun) -> float | None:
    """The value of a run: the last record of the metric, or the best finite one; None where no record has it."""
    curve = child.metrics.curves.get(sweep.metric)
    if curve is None or not len(curve):
        return None
    values = curve.values
    finite = values[np.isfinite(values)]
    if sweep.value == "last" or not len(finite):
        return float(values[-1])
    return float(finite.max() if sweep.direction == "maximize" else finite.min())


def has_diverged(metrics: MetricsReader, code: int, value: float | None) -> bool:
    """Whether a run has a value that is no number, or failed while it skipped steps for gradients that are none.

    A run that skipped its last step and ended well, as fp16 may, has not diverged.
    """
    skipped = metrics.curves.get("train/skipped")
    is_skipping = skipped is not None and bool(len(skipped)) and skipped.last > 0
    return (value is not None and not math.isfinite(value)) or (code != 0 and is_skipping)


def write_result(sweep: SweepConfig, study: "Study") -> dict[str, Any]:
    """Write `sweep.json`: all trials, the best one, importances of keys, and the repeated trainings. Returns it."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    is_any = any(each.state == TrialState.COMPLETE for each in trials)
    tree = {
        "format": _FORMAT,
        "run": sweep.run,
        "metric": sweep.metric,
        "direction": sweep.direction,
        "space": sweep.model_dump(mode="json", exclude_unset=True)["space"],
        "trials": [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "value": trial.value,
                "values": run_file_values(sweep, trial.params),
                "steps": sorted(trial.intermediate_values.items()),
                "seconds": trial.user_attrs.get(_SECONDS),
                "reason": trial.user_attrs.get(_REASON, ""),
            }
            for trial in trials
        ],
        "best": study.best_trial.number if is_any else None,
        "importances": _importances(study),
        "repeats": [asdict(each) for each in _all_repeats(study)],
    }
    replace_file(Path(sweep.output_dir) / RESULT, json.dumps(tree, indent=1) + "\n")
    return tree


def _importances(study: "Study") -> dict[str, float]:
    """Share of each key in the differences of values, by PED-ANOVA; empty with too few completed trials."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    try:
        with warnings.catch_warnings():
            # It warns of too few trials, and then calls all keys equally important.
            warnings.simplefilter("error", UserWarning)
            found = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError, UserWarning):
        return {}
    return {key: float(value) for key, value in found.items()}
