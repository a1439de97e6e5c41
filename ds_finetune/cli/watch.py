"""`ds-finetune watch`: shows a folder of runs in the browser while they train."""

from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands, add_allowed_hosts, port
from ds_finetune.console.tables import show_line

_PORT = 7117


def add_commands(commands: Commands) -> None:
    """Add `watch`."""
    parser = commands.add_parser(
        "watch", help="show a folder of runs in the browser while they train", allow_abbrev=False
    )
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", default=".", help="folder with runs, or of one run (default: this one)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default 127.0.0.1: this machine alone); others need the token that is printed",
    )
    parser.add_argument("--port", type=port, default=_PORT, help=f"port to listen on, 0 for any (default {_PORT})")
    add_allowed_hosts(parser)
    parser.set_defaults(command=_watch)


def _watch(arguments: Arguments) -> None:
    from ds_finetune.runs.watch.app import watch

    folder, names = Path(arguments.folder), arguments.allow_host
    watch(folder, host=arguments.host, port=arguments.port, show=show_line, allowed_hosts=names)
