"""`ds-finetune sweep`: trials as processes of the ordinary command, sampled and pruned by optuna.

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
from ds_finetune.runs.experiments.sweep_file import SweepConfig, import_optuna, make_pruner, make_sampler
from ds_finetune.runs.metrics import MetricsReader
from ds_finetune.runs.report.blocks import (
    NONE,
    Charts,
    DataTable,
    Facts,
    Page,
    ReportSection,
    Tile,
    number_text,
)
from ds_finetune.runs.report.charts import Chart, Line
from ds_finetune.runs.report.write import write_page
from ds_finetune.system.whole_file import replace_file

if TYPE_CHECKING:
    from optuna import Study, Trial

RESULT, BEST, JOURNAL = "sweep.json", "best.yaml", "study.journal"
_TRIALS, _STUDY = "trials", "sweep"
_MADE_FROM, _REASON, _SECONDS = "made_from", "reason", "seconds"
"""Names of attributes of the study and its trials."""
_STOPPED_CODES = (INTERRUPTED_EXIT_CODE, -signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes of a run that SIGTERM ended: after saving, killed by the signal, and as shells report that (128 + 15)."""


def run_sweep(sweep: SweepConfig, say: Say) -> dict[str, Any]:
    """Run the remaining trials, and write the best run file and the page; returns the content of `sweep.json`.

    An interrupted sweep resumes its trials in their folders, also after kill -9. JobsInterruptedError after a signal,
    once all runs have saved; RunError where trials fail one after another, or no trial has a value; ConfigError and
    OutputError before anything is written.
    """
    folder = Path(sweep.output_dir)
    hardware = run_slots(ranks=sweep.ranks, parallel=sweep.parallel, hostfile=sweep.hostfile)
    make_sampler(sweep, 0)
    make_pruner(sweep)
    if not (folder / JOURNAL).is_file():
        # A sweep that was killed before it created its journal leaves only its lock.
        check_out_empty(
            folder, f"output_dir `{folder}` is not empty and holds no sweep", may_hold=lambda entry: entry.name == LOCK
        )
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, seconds=0.0, say=say):
        study = _open_study(sweep, say)
        progress = f"{len(study.trials)} of {sweep.trials} trials begun, {len(hardware)} at once"
        say(f"{progress}; after an interruption, the same command continues the sweep in {folder}")
        try:
            run_jobs(_trial_jobs(sweep, study, say), hardware)
        except ImportError as absent:
            # optuna imports a sampler's dependencies when the sampler first learns from trials.
            raise DependencyError(
                f"`sampler: {sweep.sampler.name}` needs `{absent.name}`, which is not installed",
                hint="install it and give the same command again, which continues, or choose another sampler",
            ) from None
        _check_failures(sweep, study)
        tree = write_result(sweep, study)
        if tree["best"] is None:
            last = tree["trials"][-1]
            raise RunError(
                f"none of {len(tree['trials'])} trials has ended with a value of {sweep.metric}; "
                f"trial {last['number']}: {last['state']}, {last['reason']}",
                hint=f"see {folder / _TRIALS}, or raise `trials`",
            )
        values = sweep.values_of(study.best_trial.params)
        (folder / BEST).write_text(yaml_text(sweep.run_tree(values, folder / "best")), encoding="utf-8")
        write_sweep_page(folder, tree)
    return tree


def _open_study(sweep: SweepConfig, say: Say) -> "Study":
    """Open or create the study in the sweep's folder, which is locked; ConfigError for the study of another sweep."""
    optuna = import_optuna()
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    journal = Path(sweep.output_dir) / JOURNAL
    # optuna 5.0.0 would wait 30 seconds for the lock of a killed sweep (storages/journal/_file.py).
    for lock in journal.parent.glob(f"{JOURNAL}.lock*"):
        lock.unlink(missing_ok=True)
    if journal.exists() and (torn := len((text := journal.read_bytes()).rpartition(b"\n")[2])):
        # After a full disk or a power failure; optuna 5.0.0 would append to the incomplete line.
        say(f"{journal}: the last line is incomplete; {torn} bytes are removed")
        replace_file(journal, text[:-torn].decode())
    study_options = {"storage": JournalStorage(JournalFileBackend(str(journal))), "pruner": make_pruner(sweep)}
    try:
        # `create_study` with `load_if_exists` would write to the journal.
        study: Study = optuna.load_study(study_name=_STUDY, **study_options)
    except KeyError:
        study = optuna.create_study(study_name=_STUDY, direction=sweep.direction, **study_options)
    dumped = sweep.model_dump(mode="json")
    # If these differ, the values of earlier trials have another meaning.
    settings = {f"`{name}`": dumped[name] for name in ("space", "metric", "direction", "value", "ranks")}
    settings = {"the run file": read_yaml(Path(sweep.run))[0], **settings}
    parts = {name: json.dumps(part, sort_keys=True) for name, part in settings.items()}
    earlier = study.user_attrs.get(_MADE_FROM, parts)
    if changed := [name for name in parts if earlier.get(name) != parts[name]]:
        raise ConfigError(
            f"`{sweep.output_dir}` holds a sweep whose {' and '.join(changed)} was different: {changed[0]} was "
            f"{earlier.get(changed[0])} and is {parts[changed[0]]}",
            hint="name another output_dir, or undo the change",
        )
    if _MADE_FROM not in study.user_attrs:
        study.set_user_attr(_MADE_FROM, parts)
    return study


