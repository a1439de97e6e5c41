"""`ds-finetune lr-range`: the loss over a learning rate that rises from step to step, as a report.

L. N. Smith, Cyclical Learning Rates for Training Neural Networks (arXiv 1506.01186), section 3.3. Nothing is set by it:
with AdamW and warm-up it often points at too high a rate, and it changes with the seed and the batch.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_finetune.config.schema import validate_tree
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import USER_ERROR_EXIT_CODE, ConfigError, OutputError, RunError
from ds_finetune.runs.experiments.jobs import LOG, RUN, ChildRun, ExperimentJob, places, run_jobs, short_run

RESULT = "lr_range.json"
_SMOOTHING = 0.9
_DIVERGED = 4.0
"""The test ends where the smoothed loss is this many times its least value (as fastai's)."""
_LEAST_STEPS = 10


@dataclass(frozen=True)
class LrRange:
    """Losses [n] of the steps and their smoothed values over learning rates [n], and what stands out."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float
    """The rate at which the smoothed loss falls fastest over the logarithm of the rate."""
    lowest: float
    """The rate with the least smoothed loss."""
    diverged: float | None
    """The rate at which the test was ended, where the loss had grown."""

    def lines(self) -> list[tuple[str, str]]:
        """Names and texts for a table."""
        least = min(self.smoothed)
        rows = [
            ("steepest fall", f"{self.steepest:.2e}"),
            ("least loss", f"{self.lowest:.2e} (smoothed loss {least:.4f}, at the beginning {self.smoothed[0]:.4f})"),
        ]
        if self.diverged is not None:
            rows.append(("diverged", f"{self.diverged:.2e} (smoothed loss {_DIVERGED:g} times the least)"))
        rows.append(("use", "as a hint: rates are often best well below these; compare some by `ds-finetune sweep`"))
        return rows


@dataclass(frozen=True)
class RangeRequest:
    """Which rates are tested, in how many steps, with how many ranks, and where files go."""

    run_file: Path
    overrides: tuple[str, ...]
    low: float
    high: float
    steps: int
    ranks: int
    folder: Path


def run_range_test(request: RangeRequest, say: Say) -> LrRange:
    """Train for some steps while the rate rises exponentially, in a process of its own that saves nothing.

    ConfigError and OutputError before anything is written, RunError where the run fails, and ConfigError again where it
    refuses its settings.
    """
    tree = _tree(request)
    if request.folder.exists():
        raise OutputError(f"`{request.folder}` exists already", hint="name another folder")
    place = places(ranks=request.ranks, parallel=1, hostfile=None, folder=request.folder)[0]
    say(f"{request.steps} steps from {request.low:g} to {request.high:g}, in {request.folder}")
    job = _RangeJob(request.folder, tree)
    run_jobs(iter([job]), [place])
    if job.reason and not job.is_diverged:
        error = ConfigError if job.code == USER_ERROR_EXIT_CODE else RunError
        raise error(f"the run failed: {job.reason}", hint=f"see {request.folder / LOG}")
    loss, rate = job.metrics.curves["train/loss"], job.metrics.curves["optim/lr"]
    is_number = np.isfinite(loss.values)
    losses, rates = loss.values[is_number], rate.values[: len(loss)][is_number]
    if len(losses) < _LEAST_STEPS:
        raise RunError(f"only {len(losses)} steps had a finite loss", hint="lower --high, or raise --steps")
    found = evaluate(rates, losses, is_diverged=job.is_diverged)
    text = json.dumps({"format": 1, "run": str(request.run_file), **asdict(found)}, indent=1)
    (request.folder / RESULT).write_text(f"{text}\n", encoding="utf-8")
    shutil.rmtree(request.folder / RUN / "base", ignore_errors=True)
    return found


def _tree(request: RangeRequest) -> dict[str, Any]:
    if not 0 < request.low < request.high:
        raise ConfigError(
            f"the learning rate would rise from {request.low:g} to {request.high:g}",
            hint="choose --low above 0 and --high above --low",
        )
    if request.steps < _LEAST_STEPS:
        raise ConfigError(f"--steps is {request.steps}: too few for a curve", hint=f"take {_LEAST_STEPS} or more")
    tree = short_run(request.run_file, request.overrides, steps=request.steps, output_dir=request.folder / RUN)
    own = {"lr": request.high, "lr_scheduler": "exponential_rise", "min_lr_ratio": request.low / request.high}
    tree["optim"] = {**{key: value for key, value in tree.get("optim", {}).items() if key != "warmup"}, **own}
    validate_tree(tree, {}, str(request.run_file))
    return tree


class _RangeJob(ExperimentJob):
    """The run of the test, which is ended where the loss has grown."""

    is_diverged = False

    def progressed(self, child: ChildRun) -> None:
        """End the run where the loss has grown."""
        curve = child.metrics.curves.get("train/loss")
        if curve is None or len(curve) < _LEAST_STEPS or self.is_diverged:
            return
        values = _average(curve.values)
        if not np.isfinite(values).all() or values[-1] > _DIVERGED * values.min():
            self.is_diverged = True
            child.stop()


def _average(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exponential moving average of the losses [n], without the bias to zero of its beginning; NaN stays NaN.

    It looks at no later step, so that the test knows where to end while it runs.
    """
    averages = np.full(len(losses), np.nan)
    total = norm = 0.0
    for index, value in enumerate(losses):
        if np.isfinite(value):
            total, norm = _SMOOTHING * total + (1 - _SMOOTHING) * value, _SMOOTHING * norm + 1 - _SMOOTHING
            averages[index] = total / norm
    return averages


def evaluate(rates: NDArray[np.float64], losses: NDArray[np.float64], *, is_diverged: bool) -> LrRange:
    """What stands out of losses [n] over rising rates [n]."""
    smoothed = _average(losses)
    slopes = np.gradient(smoothed, np.log(rates))
    lowest = int(np.argmin(smoothed))
    # Slopes of the first steps are those between averages of few steps; beyond the least loss, of one that has grown.
    first = min(_LEAST_STEPS, lowest)
    return LrRange(
        rates=tuple(rates.tolist()),
        losses=tuple(losses.tolist()),
        smoothed=tuple(smoothed.tolist()),
        steepest=float(rates[first + int(np.argmin(slopes[first : lowest + 1]))]),
        lowest=float(rates[lowest]),
        diverged=float(rates[-1]) if is_diverged else None,
    )
