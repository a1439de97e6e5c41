"""`ds-finetune sweep`: trains trials as processes of the `ds-finetune` command. optuna chooses the values of a trial
and ends bad trials early.

optuna keeps the study in a journal of appended lines, which survives kill -9 (optuna 5.0.0).
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from ds_finetune.checkpoint.locking import LOCK, lock_folder
from ds_finetune.config.run_file import read_yaml
from ds_finetune.console.phase_line import Say, time_text
from ds_finetune.errors import ConfigError, RunError
from ds_finetune.export.output_folder import check_out_empty
from ds_finetune.runs.experiments.jobs import CHECKPOINTS, REPORT, RUN, ExperimentRun, run_all, run_slots
from ds_finetune.runs.experiments.sweep_file import SweepConfig, import_optuna, make_chosen, make_sampler
from ds_finetune.runs.report.charts import Chart, Line
from ds_finetune.runs.report.page import NONE, Charts, Page, PageSection, Table, number_text
from ds_finetune.runs.report.write import write_page
from ds_finetune.system.whole_file import replace_file

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

BEST, JOURNAL = "best.yaml", "study.journal"
_TRIALS, _STUDY = "trials", "sweep"
_MADE_FROM, _REASON = "made_from", "reason"
"""Names of attributes that this program stores with the study and its trials in optuna's journal."""


def run_sweep(sweep: SweepConfig, say: Say) -> list[tuple[str, str]]:
    """Run the trials of a sweep that are not done yet, and write the run file of the best trial and a page. Returns
    results as pairs of name and text.

    An interrupted sweep, even after kill -9, resumes its trials in their folders. SystemExit after a signal, once all
    runs have saved. RunError if no trial has a value. ConfigError or OutputError, before anything is written, if the
    sweep file or the folder is unusable.
    """
    folder = Path(sweep.output_dir)
    slots = run_slots(sweep.ranks, sweep.parallel)
    make_sampler(sweep, 0)
    make_chosen(sweep.pruner, "pruner")
    if not (folder / JOURNAL).is_file():
        # The folder may hold a lock file: a start that failed before it wrote a journal leaves one.
        message = f"output_dir `{folder}` is not empty, but holds no sweep"
        check_out_empty(folder, message, may_hold=lambda entry: entry.name == LOCK)
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, seconds=0.0, say=say):
        study = _open_study(sweep, say)
        progress = f"{len(_begun(study))} of {sweep.trials} trials begun, {len(slots)} at once"
        say(f"{progress}; after an interruption, the same command continues the sweep in {folder}")
        run_all(_trials(sweep, study, say), slots)
        return _write_results(sweep, study)


def _open_study(sweep: SweepConfig, say: Say) -> "Study":
    optuna = import_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    journal = Path(sweep.output_dir) / JOURNAL
    if journal.exists() and (torn := len((text := journal.read_bytes()).rpartition(b"\n")[2])):
        # The journal may end in an incomplete line after a full disk or a power failure; optuna 5.0.0 would append to
        # that line.
        say(f"{journal}: the last line is incomplete; {torn} bytes are removed")
        replace_file(journal, text[:-torn])
    pruner, storage = make_chosen(sweep.pruner, "pruner"), JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.create_study(
        study_name=_STUDY, direction=sweep.direction, storage=storage, pruner=pruner, load_if_exists=True
    )
    # Trials of an earlier sweep in this folder count only if it had the same settings.
    settings = sweep.model_dump(mode="json", include={"space", "metric", "direction", "ranks"})
    settings = {"the run file": read_yaml(Path(sweep.run))[0], **settings}
    settings_texts = {name: json.dumps(part, sort_keys=True) for name, part in settings.items()}
    earlier = study.user_attrs.get(_MADE_FROM, settings_texts)
    if earlier.keys() != settings_texts.keys():
        raise ConfigError(
            f"`{sweep.output_dir}` holds a sweep of another version of ds-finetune", hint="name another output_dir"
        )
    if changed := [name for name, text in settings_texts.items() if earlier[name] != text]:
        raise ConfigError(
            f"`{sweep.output_dir}` holds a sweep with other settings: {' and '.join(changed)}; {changed[0]} was "
            f"{earlier[changed[0]]} and is now {settings_texts[changed[0]]}",
            hint="name another output_dir, or undo the change",
        )
    if _MADE_FROM not in study.user_attrs:
        study.set_user_attr(_MADE_FROM, settings_texts)
    for values in sweep.grid():
        study.enqueue_trial(values, skip_if_exists=True)
    return study


def _trials(sweep: SweepConfig, study: "Study", say: Say) -> Iterator["_TrialRun"]:
    from optuna.trial import Trial, TrialState

    for frozen in study.get_trials(states=(TrialState.RUNNING,)):
        study.sampler = make_sampler(sweep, frozen.number)
        yield _TrialRun(sweep, study, Trial(study, frozen._trial_id), say)
    while (number := len(_begun(study))) < sweep.trials:
        if sweep.grid() and number == len(study.get_trials(deepcopy=False)):
            return
        study.sampler = make_sampler(sweep, number)
        yield _TrialRun(sweep, study, study.ask(), say)


def _begun(study: "Study") -> list["FrozenTrial"]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name != "WAITING"]


