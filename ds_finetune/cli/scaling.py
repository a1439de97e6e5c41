"""`ds-finetune scaling`: a run file on several numbers of ranks and in several layouts."""

import argparse
from pathlib import Path

from rich.table import Table

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive
from ds_finetune.console.tables import OUT, show_line
from ds_finetune.errors import INTERRUPTED_EXIT_CODE


def add_commands(commands: Commands) -> None:
    """Add `scaling`."""
    scaling = add_run_command(
        commands, "scaling", "compare speed and losses on several numbers of ranks, and in several layouts", _scaling
    )
    scaling.add_argument(
        "--ranks",
        type=_numbers,
        required=True,
        metavar="N,N,...",
        help="numbers of ranks; others are compared with the first",
    )
    scaling.add_argument("--steps", type=positive, default=20, help="optimizer steps of each run (default 20)")
    scaling.add_argument(
        "--layouts",
        type=_words,
        default=(),
        metavar="L,L,...",
        help="such as zero1,zero3,tp2+zero1 (default: the run file's)",
    )
    scaling.add_argument("--hostfile", metavar="FILE", help="start ranks on these hosts instead of this machine")
    scaling.add_argument("-o", "--out", default="scaling", metavar="FOLDER", help="new folder (default scaling)")


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(positive(word) for word in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"`{text}` names a number twice")
    return numbers


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in text.split(",") if word))


def _scaling(arguments: Arguments) -> None:
    from ds_finetune.runs.experiments.jobs import JobsInterruptedError
    from ds_finetune.runs.experiments.pages import write_scaling_page
    from ds_finetune.runs.experiments.scaling import COLUMNS, ScalingRequest, compare_scaling, table_row

    request = ScalingRequest(
        run_file=Path(arguments.run),
        overrides=tuple(arguments.overrides),
        ranks=arguments.ranks,
        layouts=arguments.layouts,
        steps=arguments.steps,
        hostfile=arguments.hostfile,
        folder=Path(arguments.out),
    )
    try:
        compared = compare_scaling(request, show_line)
    except JobsInterruptedError:
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
    table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0))
    for row in compared.rows:
        table.add_row(*table_row(row))
    OUT.print(table)
    for name, reason in compared.failed:
        show_line(f"FAILED: {name}: {reason}")
    show_line(f"report: {write_scaling_page(request.folder, arguments.run, compared)}")
