"""`ds-finetune checkpoint`: list, show, verify and gather checkpoints."""

import os
from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands
from ds_finetune.console.tables import OUT, show_pairs


def add_commands(commands: Commands) -> None:
    """Add `checkpoint list`, `show`, `verify` and `gather`."""
    checkpoint = commands.add_parser("checkpoint", help="list, show, verify and gather checkpoints")
    actions = checkpoint.add_subparsers(required=True, metavar="WHAT")
    listing = actions.add_parser("list", help="list the checkpoints of a run")
    listing.add_argument("run", metavar="RUN", help="output directory of the run")
    listing.set_defaults(command=_list)
    for name, text, command in (
        ("show", "print the contents of a checkpoint", _show),
        ("verify", "compare the checksum of every file with the recorded one", _verify),
    ):
        parser = actions.add_parser(name, help=text)
        parser.add_argument(
            "folder", metavar="RUN_OR_CHECKPOINT", help="a checkpoint, or a run for its newest checkpoint"
        )
        parser.set_defaults(command=command)
    gathering = actions.add_parser("gather", help="merge the parts that several nodes keep into one checkpoint")
    gathering.add_argument("out", metavar="OUT", help="folder to write")
    gathering.add_argument("folders", nargs="+", metavar="CHECKPOINT", help="the checkpoint's folder on each node")
    gathering.set_defaults(command=_gather)


def _list(arguments: Arguments) -> None:
    from ds_finetune.checkpoint.tools import list_checkpoints

    show_pairs("checkpoints", list_checkpoints(Path(arguments.run)))


def _show(arguments: Arguments) -> None:
    from ds_finetune.checkpoint.tools import describe_checkpoint

    show_pairs("checkpoint", describe_checkpoint(Path(arguments.folder)))


def _verify(arguments: Arguments) -> None:
    from ds_finetune.checkpoint.tools import verify_checkpoint

    OUT.print(verify_checkpoint(Path(arguments.folder), workers=os.cpu_count() or 1), markup=False)


def _gather(arguments: Arguments) -> None:
    from ds_finetune.checkpoint.tools import gather_checkpoint

    OUT.print(gather_checkpoint([Path(folder) for folder in arguments.folders], Path(arguments.out)), markup=False)
