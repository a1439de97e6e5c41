"""The tables that `plan` prints: what a rank needs, and what a search of layouts found."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from ds_finetune.config.units import GIB
from ds_finetune.plan.estimate.memory import MemoryEstimate
from ds_finetune.plan.estimate.rows import MOMENTS, peak
from ds_finetune.plan.search.forecast import seconds_text
from ds_finetune.plan.search.search import SearchResult
from ds_finetune.plan.search.search_run import layout_text, reason_text

_PADDING = (0, 2, 0, 0)
_MOST_HELD = 16
"""Characters of a line of the times at which something is held."""
_LEAST_TEXT = 11
"""Characters of a column of texts at least, such as `micro-batch`."""


def memory_table(memory: MemoryEstimate) -> Table:
    """What, where, how much, when it is held if not always, and what lowers it; then the most of each place."""
    table = Table(title="memory of a rank", title_justify="left", box=None, padding=_PADDING)
    for head in ("what", "where", "GiB", "held", "lowered by"):
        # A name that does not fit goes on in the next line: a user has to write it.
        table.add_column(
            head,
            justify="right" if head == "GiB" else "left",
            overflow="fold",
            no_wrap=head in ("where", "GiB"),
            max_width=_MOST_HELD if head == "held" else None,
        )
    for row in memory.rows:
        held = "" if row.when == MOMENTS else ", ".join(row.when)
        table.add_row(row.name, row.place, f"{row.num_bytes / GIB:,.2f}", held, row.option)
    totals = {
        memory.device: memory.device_bytes,
        "nvme": peak(memory.rows, "nvme"),
        "host": memory.host_bytes,
        "disk": memory.disk_bytes,
    }
    for place, num_bytes in totals.items():
        if num_bytes:
            what = "files of the run" if place == "disk" else "at most"
            table.add_row(what, place, f"{num_bytes / GIB:,.2f}", "", "", style="bold")
    return table


def search_tables(result: SearchResult) -> RenderableType:
    """The best layouts with memory and time, and why the next ones lose or do not fit."""
    return Group(*_tables(result))


def _tables(result: SearchResult) -> Iterator[RenderableType]:
    best = result.proposals[0]
    table = Table(title=f"best of {result.num_groups} layouts", title_justify="left", box=None, padding=_PADDING)
    for head in ("", "layout", "s a step", "tokens/s", "MFU", "GiB", "host GiB", "why"):
        is_text = head in ("layout", "why")
        table.add_column(head, justify="left" if is_text else "right", overflow="fold", min_width=_LEAST_TEXT * is_text)
    for number, found in enumerate(result.proposals, start=1):
        time, memory = found.time, found.memory
        sizes = f"{memory.device_bytes / GIB:,.1f}", f"{memory.host_bytes / GIB:,.1f}"
        rates = seconds_text(time.seconds), f"{time.tokens_per_second:,.0f}", f"{time.mfu:.1%}"
        table.add_row(str(number), layout_text(found.candidate), *rates, *sizes, reason_text(best, found))
    yield table
    if result.misfits:
        yield _misfits(result)


def _misfits(result: SearchResult) -> Table:
    table = Table(title="faster, but too large", title_justify="left", box=None, padding=_PADDING)
    for head in ("layout, where it needs least", "s a step", "why not"):
        table.add_column(head, overflow="fold")
    for misfit in result.misfits:
        text = result.budget.problem(misfit.memory)
        table.add_row(layout_text(misfit.candidate), seconds_text(misfit.seconds), text)
    return table