class _TrialRun(ExperimentRun):
    """The run of a trial. It reports its metrics to optuna while it trains, and its result when it has ended."""

    def __init__(self, sweep: SweepConfig, study: "Study", trial: "Trial", say: Say) -> None:
        self._sweep, self._study, self._trial, self._say = sweep, study, trial, say
        # Sample the trial's values as `Study.ask(space)` does. If a killed process has sampled some of them already,
        # `_suggest` returns those (optuna 5.0.0, trial/_trial.py).
        parameters = {key: trial._suggest(key, values.distribution()) for key, values in sweep.space.items()}
        self._values, folder = sweep.values_of(parameters), Path(sweep.output_dir) / _TRIALS / f"{trial.number:04}"
        tree = sweep.run_tree({**self._values, "eval.keep_best": False}, folder / RUN)
        super().__init__(folder, {**tree, "export": {"at_end": False}})
        self._last_reported_step = max(study.get_trials()[trial.number].intermediate_values, default=-1)
        self._is_pruned = False

    def update(self) -> bool:
        """Report new values of the metric to the pruner, which may end the run. Returns whether the run has ended."""
        has_ended, metric = super().update(), self._sweep.metric
        points = self.metrics.curves[metric].points() if metric in self.metrics.curves else []
        for step, value in points:
            if step > self._last_reported_step and math.isfinite(value) and not self._is_pruned:
                self._last_reported_step = step
                self._trial.report(value, step)
                if self._trial.should_prune():
                    self._is_pruned = True
                    self.process.terminate()
        if has_ended:
            self._tell()
        return has_ended

    def _tell(self) -> None:
        state, value, reason = self._outcome()
        self._trial.set_user_attr(_REASON, reason)
        self._study.tell(self._trial, value, import_optuna().trial.TrialState[state])
        shutil.rmtree(self.folder / RUN / CHECKPOINTS, ignore_errors=True)
        metric, number = self._sweep.metric, self._trial.number
        sampled = ", ".join(f"{key} {value_text(each)}" for key, each in self._values.items())
        text = f"{metric} {value}" if state == "COMPLETE" else f"{state.lower()}: {reason}"
        self._say(f"trial {number}: {sampled}: {text} ({self.seconds:.0f} s)")
        if not self.code and metric not in self.metrics.curves:
            raise RunError(
                f"the metric of the sweep is `{metric}`, but trial {number} has not recorded it",
                hint=f"name another output_dir, and a recorded metric: {', '.join(sorted(self.metrics.curves))}",
            )

    def _outcome(self) -> tuple[str, float | None, str]:
        """State of the trial, its value or None, and the reason why it has no value."""
        metric = self._sweep.metric
        value = self.metrics.curves[metric].last if metric in self.metrics.curves else None
        # A run that reached its last step although it was asked to stop is complete, not pruned.
        if self._is_pruned and self.code:
            return "PRUNED", None, f"after step {self._last_reported_step}"
        # A diverged trial counts as pruned instead of failed, because a sampler learns from a pruned trial that its
        # values are bad.
        if self.has_diverged or (value is not None and not math.isfinite(value)):
            return "PRUNED", None, f"diverged, {metric} {value}"
        if self.code or value is None:
            return "FAIL", None, self.reason or f"{metric} is missing"
        return "COMPLETE", value, ""


def _write_results(sweep: SweepConfig, study: "Study") -> list[tuple[str, str]]:
    folder, trials = Path(sweep.output_dir), _begun(study)
    if not any(trial.state.name == "COMPLETE" for trial in trials):
        raise RunError(
            f"none of {len(trials)} trials ended with a value of {sweep.metric}; trial {trials[-1].number} has the "
            f"state {trials[-1].state.name.lower()}: {trials[-1].user_attrs[_REASON]}",
            hint=f"read the logs of the trials in {folder / _TRIALS}, or raise `trials`",
        )
    best = study.best_trial
    values = sweep.values_of(best.params)
    text = yaml.safe_dump(sweep.run_tree(values, folder / "best"), sort_keys=False, allow_unicode=True)
    (folder / BEST).write_text(text, encoding="utf-8")
    page = write_page(_page(sweep, trials, best.number), folder / REPORT)
    best_values = [(key, value_text(value)) for key, value in values.items()]
    files = [("run file", str(folder / BEST)), ("report", str(page))]
    return [("best trial", f"{best.number}: {best.value:.6g}"), *best_values, *files]


def _page(sweep: SweepConfig, trials: Sequence["FrozenTrial"], best: int) -> Page:
    rows = [
        (
            str(trial.number),
            f"{trial.state.name.lower()} {trial.user_attrs[_REASON]}".strip(),
            *map(value_text, sweep.values_of(trial.params).values()),
            number_text(trial.value),
            time_text(trial.duration.total_seconds()) if trial.duration else NONE,
        )
        for trial in trials
    ]
    complete = [(sweep.values_of(trial.params), trial.value) for trial in trials if trial.value is not None]
    charts = []
    for key, space in sweep.space.items():
        values = [values[key] for values, _ in complete]
        categories = list(dict.fromkeys(map(value_text, space.choices or ())))
        x = [*map(value_text, values)] if categories else values
        dots = Line(sweep.metric, x, [value for _, value in complete], "dots")
        charts.append(Chart(key, [dots], x_name=key, has_log_x=space.log, categories=categories))
    columns = ("trial", "state", *sweep.space, sweep.metric, "start to end")
    table = Table(f"All trials; trial {best} is the best", columns, rows, 2)
    section = PageSection("trials", "Trials", [table, Charts(charts)], f"{BEST} is the run file of the best trial.")
    return Page(f"Sweep of {sweep.run}", sweep.metric, "", [], [section])


def value_text(value: object) -> str:
    """Format a value of the run file as text."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
