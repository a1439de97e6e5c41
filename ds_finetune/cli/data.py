"""`ds-finetune data`: the training data of a run."""

from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, positive, read_run
from ds_finetune.console.tables import OUT


def add_commands(commands: Commands) -> None:
    """Add `data show`."""
    data = commands.add_parser("data", help="show the training data of a run")
    actions = data.add_subparsers(required=True, metavar="WHAT")
    show = add_run_command(actions, "show", "print samples with their supervised tokens marked, and counts", _show)
    show.add_argument("--samples", type=positive, default=3, help="number of rows to print (default 3)")


def _show(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.trainer.preview import preview_of

    OUT.print(preview_of(config, samples=arguments.samples))
