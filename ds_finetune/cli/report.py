"""The commands `ds-finetune report`, a page about runs, and `watch`, which shows runs while they train."""

from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands, add_allowed_hosts, add_command, port
from ds_finetune.console.tables import show_line
from ds_finetune.errors import ConfigError
from ds_finetune.system.versions import require_extra

_PORT = 7117


def add_commands(commands: Commands) -> None:
    """Add the commands `report` and `watch` to the program."""
    report = add_command(commands, "report", "write a page about a run, or a page that compares several", _report)
    report.add_argument("runs", nargs="+", metavar="RUN", help="the output_dir of a run")
    text = "file of the page (default: report.html in RUN; required for several runs)"
    report.add_argument("-o", "--out", metavar="FILE", help=text)
    watch = add_command(commands, "watch", "show a folder of runs in the browser while they train", _watch)
    text = "folder with runs, or of one run (default: the current folder)"
    watch.add_argument("folder", metavar="FOLDER", nargs="?", default=".", help=text)
    watch.add_argument("--port", type=port, default=_PORT, help=f"port to listen on, 0 for any (default {_PORT})")
    add_allowed_hosts(watch)


def _report(arguments: Arguments) -> None:
    from ds_finetune.runs.report.write import write_report, write_run_report

    runs = [Path(run) for run in arguments.runs]
    if arguments.out is not None:
        show_line(f"report: {write_report(runs, Path(arguments.out))}")
        return
    if len(runs) > 1:
        raise ConfigError(f"a report on {len(runs)} runs needs the name of a file", hint="add -o FILE")
    show_line(f"report: {write_run_report(runs[0])}")


def _watch(arguments: Arguments) -> None:
    require_extra("pages", "`ds-finetune watch`")
    from ds_finetune.runs.watch import watch

    watch(Path(arguments.folder), port=arguments.port, show=show_line, allowed_hosts=arguments.allow_host)
