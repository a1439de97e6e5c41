"""`ds-finetune sweep` and `lr-range`: a search for better values of run-file keys, and a test of learning rates."""

from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive
from ds_finetune.console.tables import show_line, show_pairs
from ds_finetune.errors import INTERRUPTED_EXIT_CODE


def add_commands(commands: Commands) -> None:
    """Add `sweep` and `lr-range`."""
    sweep = commands.add_parser("sweep", help="search for better values of run-file keys", allow_abbrev=False)
    sweep.add_argument("sweep", metavar="SWEEP.yaml", help="the sweep file")
    sweep.set_defaults(command=_sweep)
    test = add_run_command(commands, "lr-range", "show the loss over a rising learning rate", _lr_range)
    test.add_argument("-o", "--out", default="lr_range", metavar="FOLDER", help="new folder (default lr_range)")
    test.add_argument("--low", type=float, default=1e-8, help="first learning rate (default 1e-8)")
    test.add_argument("--high", type=float, default=0.1, help="last learning rate (default 0.1)")
    test.add_argument("--steps", type=positive, default=100, help="optimizer steps (default 100)")
    test.add_argument("--ranks", type=positive, default=1, help="ranks on this machine (default 1)")


def _sweep(arguments: Arguments) -> None:
    from ds_finetune.runs.experiments.jobs import JobsInterruptedError
    from ds_finetune.runs.experiments.sweep import run_sweep
    from ds_finetune.runs.experiments.sweep_file import read_sweep

    sweep = read_sweep(Path(arguments.sweep))
    try:
        result = run_sweep(sweep, show_line)
    except JobsInterruptedError:
        show_line(f"interrupted; the same command continues the sweep in {sweep.output_dir}")
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
    show_pairs("sweep", result.lines())


def _lr_range(arguments: Arguments) -> None:
    from ds_finetune.runs.experiments.jobs import JobsInterruptedError
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
    try:
        found = run_range_test(request, show_line)
    except JobsInterruptedError:
        raise SystemExit(INTERRUPTED_EXIT_CODE) from None
    page = write_range_page(request.folder, arguments.run, found)
    show_pairs("learning rates", [*found.lines(), ("report", str(page))])