def _trial_jobs(sweep: SweepConfig, study: "Study", say: Say) -> Iterator[Job]:
    """Jobs of trials that an earlier process left unfinished, then of new trials; RunError once several in a row have
    failed.
    """
    from optuna.trial import Trial, TrialState

    for frozen in study.get_trials(states=(TrialState.RUNNING,)):
        study.sampler = make_sampler(sweep, frozen.number)
        yield partial(_run_trial, sweep, study, Trial(study, frozen._trial_id), say)
    while len(trials := study.get_trials(deepcopy=False)) < sweep.trials:
        # While the last points of a grid are still running, optuna 5.0.0 would sample one of them again
        # (samplers/_grid.py).
        if len({json.dumps(each.params, sort_keys=True) for each in trials}) >= sweep.num_points():
            return
        _check_failures(sweep, study)
        study.sampler = make_sampler(sweep, len(trials))
        yield partial(_run_trial, sweep, study, study.ask(), say)


def _check_failures(sweep: SweepConfig, study: "Study") -> None:
    finished = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]
    last = finished[-sweep.max_failed :]
    if len(last) == sweep.max_failed and all(trial.state.name == "FAIL" for trial in last):
        raise RunError(
            f"the last {len(last)} trials have failed; trial {last[-1].number}: {last[-1].user_attrs[_REASON]}",
            hint=f"fix the cause and name another output_dir, or raise max_failed ({sweep.max_failed})",
        )


async def _run_trial(sweep: SweepConfig, study: "Study", trial: "Trial", say: Say, slot: RunSlot) -> None:
    """Train a trial without exports: report each value to the pruner, and the result to the study."""
    # As `Study.ask(space)` does, but an earlier process that was killed may have sampled some of the values already,
    # which `_suggest` returns (optuna 5.0.0, trial/_trial.py).
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
    is_pruned = is_pruned and run.code in _STOPPED_CODES
    state, value, reason = ("PRUNED", None, f"after step {reported}") if is_pruned else _outcome(sweep, run)
    trial.set_user_attr(_REASON, reason)
    trial.set_user_attr(_SECONDS, trial.user_attrs.get(_SECONDS, 0.0) + run.seconds)
    try:
        study.tell(trial, value, import_optuna().trial.TrialState[state])
    except RuntimeError as error:
        # After its last point GridSampler calls `Study.stop`, which only `optimize` allows; by then the trial is stored
        # (optuna 5.0.0, samplers/_grid.py, `after_trial`).
        if "Study.stop" not in str(error):
            raise
    shutil.rmtree(folder / RUN / CHECKPOINTS, ignore_errors=True)
    sampled = ", ".join(f"{key} {value_text(each)}" for key, each in values.items())
    text = f"{sweep.metric} {value}" if state == "COMPLETE" else f"{state.lower()}: {reason}"
    say(f"trial {trial.number}: {sampled}: {text} ({run.seconds:.0f} s)")
    write_result(sweep, study)
    if not run.code and sweep.metric not in run.metrics.curves:
        raise RunError(
            f"the sweep's metric is `{sweep.metric}`, and trial {trial.number} ended without a record of it",
            hint=f"name another output_dir, and one of its metrics: {', '.join(sorted(run.metrics.curves))}",
        )


