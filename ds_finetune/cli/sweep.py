"""`ds-finetune sweep`: a search for better values of run-file keys."""

from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands
from ds_finetune.console import OUT, pairs, show_line
from ds_finetune.errors import INTERRUPTED_EXIT_CODE


def add_commands(commands: Commands) -> None:
    """Add `sweep`."""
    sweep = commands.add_parser("sweep", help="search for better values of run-file keys", allow_abbrev=False)
    sweep.add_argument("sweep", metavar="SWEEP.yaml", help="the sweep file")
    sweep.set_defaults(command=_sweep)


def _sweep(arguments: Arguments) -> None:
    from ds_finetune.experiments.jobs import JobsInterruptedError
    from ds_finetune.experiments.sweep import run_sweep
    from ds_finetune.experiments.sweep_file import read_sweep

    sweep = read_sweep(Path(arguments.sweep))
    try:
        result = run_sweep(sweep, show_line)
    except JobsInterruptedError:
        show_line(f"interrupted; the same command continues the sweep in {sweep.output_dir}")
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
    OUT.print(pairs("sweep", result.lines()))
