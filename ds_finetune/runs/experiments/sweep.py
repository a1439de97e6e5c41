"""`ds-finetune sweep`: trains trials as processes of the `ds-finetune` command. optuna chooses the values of a trial
and ends bad trials early.

optuna keeps the study in a journal of appended lines, which survives kill -9 (optuna 5.0.0).
"""

import json
import math
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ds_finetune.checkpoint.locking import LOCK, lock_folder
from ds_finetune.config.run_file import read_yaml
from ds_finetune.console.phase_line import Say, time_text
from ds_finetune.errors import INTERRUPTED_EXIT_CODE, ConfigError, DependencyError, RunError
from ds_finetune.export.output_folder import check_out_empty
from ds_finetune.runs.experiments.jobs import (
    CHECKPOINTS,
    REPORT,
    RUN,
    ExperimentRun,
    Job,
    RunSlot,
    run_jobs,
    run_slots,
    yaml_text,
)
from ds_finetune.runs.experiments.sweep_file import SweepConfig, import_optuna, make_chosen, make_sampler
from ds_finetune.runs.report.charts import Chart, Line
from ds_finetune.runs.report.page import NONE, Charts, Page, PageSection, Table, number_text
from ds_finetune.runs.report.write import write_page
from ds_finetune.system.whole_file import replace_file

if TYPE_CHECKING:
    from optuna import Study, Trial

