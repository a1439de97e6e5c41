"""`ds-finetune sweep RUN.yaml --lr-range`: the loss as a function of a learning rate that rises from step to step.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks (arXiv 1506.01186), section 3.3. The result changes no
setting: with AdamW and warm-up the test often suggests too high a rate, and it depends on seed and batch.
"""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.schema import validate_tree
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import USER_ERROR_EXIT_CODE, ConfigError, RunError
from ds_finetune.runs.experiments.jobs import LOG, REPORT, RUN, ExperimentRun, ShortRuns, run_jobs, run_slots
from ds_finetune.runs.report.blocks import Charts, Facts, Page, ReportSection, Tile
from ds_finetune.runs.report.charts import Chart, Line
from ds_finetune.runs.report.write import write_page

RESULT = "lr_range.json"
_SMOOTHING = 0.9
_DIVERGED = 4.0
"""Multiple of its minimum at which a smoothed loss has diverged, which ends the test (as in fastai)."""
_LEAST_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class RangeRequest(ShortRuns):
    """A range test on `ranks` ranks, whose learning rate rises from `low` to `high`."""

    low: float
    high: float
    ranks: int


def run_range_test(request: RangeRequest, say: Say) -> dict[str, Any]:
    """Train while the learning rate rises exponentially, in a process that saves nothing; returns the content of
    `lr_range.json`.

    ConfigError and OutputError before anything is written; RunError where the run fails, or ConfigError where the run
    refuses its settings.
    """
    low, high, folder = request.low, request.high, request.folder
    if not 0 < low < high:
        hint = "choose LOW above 0 and HIGH above LOW"
        raise ConfigError(f"the learning rate would rise from {low:g} to {high:g}", hint=hint)
    request.check(_LEAST_STEPS)
    tree = request.run_tree(folder / RUN)
    rising_lr = {"lr": high, "lr_scheduler": "exponential_rise", "min_lr_ratio": low / high}
    tree["optim"] = {**{key: value for key, value in tree.get("optim", {}).items() if key != "warmup"}, **rising_lr}
    validate_tree(tree, {}, str(request.run_file))
    hardware = run_slots(ranks=request.ranks, parallel=1, hostfile=None)
    say(f"{request.steps} steps from {low:g} to {high:g}, in {folder}")
    run = ExperimentRun(folder, tree)
    run_jobs(iter([partial(run.train, should_stop=lambda: _has_grown(run))]), hardware)
    is_diverged = _has_grown(run)
    if run.reason and not is_diverged:
        error = ConfigError if run.code == USER_ERROR_EXIT_CODE else RunError
        raise error(f"the run failed: {run.reason}", hint=f"see {folder / LOG}")
    loss, rate = run.metrics.curves["train/loss"].values, run.metrics.curves["optim/lr"].values
    is_number = np.isfinite(loss)
    if is_number.sum() < _LEAST_STEPS:
        raise RunError(f"only {is_number.sum()} steps had a finite loss", hint="lower HIGH, or raise --steps")
    result = evaluate(rate[: len(loss)][is_number], loss[is_number], is_diverged=is_diverged)
    tree = {"format": 1, "run": str(request.run_file), **result}
    (folder / RESULT).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    return tree


def _has_grown(run: ExperimentRun) -> bool:
    """Whether the smoothed loss is not finite, or has grown far above its minimum."""
    curve = run.metrics.curves.get("train/loss")
    if curve is None or len(curve) < _LEAST_STEPS:
        return False
    averages = _average(curve.values)
    return not np.isfinite(averages).all() or bool(averages[-1] > _DIVERGED * averages.min())


def _average(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exponential moving average of the losses [n], corrected for its bias to zero at the start."""
    weights = _SMOOTHING ** np.arange(len(losses))
    return np.convolve(losses, weights)[: len(losses)] / np.cumsum(weights)


def evaluate(rates: NDArray[np.float64], losses: NDArray[np.float64], *, is_diverged: bool) -> dict[str, Any]:
    """Result for losses [n] at rising rates [n]: the rates at which the smoothed loss falls most steeply over
    log(rate), is least, and diverged.
    """
    smoothed = _average(losses)
    slopes = np.gradient(smoothed, np.log(rates))
    lowest = int(np.argmin(smoothed))
    # Slopes are noisy in the first steps, whose averages are over few steps, and positive beyond the least loss.
    first = min(_LEAST_STEPS, lowest)
    steepest = first + int(np.argmin(slopes[first : lowest + 1]))
    return {
        "rates": rates.tolist(),
        "losses": losses.tolist(),
        "smoothed": smoothed.tolist(),
        "steepest": float(rates[steepest]),
        "lowest": float(rates[lowest]),
        "diverged": float(rates[-1]) if is_diverged else None,
    }


def range_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and texts of the result for a table."""
    least = f"smoothed loss {min(result['smoothed']):.4f}, at the beginning {result['smoothed'][0]:.4f}"
    rows = [("steepest fall", f"{result['steepest']:.2e}"), ("least loss", f"{result['lowest']:.2e} ({least})")]
    if result["diverged"] is not None:
        rows.append(("diverged", f"{result['diverged']:.2e} (smoothed loss {_DIVERGED:g} times the least)"))
    return rows


def write_range_page(folder: Path, result: dict[str, Any]) -> Path:
    """Write the page of a range test, whose `lr_range.json` holds `result`; returns its path."""
    ends = (min(result["losses"]), max(result["losses"]))
    lines = [
        Line("train/loss", result["rates"], result["losses"], role="faint"),
        Line("smoothed", result["rates"], result["smoothed"]),
        Line("steepest fall", (result["steepest"],) * 2, ends, role="dashed", colour=2),
        Line("least loss", (result["lowest"],) * 2, ends, role="dashed", colour=4),
    ]
    summary = f"steepest fall at {result['steepest']:.2e}, least loss at {result['lowest']:.2e}"
    note = "A range test sets nothing. With AdamW and warm-up it often points at too high a rate."
    title, x_name = "Loss over the learning rate", "learning rate"
    chart = Chart(title, lines, summary, x_name=x_name, has_log_x=True, is_wide=True, height=380, note=note)
    section = ReportSection("curve", "Range test", [Charts([chart]), Facts(range_lines(result))])
    tiles = [Tile("steepest fall", f"{result['steepest']:.2e}"), Tile("least loss", f"{result['lowest']:.2e}")]
    return write_page(Page(f"Learning rates of {result['run']}", "train/loss", "", tiles, [section]), folder / REPORT)
