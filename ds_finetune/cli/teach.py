"""`ds-finetune teach`: store a teacher's distributions for a run's training rows."""

from pathlib import Path

from ds_finetune.cli.arguments import Arguments, Commands, add_local_rank, add_overrides, positive, read_run
from ds_finetune.console.tables import show_line


def add_commands(commands: Commands) -> None:
    """Add `teach`."""
    parser = commands.add_parser(
        "teach", help="store a teacher's distributions of the next token for a run's training rows", allow_abbrev=False
    )
    add_local_rank(parser)
    parser.add_argument("teacher", metavar="MODEL", help="folder or hub id of the teacher")
    parser.add_argument("run", metavar="RUN.yaml", help="the run file whose training rows are scored")
    parser.add_argument("out", metavar="OUT", help="folder to write; one that is not complete is continued")
    add_overrides(parser)
    parser.add_argument(
        "--top-k", type=positive, default=64, help="most likely tokens that are stored for each token (default 64)"
    )
    parser.set_defaults(command=_teach)


def _teach(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.trainer.teach import teach

    teach(config, arguments.teacher, Path(arguments.out), top_k=arguments.top_k, say=show_line)
