"""`ds-finetune scaling`: trains the same global batches on several numbers of ranks and in several layouts."""

import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_finetune.config.run_file import set_key
from ds_finetune.config.schema import validate_tree
from ds_finetune.console.phase_line import Say
from ds_finetune.errors import ConfigError, FinetuneError, RunError
from ds_finetune.plan.deepspeed_config import given_choices
from ds_finetune.plan.plan import make_plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.runs.experiments.jobs import REPORT, RUN, ExperimentRun, ShortRuns, run_jobs, run_slots
from ds_finetune.runs.report.blocks import Charts, DataTable, Page, ReportSection, Tile
from ds_finetune.runs.report.charts import Chart, Line
from ds_finetune.runs.report.write import write_page
from ds_finetune.runs.status import read_object
from ds_finetune.system.world import World

RESULT = "scaling.json"
COLUMNS = ("ranks", "s/step", "tokens/s", "speed-up", "efficiency", "comm.", "waits", "GiB", "loss off by")
"""Column heads of the table of variants."""
_LEAST_STEPS, _WARMUP_STEPS, _PROFILED_STEPS = 6, 2, 2
_LEAST_LOSS = 1e-12
_AXIS = re.compile(r"(zero|tp|pp|sp|ep)(\d+)")


@dataclass(frozen=True, kw_only=True)
class ScalingRequest(ShortRuns):
    """A comparison of numbers of ranks, and of layouts if any are given, on the hosts of a hostfile or this machine."""

    ranks: Sequence[int]
    layouts: Sequence[str]
    """Layouts such as `zero1`, `tp2` or `tp2+zero3`; empty for the run file's own."""
    hostfile: str | None


class Variant(ExperimentRun):
    """A run of a comparison on `ranks` ranks; `layout` is empty for that of the run file."""

    def __init__(self, request: ScalingRequest, ranks: int, layout: str) -> None:
        self.request, self.ranks, self.layout = request, ranks, layout
        self.name = f"{ranks} rank{'s' * (ranks > 1)}" + (f", {layout}" if layout else "")
        folder = request.folder / (f"{ranks}-ranks" + (f"-{layout}" if layout else ""))
        tree = request.run_tree(folder / RUN)
        tree["profile"] = {"steps": f"{request.steps - _PROFILED_STEPS + 1}-{request.steps}"}
        for part in filter(None, layout.split("+")):
            _apply_layout(tree, part)
        super().__init__(folder, tree)

    def check(self) -> None:
        """ConfigError or LaunchError, which name the variant, where it cannot run."""
        config = validate_tree(self.tree, {}, f"{self.request.run_file} with {self.name}")
        try:
            make_plan(RunSettings.of(config), world=World(0, self.ranks, 0, self.ranks, "scaling"), device="cpu")
            run_slots(ranks=self.ranks, parallel=1, hostfile=self.request.hostfile)
        except FinetuneError as illegal:
            raise type(illegal)(f"{self.name}: {illegal.message}", hint=illegal.hint) from None

    def timed(self, name: str) -> list[float]:
        """Values of a metric at the steps that are neither warm-up nor profiled."""
        values = self.metrics.curves[name].values.tolist()
        return values[_WARMUP_STEPS : self.request.steps - _PROFILED_STEPS]

    def row(self, first: "Variant") -> dict[str, Any]:
        """Speed, memory and losses of this variant, also relative to the `first` one.

        `communication` and `waiting` are fractions of the time of profiled steps, means over ranks; None where no step
        was profiled.
        """
        seconds = self.timed("perf/step_seconds")
        tokens = (s * rate for s, rate in zip(seconds, self.timed("perf/tokens_per_second"), strict=True))
        losses, first_losses = (run.metrics.curves["train/loss"].values.tolist() for run in (self, first))
        speedup = sum(first.timed("perf/step_seconds")) / sum(seconds)
        means = [rank["mean"] for rank in read_object(self.folder / RUN / "profile" / "summary.json").get("ranks", [])]
        fractions = {
            kind: statistics.fmean(mean["categories"][kind] / mean["seconds"] for mean in means) if means else None
            for kind in ("communication", "waiting")
        }
        return {
            "variant": {"ranks": self.ranks, "layout": self.layout},
            "name": self.name,
            "seconds": statistics.median(seconds),
            "tokens_per_second": sum(tokens) / sum(seconds),
            "speedup": speedup,
            "efficiency": speedup / (self.ranks / first.ranks),
            **fractions,
            "memory_gib": float(self.metrics.curves["memory/peak_gib"].values.max()),
            "losses": losses,
            "loss_difference": largest_difference(losses, first_losses),
        }


