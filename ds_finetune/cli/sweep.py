"""`ds-finetune sweep`, `lr-range` and `scaling`: one run file with many values, learning rates, or numbers of ranks."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from ds_finetune.cli.arguments import Arguments, Commands, add_command, add_run_command, positive
from ds_finetune.console.tables import OUT, show_line, show_pairs
from ds_finetune.errors import INTERRUPTED_EXIT_CODE


def add_commands(commands: Commands) -> None:
    """Add `scaling`, `sweep` and `lr-range`."""
    text = "compare speed and losses on several numbers of ranks, and in several layouts"
    scaling = add_run_command(commands, "scaling", text, _scaling)
    text = "numbers of ranks; others are compared with the first"
    scaling.add_argument("--ranks", type=_numbers, required=True, metavar="N,N,...", help=text)
    scaling.add_argument("--steps", type=positive, default=20, help="optimizer steps of each run (default 20)")
    text = "such as zero1,zero3,tp2+zero1 (default: the run file's)"
    scaling.add_argument("--layouts", type=_words, default=(), metavar="L,L,...", help=text)
    scaling.add_argument("--hostfile", metavar="FILE", help="start ranks on these hosts instead of this machine")
    scaling.add_argument("-o", "--out", default="scaling", metavar="FOLDER", help="new folder (default scaling)")
    sweep = add_command(commands, "sweep", "search for better values of run-file keys", _sweep)
    sweep.add_argument("sweep", metavar="SWEEP.yaml", help="the sweep file")
    test = add_run_command(commands, "lr-range", "show the loss over a rising learning rate", _lr_range)
    test.add_argument("-o", "--out", default="lr_range", metavar="FOLDER", help="new folder (default lr_range)")
    test.add_argument("--low", type=float, default=1e-8, help="first learning rate (default 1e-8)")
    test.add_argument("--high", type=float, default=0.1, help="last learning rate (default 0.1)")
    test.add_argument("--steps", type=positive, default=100, help="optimizer steps (default 100)")
    test.add_argument("--ranks", type=positive, default=1, help="ranks on this machine (default 1)")


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(positive(word) for word in text.split(","))
    if len(set(numbers)) < len(numbers):
        raise argparse.ArgumentTypeError(f"`{text}` names a number twice")
    return numbers


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in text.split(",") if word))


@contextmanager
def _ended_by_signal(note: str = "") -> Iterator[None]:
    """End with the exit code of an interrupted run where a signal ends the runs inside, and print the `note`."""
    from ds_finetune.runs.experiments.jobs import JobsInterruptedError

    try:
        yield
    except JobsInterruptedError:
        if note:
            show_line(note)
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None


def _scaling(arguments: Arguments) -> None:
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
    with _ended_by_signal():
        compared = compare_scaling(request, show_line)
    table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0))
    for row in compared.rows:
        table.add_row(*table_row(row))
    OUT.print(table)
    for name, reason in compared.failed:
        show_line(f"FAILED: {name}: {reason}")
    show_line(f"report: {write_scaling_page(request.folder, arguments.run, compared)}")


def _sweep(arguments: Arguments) -> None:
    from ds_finetune.runs.experiments.sweep import run_sweep
    from ds_finetune.runs.experiments.sweep_file import read_sweep

    sweep = read_sweep(Path(arguments.sweep))
    with _ended_by_signal(f"interrupted; the same command continues the sweep in {sweep.output_dir}"):
        result = run_sweep(sweep, show_line)
    show_pairs("sweep", result.lines())


def _lr_range(arguments: Arguments) -> None:
    from ds_finetune.runs.experiments.lr_range import RangeRequest, run_range_test
    from ds_finetune.runs.experiments.pages import write_range_page

    request = RangeRequest(
        run_file=Path(arguments.run),
        overrides=tuple(arguments.overrides),
        low=arguments.low,
        high=arguments.high,
        steps=arguments.steps,
        ranks=arguments.ranks,
        folder=Path(arguments.out),
    )
    with _ended_by_signal():
        found = run_range_test(request, show_line)
    page = write_range_page(request.folder, arguments.run, found)
    show_pairs("learning rates", [*found.lines(), ("report", str(page))])
