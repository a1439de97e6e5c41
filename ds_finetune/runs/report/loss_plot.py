"""`loss.png`: the loss of a run as a picture, for places where a page of HTML cannot be shown."""

from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ds_finetune.runs.curves import smooth
from ds_finetune.runs.report.charts import PALETTE
from ds_finetune.runs.report.curves import LEAST_SMOOTHED, smoothing_reach
from ds_finetune.runs.report.run import ReportedRun
from ds_finetune.system.whole_file import replace_file

WIDTH, HEIGHT, DOTS_PER_INCH = 8.0, 4.5, 150
"""In inches: the picture has 1200 x 675 pixels."""


def write_loss_plot(run: ReportedRun, path: Path) -> bool:
    """Draw `train/loss`, smoothed, with the evaluations; returns False where the run has no loss.

    The picture replaces the file at once. matplotlib's global state is not touched: the figure belongs to no window.
    """
    curve = run.curves.get("train/loss")
    if curve is None or not np.isfinite(curve.values).any():
        return False
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(run, axes)
    # A name may have a dollar sign, which begins a formula elsewhere.
    axes.set_title(run.name, parse_math=False)
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    replace_file(path, picture.getvalue())
    return True


def _draw(run: ReportedRun, axes: Axes) -> None:
    """Draw the loss of training, smoothed where it is long enough, and of evaluations."""
    curve = run.curves["train/loss"]
    steps, values = run.drawn("train/loss")
    if len(curve) >= LEAST_SMOOTHED:
        smoothed = smooth(curve.values, smoothing_reach(len(curve)))
        axes.plot(steps, values, color=PALETTE[0], linewidth=1, alpha=0.35, label="train/loss")
        axes.plot(curve.steps, smoothed, color=PALETTE[0], label="train/loss, smoothed")
    else:
        axes.plot(steps, values, color=PALETTE[0], marker="." if len(steps) == 1 else None, label="train/loss")
    if "eval/loss" in run.curves:
        evaluated = run.curves["eval/loss"]
        axes.plot(evaluated.steps, evaluated.values, color=PALETTE[1], marker="o", linewidth=1, label="eval/loss")