def compare_scaling(request: ScalingRequest, say: Say) -> dict[str, Any]:
    """Run each variant, one after another, and compare speed, communication, memory and losses; returns the content of
    `scaling.json`, which is written after each variant.

    The first steps are warm-up and the last ones are profiled; both are not timed. A variant that fails is recorded
    with its reason. ConfigError, LaunchError and OutputError before anything starts; RunError where all variants fail.
    """
    request.check(_LEAST_STEPS)
    variants = [Variant(request, ranks, layout) for layout in request.layouts or ("",) for ranks in request.ranks]
    for variant in variants:
        variant.check()
    tree: dict[str, Any] = {"format": 1, "run": str(request.run_file), "steps": request.steps, "rows": [], "failed": {}}
    ran: list[Variant] = []
    for variant in variants:
        run_jobs(iter([variant.train]), run_slots(ranks=variant.ranks, parallel=1, hostfile=request.hostfile)[:1])
        if variant.reason:
            tree["failed"][variant.name] = variant.reason
        else:
            ran.append(variant)
            tree["rows"].append(variant.row(ran[0]))
        say(f"{variant.name}: {variant.reason or '{:.3f} s a step'.format(tree['rows'][-1]['seconds'])}")
        (request.folder / RESULT).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    if not ran:
        raise RunError(f"all runs failed; {variants[-1].name}: {variants[-1].reason}", hint=f"see {request.folder}")
    return tree


def _apply_layout(tree: dict[str, Any], part: str) -> None:
    match = _AXIS.fullmatch(part)
    if match is None:
        hint = "write e.g. `zero1,zero3,tp2,tp2+zero3`: zero, tp, pp, sp, ep"
        raise ConfigError(f"--layouts: `{part}` is no layout", hint=hint)
    axis, number = match[1], int(match[2])
    if axis == "zero":
        choices, _ = given_choices(tree.get("deepspeed"))
        tree["deepspeed"] = {**choices, "zero_optimization": {**choices.get("zero_optimization", {}), "stage": number}}
    else:
        set_key(tree, {}, f"parallel.{axis}", number, source="--layouts")


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference of two runs' losses over all steps; infinite if a loss is not finite."""
    differences = [abs(a - b) / max(abs(b), _LEAST_LOSS) for a, b in zip(losses, expected, strict=True)]
    return max((each if math.isfinite(each) else math.inf for each in differences), default=0.0)


def table_row(row: dict[str, Any]) -> tuple[str, ...]:
    """Cells of a row in the order of COLUMNS."""
    fractions = ["-" if row[kind] is None else f"{row[kind]:.1%}" for kind in ("communication", "waiting")]
    return (
        row["name"],
        f"{row['seconds']:.3f}",
        f"{row['tokens_per_second']:,.0f}",
        f"{row['speedup']:.2f}",
        f"{row['efficiency']:.0%}",
        *fractions,
        f"{row['memory_gib']:.2f}",
        f"{row['loss_difference']:.1e}",
    )


def write_scaling_page(folder: Path, tree: dict[str, Any]) -> Path:
    """Write the page of a comparison, whose `scaling.json` holds `tree`; returns its path."""
    rows = tree["rows"]
    fastest = max(rows, key=lambda row: row["speedup"])
    off = f"{max(row['loss_difference'] for row in rows):.1e}"
    charts = []
    ranks = sorted({row["variant"]["ranks"] for row in rows})
    if len(ranks) > 1:
        lines = [Line("ideal", ranks, [each / rows[0]["variant"]["ranks"] for each in ranks], role="dashed", colour=7)]
        for colour, layout in enumerate(dict.fromkeys(row["variant"]["layout"] for row in rows)):
            points = sorted(
                (row["variant"]["ranks"], row["speedup"]) for row in rows if row["variant"]["layout"] == layout
            )
            x, y = zip(*points, strict=True)
            lines.append(Line(layout or "measured", x, y, role="points", colour=colour))
        charts.append(Chart("Speed-up", lines, f"up to {fastest['speedup']:.2f}", x_name="ranks"))
    curves = [
        Line(row["name"], range(1, len(row["losses"]) + 1), row["losses"], colour=colour)
        for colour, row in enumerate(rows)
    ]
    charts.append(Chart("train/loss", curves, f"curves differ by at most {off}"))
    table = DataTable("Relative to the first row", COLUMNS, [table_row(row) for row in rows])
    section = ReportSection("table", "Comparison", [table, Charts(charts)])
    tiles = [
        Tile("fastest", fastest["name"], f"{fastest['speedup']:.2f} times {rows[0]['name']}"),
        Tile("losses differ by", off, "at most, relative"),
    ]
    warnings = [f"{name} failed: {reason}" for name, reason in tree["failed"].items()]
    page = Page(f"Scaling of {tree['run']}", "the same global batches", "", tiles, [section], warnings)
    return write_page(page, folder / REPORT)
