"""`ds-finetune checkpoint`: list, show, verify and gather checkpoints."""

import os
from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands, add_command
from ds_finetune.console.tables import OUT, show_pairs


def add_commands(commands: Commands) -> None:
    """Add the commands `checkpoint list`, `show`, `verify` and `gather` to the program."""
    checkpoint = commands.add_parser("checkpoint", help="list, show, verify and gather checkpoints")
    actions = checkpoint.add_subparsers(required=True, metavar="WHAT")
    listing = add_command(actions, "list", "list the checkpoints of a run", _list)
    listing.add_argument("run", metavar="RUN", help="output directory of the run")
    show = add_command(actions, "show", "print the contents of a checkpoint", _show)
    verify = add_command(actions, "verify", "compare the checksums of a checkpoint with its files", _verify)
    for parser in (show, verify):
        text = "a checkpoint, or a run for its newest checkpoint"
        parser.add_argument("folder", metavar="RUN_OR_CHECKPOINT", help=text)
    text = "merge the parts of a checkpoint that several nodes keep into one"
    gathering = add_command(actions, "gather", text, _gather)
    gathering.add_argument("out", metavar="OUT", help="folder to write")
    gathering.add_argument("folders", nargs="+", metavar="CHECKPOINT", help="the checkpoint's folder on each node")


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
