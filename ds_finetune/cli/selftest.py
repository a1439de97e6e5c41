"""`ds-finetune selftest`: tests parallel layouts on the machines at hand."""

import os

from ds_finetune.cli.arguments import (
    Arguments,
    Commands,
    add_local_rank,
    add_overrides,
    positive,
    read_run,
    two_or_more,
)
from ds_finetune.console.tables import show_line
from ds_finetune.families.table import STANDARD_SELFTEST


def add_commands(commands: Commands) -> None:
    """Add `selftest`."""
    selftest = commands.add_parser(
        "selftest", help="compare parallel layouts with a plain PyTorch loop on these machines", allow_abbrev=False
    )
    selftest.add_argument(
        "run",
        metavar="RUN.yaml",
        nargs="?",
        help="test the layout of this run, with a tiny model of its family (default: a standard set of layouts)",
    )
    add_overrides(selftest)
    where = selftest.add_mutually_exclusive_group()
    where.add_argument("--nproc", type=positive, default=1, help="number of processes on this machine (default 1)")
    where.add_argument("--hostfile", help="hosts to start on; they share the working directory")
    selftest.add_argument(
        "--steps", type=two_or_more, default=3, help="optimizer steps of each layout, at least 2 (default 3)"
    )
    selftest.add_argument(
        "--families",
        default=",".join(STANDARD_SELFTEST),
        help=f"model families of the standard set (default {','.join(STANDARD_SELFTEST)})",
    )
    add_local_rank(selftest)
    selftest.set_defaults(command=_selftest)


def _selftest(arguments: Arguments) -> None:
    config = read_run(arguments) if arguments.run else None
    from ds_finetune.reference.selftest.run import Extent, selftest, start_world

    extent = Extent(arguments.steps, tuple(arguments.families.split(",")))
    if "RANK" in os.environ or (arguments.hostfile is None and arguments.nproc == 1):
        selftest(config, extent, say=show_line)
        return
    rank_arguments = [*([arguments.run] if arguments.run else []), *arguments.overrides, *extent.arguments]
    raise SystemExit(start_world(rank_arguments, config, nproc=arguments.nproc, hostfile=arguments.hostfile))
