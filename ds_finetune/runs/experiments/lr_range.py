"""The learning rate range test `ds-finetune sweep RUN.yaml --lr-range`: one run whose learning rate rises from step to
step.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks (arXiv 1506.01186), section 3.3.
"""

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.schema import validate_tree
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import USER_ERROR_EXIT_CODE, ConfigError, RunError
from ds_finetune.runs.experiments.jobs import LOG, REPORT, RUN, ExperimentRun, ShortRuns, run_all, run_slots
from ds_finetune.runs.report.charts import Chart, Line, smooth
from ds_finetune.runs.report.page import Charts, Page, PageSection, Table
from ds_finetune.runs.report.write import write_page

_LEAST_STEPS, _REACH = 10, 5
"""A range test has at least _LEAST_STEPS steps. Losses are averaged over _REACH steps before and after each step."""


def run_range_test(runs: ShortRuns, low: float, high: float, *, ranks: int, say: Say) -> list[tuple[str, str]]:
    """Train on `ranks` ranks while the learning rate rises exponentially from `low` to `high`, and write a page with
    the losses.

    Returns results as pairs of name and text. ConfigError or OutputError before anything is written if the settings or
    the folder are unusable. RunError if the run fails; a run whose loss diverges has not failed.
    """
    folder = runs.folder
    if not 0 < low < high:
        hint = "choose LOW above 0 and HIGH above LOW"
        raise ConfigError(f"--lr-range asks for learning rates that rise from {low:g} to {high:g}", hint=hint)
    runs.check(_LEAST_STEPS)
    tree = runs.run_tree(folder / RUN)
    rising_lr = {"lr": high, "lr_scheduler": "exponential_rise", "min_lr_ratio": low / high}
    tree["optim"] = {**{key: value for key, value in tree.get("optim", {}).items() if key != "warmup"}, **rising_lr}
    validate_tree(tree, {}, str(runs.run_file))
    slots = run_slots(ranks)
    say(f"{runs.steps} steps from {low:g} to {high:g}, in {folder}")
    run = ExperimentRun(folder, tree)
    run_all(iter([run]), slots)
    if run.reason and not run.has_diverged:
        error = ConfigError if run.code == USER_ERROR_EXIT_CODE else RunError
        raise error(f"the run of the range test failed: {run.reason}", hint=f"read its output in {folder / LOG}")
    losses, rates = run.metrics.curves["train/loss"].values, run.metrics.curves["optim/lr"].values
    is_number = np.isfinite(losses)
    if is_number.sum() < _LEAST_STEPS:
        raise RunError(
            f"the loss was finite in only {is_number.sum()} steps, and {_LEAST_STEPS} are needed",
            hint="lower HIGH of --lr-range, or raise --steps",
        )
    rates, losses = rates[is_number], losses[is_number]
    steepest, lowest = evaluate(rates, losses)
    rows = [("steepest fall", f"{steepest:.2e}"), ("lowest loss", f"{lowest:.2e}")]
    lines = [
        Line("train/loss", rates, losses, "faint"),
        Line("train/loss", rates, smooth(losses, _REACH), "mean"),
        Line("steepest fall", (steepest,) * 2, (losses.min(), losses.max()), "dashed", 2),
        Line("lowest loss", (lowest,) * 2, (losses.min(), losses.max()), "dashed", 4),
    ]
    chart = Chart("Loss over the learning rate", lines, x_name="learning rate", has_log_x=True, is_wide=True)
    lead = "A range test sets nothing. With AdamW and warm-up it often points at too high a rate."
    section = PageSection("curve", "Range test", [Charts([chart]), Table("", (), rows)], lead)
    page = Page(f"Learning rates of {runs.run_file}", "train/loss", "", [], [section])
    return [*rows, ("report", str(write_page(page, folder / REPORT)))]


def evaluate(rates: NDArray[np.float64], losses: NDArray[np.float64]) -> tuple[float, float]:
    """Find two learning rates: the one at which the smoothed loss falls most steeply over log(rate), and the one at
    which the smoothed loss is lowest.

    `losses` [n] belong to the rising `rates` [n].
    """
    smoothed = smooth(losses, _REACH)
    slopes = np.gradient(smoothed, np.log(rates))
    lowest = int(np.argmin(smoothed))
    # The search leaves out the first steps, whose averages over few losses are noisy, and steps after the lowest loss,
    # where the loss rises.
    first = min(_LEAST_STEPS, lowest)
    return float(rates[first + int(np.argmin(slopes[first : lowest + 1]))]), float(rates[lowest])
