"""What a search of layouts prints: the best ones, and those that would be faster and do not fit."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from ds_finetune.config.units import GIB
from ds_finetune.plan.search.forecast import seconds_text
from ds_finetune.plan.search.search import SearchResult
from ds_finetune.plan.search.search_run import layout_text, reason_text

_NO_PADDING = (0, 2, 0, 0)
_LEAST_TEXT = 11
"""Characters of a column of texts at least, such as `micro-batch`."""


def search_tables(result: SearchResult) -> RenderableType:
    """The best layouts with memory and time, and why the next ones lose or do not fit."""
    return Group(*_tables(result))


def _tables(result: SearchResult) -> Iterator[RenderableType]:
    best = result.proposals[0]
    table = Table(title=f"best of {result.num_groups} layouts", title_justify="left", box=None, padding=_NO_PADDING)
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
    table = Table(title="faster, but too large", title_justify="left", box=None, padding=_NO_PADDING)
    for head in ("layout, where it needs least", "s a step", "why not"):
        table.add_column(head, overflow="fold")
    for misfit in result.misfits:
        text = result.budget.problem(misfit.memory)
        table.add_row(layout_text(misfit.candidate), seconds_text(misfit.seconds), text)
    return table
