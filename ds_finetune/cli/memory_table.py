"""The table of what a rank needs, as `plan` prints it."""

from rich.table import Table

from ds_finetune.config.units import GIB
from ds_finetune.plan.estimate.memory import MemoryEstimate
from ds_finetune.plan.estimate.rows import MOMENTS, peak

_MOST_HELD = 16
"""Characters of a line of the times at which something is held."""


def memory_table(memory: MemoryEstimate) -> Table:
    """What, where, how much, when it is held if not always, and what lowers it; then the most of each place."""
    table = Table(title="memory of a rank", title_justify="left", box=None, padding=(0, 2, 0, 0))
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