RESULT, BEST, JOURNAL = "sweep.json", "best.yaml", "study.journal"
_TRIALS, _STUDY = "trials", "sweep"
_MADE_FROM, _REASON, _SECONDS = "made_from", "reason", "seconds"
"""Names of attributes that this program stores with the study and its trials in optuna's journal."""
_STOPPED_CODES = (INTERRUPTED_EXIT_CODE, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a run that SIGTERM ended: the code after a save, the code of a killed process, and that code as shells
report it (128 + 15).
"""


def run_sweep(sweep: SweepConfig, say: Say) -> dict[str, Any]:
    """Run the trials of a sweep that are not done yet, and write the run file of the best trial and a page. Returns the
    content of `sweep.json`.

    An interrupted sweep, even after kill -9, resumes its trials in their folders. JobsInterruptedError after a signal,
    once all runs have saved. RunError if trials fail one after another, or if no trial has a value. ConfigError or
    OutputError, before anything is written, if the sweep file or the folder is unusable.
    """
    folder = Path(sweep.output_dir)
    slots = run_slots(ranks=sweep.ranks, parallel=sweep.parallel, hostfile=sweep.hostfile)
    make_sampler(sweep, 0)
    make_chosen(sweep.pruner, "pruner", {})
    if not (folder / JOURNAL).is_file():
        # A sweep that was killed before it created its journal leaves only its lock file in the folder.
        check_out_empty(
            folder, f"output_dir `{folder}` is not empty, but holds no sweep", may_hold=lambda entry: entry.name == LOCK
        )
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, seconds=0.0, say=say):
        study = _open_study(sweep, say)
        progress = f"{len(study.trials)} of {sweep.trials} trials begun, {len(slots)} at once"
        say(f"{progress}; after an interruption, the same command continues the sweep in {folder}")
        try:
            run_jobs(_trial_jobs(sweep, study, say), slots)
        except ImportError as absent:
            # optuna imports the packages that a sampler needs only when the sampler first learns from trials.
            raise DependencyError(
                f"optuna's `{sweep.sampler.name}` needs the package `{absent.name}`, which is not installed",
                hint="install the package and repeat the command, which resumes the sweep, or choose another sampler",
            ) from None
        _check_failures(sweep, study)
        tree = _write_result(sweep, study)
        if tree["best"] is None:
            last = tree["trials"][-1]
            raise RunError(
                f"none of {len(tree['trials'])} trials ended with a value of {sweep.metric}; "
                f"trial {last['number']} has the state {last['state']}: {last['reason']}",
                hint=f"read the logs of the trials in {folder / _TRIALS}, or raise `trials`",
            )
        best = tree["trials"][tree["best"]]
        (folder / BEST).write_text(yaml_text(sweep.run_tree(best["values"], folder / "best")), encoding="utf-8")
        write_page(_page(tree), folder / REPORT)
    return tree


def _open_study(sweep: SweepConfig, say: Say) -> "Study":
    optuna = import_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    journal = Path(sweep.output_dir) / JOURNAL
    # optuna 5.0.0 would wait 30 seconds for the lock of a killed sweep (storages/journal/_file.py).
    for lock in journal.parent.glob(f"{JOURNAL}.lock*"):
        lock.unlink(missing_ok=True)
    if journal.exists() and (torn := len((text := journal.read_bytes()).rpartition(b"\n")[2])):
        # The journal may end in an incomplete line after a full disk or a power failure; optuna 5.0.0 would append to
        # that line.
        say(f"{journal}: the last line is incomplete; {torn} bytes are removed")
        replace_file(journal, text[:-torn])
    pruner, storage = make_chosen(sweep.pruner, "pruner", {}), JournalStorage(JournalFileBackend(str(journal)))
    try:
        # The study is loaded first, because `create_study` with `load_if_exists` would write to the journal.
        study: Study = optuna.load_study(study_name=_STUDY, storage=storage, pruner=pruner)
    except KeyError:
        study = optuna.create_study(study_name=_STUDY, direction=sweep.direction, storage=storage, pruner=pruner)
    dumped = sweep.model_dump(mode="json")
    # Trials of an earlier sweep in this folder count only if it had the same settings.
    settings = {f"`{name}`": dumped[name] for name in ("space", "metric", "direction", "value", "ranks")}
    settings = {"the run file": read_yaml(Path(sweep.run))[0], **settings}
    parts = {name: json.dumps(part, sort_keys=True) for name, part in settings.items()}
    earlier = study.user_attrs.get(_MADE_FROM, parts)
    if changed := [name for name in parts if earlier.get(name) != parts[name]]:
        raise ConfigError(
            f"`{sweep.output_dir}` holds a sweep with other settings: {' and '.join(changed)}; {changed[0]} was "
            f"{earlier.get(changed[0])} and is now {parts[changed[0]]}",
            hint="name another output_dir, or undo the change",
        )
    if _MADE_FROM not in study.user_attrs:
        study.set_user_attr(_MADE_FROM, parts)
    return study


def _trial_jobs(sweep: SweepConfig, study: "Study", say: Say) -> Iterator[Job]:
    from optuna.trial import Trial, TrialState

    for frozen in study.get_trials(states=(TrialState.RUNNING,)):
        study.sampler = make_sampler(sweep, frozen.number)
        yield partial(_run_trial, sweep, study, Trial(study, frozen._trial_id), say)
    # `most_trials` limits a grid to one trial per combination. While the last combinations are running, optuna 5.0.0
    # would sample a combination again (samplers/_grid.py).
    while (number := len(study.get_trials(deepcopy=False))) < sweep.most_trials:
        _check_failures(sweep, study)
        study.sampler = make_sampler(sweep, number)
        yield partial(_run_trial, sweep, study, study.ask(), say)


def _check_failures(sweep: SweepConfig, study: "Study") -> None:
    finished = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    last = finished[-sweep.max_failed :]
    if len(last) == sweep.max_failed and all(trial.state.name == "FAIL" for trial in last):
        raise RunError(
            f"the last {len(last)} trials failed; trial {last[-1].number} because: {last[-1].user_attrs[_REASON]}",
            hint=f"fix the cause and name another output_dir, or raise max_failed, which is {sweep.max_failed}",
        )


async def _run_trial(sweep: SweepConfig, study: "Study", trial: "Trial", say: Say, slot: RunSlot) -> None:
    # Sample the trial's values as `Study.ask(space)` does. If a killed process has sampled some of them already,
    # `_suggest` returns those (optuna 5.0.0, trial/_trial.py).
    parameters = {key: trial._suggest(key, values.distribution()) for key, values in sweep.space.items()}
    values, folder = sweep.values_of(parameters), Path(sweep.output_dir) / _TRIALS / f"{trial.number:04}"
    tree = sweep.run_tree({**values, "eval.keep_best": False}, folder / RUN)
    run = ExperimentRun(folder, {**tree, "export": {"at_end": False}})
    reported, is_pruned = max(study.get_trials()[trial.number].intermediate_values, default=-1), False

    def should_stop() -> bool:
        nonlocal reported, is_pruned
        curve = run.metrics.curves.get(sweep.metric)
        for step, value in curve.points() if curve is not None else ():
            if step > reported and math.isfinite(value) and not is_pruned:
                reported = step
                trial.report(value, step)
                is_pruned = trial.should_prune()
        return is_pruned

    await run.train(slot, should_stop)
    # A run may have reached its last step before it was asked to stop. Such a trial is complete, not pruned.
    is_pruned = is_pruned and run.code in _STOPPED_CODES
    state, value, reason = ("PRUNED", None, f"after step {reported}") if is_pruned else _outcome(sweep, run)
    trial.set_user_attr(_REASON, reason)
    trial.set_user_attr(_SECONDS, trial.user_attrs.get(_SECONDS, 0.0) + run.seconds)
    try:
        study.tell(trial, value, import_optuna().trial.TrialState[state])
    except RuntimeError as error:
        # After the last combination GridSampler calls `Study.stop`, which raises this error outside of `optimize`. The
        # trial is stored by then (optuna 5.0.0, samplers/_grid.py, `after_trial`).
        if "Study.stop" not in str(error):
            raise
    shutil.rmtree(folder / RUN / CHECKPOINTS, ignore_errors=True)
    sampled = ", ".join(f"{key} {value_text(each)}" for key, each in values.items())
    text = f"{sweep.metric} {value}" if state == "COMPLETE" else f"{state.lower()}: {reason}"
    say(f"trial {trial.number}: {sampled}: {text} ({run.seconds:.0f} s)")
    _write_result(sweep, study)
    if not run.code and sweep.metric not in run.metrics.curves:
        raise RunError(
            f"the metric of the sweep is `{sweep.metric}`, but trial {trial.number} has not recorded it",
            hint=f"name another output_dir, and a recorded metric: {', '.join(sorted(run.metrics.curves))}",
        )


def _outcome(sweep: SweepConfig, run: ExperimentRun) -> tuple[str, float | None, str]:
    """The outcome of a trial that optuna has not pruned: its state, its value, and, without a value, the reason."""
    curve, value = run.metrics.curves.get(sweep.metric), None
    if curve is not None:
        finite = curve.values[np.isfinite(curve.values)]
        best = max if sweep.direction == "maximize" else min
        value = curve.last if sweep.value == "last" or not len(finite) else best(finite.tolist())
    if run.has_diverged or (value is not None and not math.isfinite(value)):
        # A diverged trial counts as pruned instead of failed, because a sampler learns from a pruned trial that its
        # values are bad.
        return "PRUNED", None, f"diverged, {sweep.metric} {value}"
    if run.code or value is None:
        return "FAIL", None, run.reason or f"{sweep.metric} is missing"
    return "COMPLETE", value, ""


def _write_result(sweep: SweepConfig, study: "Study") -> dict[str, Any]:
    trials = study.get_trials(deepcopy=False)
    tree = {
        "format": 1,
        "run": sweep.run,
        "metric": sweep.metric,
        "direction": sweep.direction,
        "space": sweep.model_dump(mode="json", exclude_unset=True)["space"],
        "trials": [
            {
                "number": trial.number,
                "state": trial.state.name.lower(),
                "value": trial.value,
                "values": sweep.values_of(trial.params),
                "steps": sorted(trial.intermediate_values.items()),
                "seconds": trial.user_attrs.get(_SECONDS),
                "reason": trial.user_attrs.get(_REASON, ""),
            }
            for trial in trials
        ],
        "best": study.best_trial.number if any(trial.state.name == "COMPLETE" for trial in trials) else None,
    }
    replace_file(Path(sweep.output_dir) / RESULT, json.dumps(tree, indent=1) + "\n")
    return tree


def _page(tree: dict[str, Any]) -> Page:
    metric, keys = tree["metric"], list(tree["space"])
    rows = [
        (
            str(trial["number"]),
            f"{trial['state']} {trial['reason']}".strip(),
            *(value_text(trial["values"].get(key)) for key in keys),
            number_text(trial["value"]),
            time_text(trial["seconds"]) if trial["seconds"] else NONE,
        )
        for trial in tree["trials"]
    ]
    ended = [trial for trial in tree["trials"] if trial["value"] is not None]
    charts = []
    for key in keys:
        values, space = [trial["values"][key] for trial in ended], tree["space"][key]
        categories = list(dict.fromkeys(map(value_text, space.get("choices", ()))))
        x = [*map(value_text, values)] if categories else values
        dots = Line(metric, x, [trial["value"] for trial in ended], "dots")
        charts.append(Chart(key, [dots], x_name=key, has_log_x=bool(space.get("log")), categories=categories))
    table = Table(f"All trials; trial {tree['best']} is the best", ("trial", "state", *keys, metric, "time"), rows, 2)
    section = PageSection("trials", "Trials", [table, Charts(charts)], f"{BEST} is the run file of the best trial.")
    return Page(f"Sweep of {tree['run']}", metric, "", [], [section])


def value_text(value: object) -> str:
    """Format a value of the run file as text."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
