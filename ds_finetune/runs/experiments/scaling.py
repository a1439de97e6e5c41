"""`ds-finetune scaling`: the same global batches on several numbers of ranks and in several layouts."""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_finetune.config.run_file import set_key
from ds_finetune.config.schema import validate_tree
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import ConfigError, FinetuneError, OutputError, RunError
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.runs.experiments.jobs import RUN, ExperimentJob, Place, places, run_jobs, short_run
from ds_finetune.runs.metrics import MetricsReader
from ds_finetune.runs.status import read_object
from ds_finetune.system.world import World

RESULT = "scaling.json"
LEAST_STEPS = 6
COLUMNS = ("ranks", "s/step", "tokens/s", "speed-up", "efficiency", "comm.", "waits", "GiB", "loss off by")
"""Head of the table."""
_WARMUP_STEPS, _PROFILED_STEPS = 2, 2
_LEAST_LOSS = 1e-12
_AXIS = re.compile(r"(zero|tp|pp|sp|ep)(\d+)")


@dataclass(frozen=True)
class ScalingRequest:
    """Which run file is compared, on which ranks and in which layouts, and where files go."""

    run_file: Path
    overrides: tuple[str, ...]
    ranks: tuple[int, ...]
    layouts: tuple[str, ...]
    """Such as `zero1`, `tp2` or `tp2+zero3`; empty for the run file's own."""
    steps: int
    hostfile: str | None
    folder: Path


@dataclass(frozen=True)
class Variant:
    """One run of a comparison."""

    ranks: int
    layout: str
    """Empty for that of the run file."""

    @property
    def name(self) -> str:
        """A name for tables and for the folder."""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{ranks}, {self.layout}" if self.layout else ranks

    @property
    def folder(self) -> str:
        """Name of the folder."""
        return f"{self.ranks}-ranks" + (f"-{self.layout}" if self.layout else "")


@dataclass(frozen=True)
class Measurement:
    """What a variant took, and its losses."""

    variant: Variant
    seconds: float
    """Median seconds of a timed step."""
    tokens_per_second: float
    """Tokens of all ranks together, over the timed steps."""
    speedup: float
    """Relative to the first variant."""
    efficiency: float
    """Speed-up over the number of ranks relative to the first variant."""
    communication: float | None
    """Share of profiled steps in which a rank communicated and computed nothing; None where it was not measured."""
    waiting: float | None
    """Share of profiled steps in which a rank waited for a slower one."""
    memory_gib: float
    """Peak of rank 0: allocated on its GPU, on a CPU resident memory."""
    losses: tuple[float, ...]
    """The loss of each step."""
    loss_difference: float
    """Largest difference from the first variant's loss of the same step, relative."""


@dataclass(frozen=True)
class Comparison:
    """The variants that ran, and why others failed, by name."""

    rows: tuple[Measurement, ...]
    failed: tuple[tuple[str, str], ...]


def compare_scaling(request: ScalingRequest, say: Say) -> Comparison:
    """Run each variant for some steps, one after another, and compare speed, communication, memory and losses.

    The first steps warm up, and the last ones are profiled; neither are timed. `scaling.json` is written after each
    variant; one that fails leaves a reason. ConfigError and OutputError before anything is started, for each variant
    that is not legal; RunError where all fail.
    """
    variants = [Variant(ranks, layout) for layout in request.layouts or ("",) for ranks in request.ranks]
    jobs = {variant: ExperimentJob(request.folder / variant.folder, _tree(request, variant)) for variant in variants}
    if request.folder.exists():
        raise OutputError(f"`{request.folder}` exists already", hint="name another folder")
    for variant, job in jobs.items():
        config = validate_tree(job.tree, {}, f"{request.run_file} with {variant.name}")
        try:
            make_plan(RunSettings.of(config), world=World(0, variant.ranks, 0, variant.ranks, "scaling"), device="cpu")
        except FinetuneError as illegal:
            raise type(illegal)(f"{variant.name}: {illegal.message}", hint=illegal.hint) from None
        if request.hostfile is not None:
            _place(request, variant.ranks)
    # LaunchError where this machine has too few GPUs for the largest of them.
    _place(request, max(request.ranks))
    done: dict[Variant, ExperimentJob] = {}
    for variant, job in jobs.items():
        run_jobs(iter([job]), [_place(request, variant.ranks)])
        done[variant] = job
        compared = _compare(request, done)
        say(f"{variant.name}: {job.reason or f'{compared.rows[-1].seconds:.3f} s a step'}")
        tree = {"format": 1, "run": str(request.run_file), "steps": request.steps}
        tree |= {"rows": [asdict(row) for row in compared.rows], "failed": dict(compared.failed)}
        (request.folder / RESULT).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    if not compared.rows:
        raise RunError(f"all runs failed; {': '.join(compared.failed[-1])}", hint=f"see {request.folder}")
    return compared


