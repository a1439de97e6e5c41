"""The section of a report about profiled steps, from the summary that the profiler has written."""

from collections.abc import Mapping
from typing import Any

from ds_finetune.runs.report.blocks import DataTable, ReportSection
from ds_finetune.runs.report.run import ReportedRun

SUMMARY = "profile/summary.json"
_MOST_RANKS, _MOST_COLLECTIVES = 64, 12
_KIB = 1024


def profile_section(run: ReportedRun) -> ReportSection | None:
    """Where the time of profiled steps went on each rank; None for a run without them."""
    summary = run.recorded(SUMMARY)
    if not summary:
        return None
    lead = "Seconds of a step by what the rank was doing; open profile/trace.json.gz in Perfetto for the timeline."
    return ReportSection("profile", "Profiled steps", [_rank_table(summary), *_collective_table(summary)], lead)


def _rank_table(summary: Mapping[str, Any]) -> DataTable:
    categories = [str(name) for name in summary["categories"]]
    named = [(f"rank {rank['rank']}", rank["mean"]) for rank in summary["ranks"][:_MOST_RANKS]]
    rows = [
        (
            name,
            f"{mean['seconds']:.4f}",
            *(f"{mean['categories'][category]:.4f}" for category in categories),
            f"{mean['communication']['hidden_seconds']:.4f}",
        )
        for name, mean in [*named, ("mean", summary["mean"])]
    ]
    caption = f"Mean of steps {summary['steps'][0]:,} to {summary['steps'][-1]:,}, in seconds"
    return DataTable(caption, ("rank", "step", *categories, "hidden communication"), rows)


def _collective_table(summary: Mapping[str, Any]) -> list[DataTable]:
    """The collectives that took longest."""
    rows = [
        (
            f"{row['kind']}, {len(row['ranks'])} ranks, {row['phase']}",
            f"{row['calls']:.1f}",
            f"{row['bytes'] / _KIB:,.1f}",
            f"{row['seconds']:.4f}",
            f"{row['waiting_seconds']:.4f}",
        )
        for row in summary["collectives"][:_MOST_COLLECTIVES]
    ]
    columns = ("collective", "calls", "KiB", "seconds", "of them waiting")
    return [DataTable("Collectives of a step, the longest first", columns, rows)] * bool(rows)