def _outcome(sweep: SweepConfig, run: ExperimentRun) -> tuple[str, float | None, str]:
    """State in optuna, value, and reason of a missing value, for a trial that no pruner has ended."""
    value = value_of(sweep, run.metrics)
    if has_diverged(run.metrics, run.code, value):
        # Pruned, not failed: a sampler learns from a pruned trial that these values are bad.
        return "PRUNED", None, f"diverged, {sweep.metric} {value}"
    if run.code or value is None:
        return "FAIL", None, run.reason or f"{sweep.metric} is missing"
    return "COMPLETE", value, ""


def value_of(sweep: SweepConfig, metrics: MetricsReader) -> float | None:
    """Value of the metric for a trial: the last one or the best finite one, as the sweep says; None without any."""
    curve = metrics.curves.get(sweep.metric)
    if curve is None:
        return None
    finite = curve.values[np.isfinite(curve.values)]
    if sweep.value == "last" or not len(finite):
        return curve.last
    return float(finite.max() if sweep.direction == "maximize" else finite.min())


def has_diverged(metrics: MetricsReader, code: int, value: float | None) -> bool:
    """Whether a trial's value is not finite, or its run failed while steps with non-finite gradients were skipped.

    A run that skipped its last step and succeeded, as with fp16, has not diverged.
    """
    skipped = metrics.curves.get("train/skipped")
    is_skipping = skipped is not None and skipped.last > 0
    return (value is not None and not math.isfinite(value)) or (code != 0 and is_skipping)


def write_result(sweep: SweepConfig, study: "Study") -> dict[str, Any]:
    """Write `sweep.json` with all trials and the number of the best one; returns its content."""
    trials = study.get_trials(deepcopy=False)
    is_any = any(trial.state.name == "COMPLETE" for trial in trials)
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
        "best": study.best_trial.number if is_any else None,
    }
    replace_file(Path(sweep.output_dir) / RESULT, json.dumps(tree, indent=1) + "\n")
    return tree


def write_sweep_page(folder: Path, tree: dict[str, Any]) -> Path:
    """Write the page of a sweep, whose `sweep.json` holds `tree`; returns its path."""
    trials, metric, keys = tree["trials"], tree["metric"], list(tree["space"])
    best = trials[tree["best"]]
    rows = [
        (
            str(trial["number"]),
            f"{trial['state']}: {trial['reason']}" if trial["reason"] else trial["state"],
            *(value_text(trial["values"].get(key)) for key in keys),
            number_text(trial["value"]),
            time_text(trial["seconds"]) if trial["seconds"] else NONE,
        )
        for trial in trials
    ]
    table = DataTable("All trials", ("trial", "state", *keys, metric, "time"), rows, 2)
    states = [trial["state"] for trial in trials]
    tiles = [
        Tile("trials", f"{len(states)}", f"{states.count('pruned')} pruned, {states.count('fail')} failed"),
        Tile(f"best {metric}", number_text(best["value"]), f"trial {best['number']}"),
        *(Tile(key, value_text(value)) for key, value in best["values"].items()),
        Tile("time of trials", time_text(sum(trial["seconds"] or 0 for trial in trials))),
    ]
    valued = [trial for trial in trials if trial["value"] is not None and math.isfinite(trial["value"])]
    charts = [_key_chart(tree, key, valued) for key in keys]
    sections = [
        ReportSection("search", "Search", [Charts(charts)], "A dot is a trial that has a value at its end."),
        ReportSection("trials", "Trials", [table, Facts([("best run file", f"{folder / BEST}")])]),
    ]
    return write_page(Page(f"Sweep of {tree['run']}", metric, "", tiles, sections), folder / REPORT)


def _key_chart(tree: dict[str, Any], key: str, trials: list[dict[str, Any]]) -> Chart:
    """The metric of trials over their values of one key of the search space."""
    space, y = tree["space"][key], [trial["value"] for trial in trials]
    texts = tuple(dict.fromkeys(map(value_text, space.get("choices") or ())))
    values = [trial["values"][key] for trial in trials]
    x = [texts.index(value_text(value)) for value in values] if texts else values
    best = tree["trials"][tree["best"]]
    summary = f"{len(trials)} trials; trial {best['number']} is best, with {value_text(best['values'][key])}"
    line = Line(tree["metric"], x, y, role="dots")
    return Chart(key, [line], summary, x_name=key, has_log_x=bool(space.get("log")), x_texts=texts)


def value_text(value: object) -> str:
    """A value of the run file as text."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