def _place(request: ScalingRequest, ranks: int) -> Place:
    return places(ranks=ranks, parallel=1, hostfile=request.hostfile, folder=request.folder)[0]


def _tree(request: ScalingRequest, variant: Variant) -> dict[str, Any]:
    if request.steps < LEAST_STEPS:
        raise ConfigError(
            f"--steps is {request.steps}: {_WARMUP_STEPS} steps warm up and {_PROFILED_STEPS} are profiled",
            hint=f"take {LEAST_STEPS} or more",
        )
    output_dir = request.folder / variant.folder / RUN
    tree = short_run(request.run_file, request.overrides, steps=request.steps, output_dir=output_dir)
    tree["profile"] = {"steps": f"{request.steps - _PROFILED_STEPS + 1}-{request.steps}"}
    for part in filter(None, variant.layout.split("+")):
        _apply_layout(tree, part)
    return tree


def _apply_layout(tree: dict[str, Any], part: str) -> None:
    found = _AXIS.fullmatch(part)
    if found is None:
        raise ConfigError(
            f"--layouts: `{part}` is no layout", hint="write e.g. `zero1,zero3,tp2,tp2+zero3`: zero, tp, pp, sp, ep"
        )
    axis, number = found[1], int(found[2])
    if axis != "zero":
        set_key(tree, {}, f"parallel.{axis}", number, source="--layouts")
        return
    choices, _ = given_choices(tree.get("deepspeed"))
    tree["deepspeed"] = {**choices, "zero_optimization": {**choices.get("zero_optimization", {}), "stage": number}}


def _timed(metrics: MetricsReader, name: str, steps: int) -> list[float]:
    """The values of a metric in the steps that neither warm up nor are profiled."""
    return metrics.curves[name].values.tolist()[_WARMUP_STEPS : steps - _PROFILED_STEPS]


def _compare(request: ScalingRequest, jobs: Mapping[Variant, ExperimentJob]) -> Comparison:
    """Rows of the runs that did not fail, relative to the first of them."""
    ran = {variant: job.metrics for variant, job in jobs.items() if not job.reason}
    rows = tuple(_measure(request, variant, ran) for variant in ran)
    return Comparison(rows, tuple((variant.name, job.reason) for variant, job in jobs.items() if job.reason))


def _measure(request: ScalingRequest, variant: Variant, ran: Mapping[Variant, MetricsReader]) -> Measurement:
    first, metrics = next(iter(ran)), ran[variant]
    seconds, first_seconds = (_timed(each, "perf/step_seconds", request.steps) for each in (metrics, ran[first]))
    rates = _timed(metrics, "perf/tokens_per_second", request.steps)
    losses, first_losses = (each.curves["train/loss"].values.tolist() for each in (metrics, ran[first]))
    speedup = sum(first_seconds) / sum(seconds)
    communication, waiting = _profiled_shares(request.folder / variant.folder / RUN)
    return Measurement(
        variant=variant,
        seconds=statistics.median(seconds),
        tokens_per_second=sum(s * r for s, r in zip(seconds, rates, strict=True)) / sum(seconds),
        speedup=speedup,
        efficiency=speedup / (variant.ranks / first.ranks),
        communication=communication,
        waiting=waiting,
        memory_gib=float(metrics.curves["memory/peak_gib"].values.max()),
        losses=tuple(losses),
        loss_difference=largest_difference(losses, first_losses),
    )


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of a step's loss; infinite where one of the two is no number."""
    differences = [abs(a - b) / max(abs(b), _LEAST_LOSS) for a, b in zip(losses, expected, strict=True)]
    return max((each if math.isfinite(each) else math.inf for each in differences), default=0.0)


def _profiled_shares(run: Path) -> tuple[float | None, float | None]:
    """Shares of communication and of waiting in the profiled steps, means over ranks."""
    ranks = read_object(run / "profile" / "summary.json").get("ranks", [])
    if not ranks:
        return None, None
    means = [rank["mean"] for rank in ranks]
    communication, waiting = (
        statistics.fmean(mean["categories"][name] / mean["seconds"] for mean in means)
        for name in ("communication", "waiting")
    )
    return communication, waiting


def table_row(row: Measurement) -> tuple[str, ...]:
    """Texts in the order of COLUMNS."""
    shares = ["-" if share is None else f"{share:.1%}" for share in (row.communication, row.waiting)]
    return (
        row.variant.name,
        f"{row.seconds:.3f}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.speedup:.2f}",
        f"{row.efficiency:.0%}",
        *shares,
        f"{row.memory_gib:.2f}",
        f"{row.loss_difference:.1e}",
    )
