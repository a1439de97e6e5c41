"""`ds-finetune report`: a page of HTML about a run, or about several over each other."""

from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands
from ds_finetune.console.tables import show_line
from ds_finetune.errors import ConfigError


def add_commands(commands: Commands) -> None:
    """Add `report`."""
    parser = commands.add_parser(
        "report", help="write a page about a run, or one that compares several", allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the output_dir of a run")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="the page (default: report.html in RUN; needed for several runs)"
    )
    parser.set_defaults(command=_report)


def _report(arguments: Arguments) -> None:
    from ds_finetune.runs.report.write import write_report, write_run_report

    runs = [Path(run) for run in arguments.runs]
    if arguments.out is not None:
        show_line(f"report: {write_report(runs, Path(arguments.out))}")
        return
    if len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs have no common folder for their report", hint="name a file with -o FILE")
    show_line(f"report: {write_run_report(runs[0])}")
