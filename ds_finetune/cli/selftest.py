"""The commands `ds-finetune selftest` and `bench`, which compare layouts and speed with PyTorch loops."""

import os

from ds_finetune.cli.arguments import (
    Arguments,
    Commands,
    add_command,
    add_local_rank,
    add_overrides,
    add_run_command,
    positive,
    read_run,
    two_or_more,
)
from ds_finetune.console.tables import show_line, show_pairs
from ds_finetune.families.table import STANDARD_SELFTEST
from ds_finetune.system.world import World


def add_commands(commands: Commands) -> None:
    """Add the commands `selftest` and `bench` to the program."""
    text = "compare parallel layouts with a plain PyTorch loop on these machines"
    selftest = add_command(commands, "selftest", text, _selftest)
    text = "test the layout of this run, with a tiny model of its family (default: a standard set of layouts)"
    selftest.add_argument("run", metavar="RUN.yaml", nargs="?", help=text)
    add_overrides(selftest)
    where = selftest.add_mutually_exclusive_group()
    where.add_argument("--nproc", type=positive, default=1, help="number of processes on this machine (default 1)")
    where.add_argument("--hostfile", help="hosts to start on; they share the working directory")
    text = "optimizer steps of each layout, at least 2 (default 3)"
    selftest.add_argument("--steps", type=two_or_more, default=3, help=text)
    families = ",".join(STANDARD_SELFTEST)
    text = f"model families of the standard set (default {families})"
    selftest.add_argument("--families", default=families, help=text)
    add_local_rank(selftest)
    text = "time the training step beside a plain PyTorch loop on the same documents"
    bench = add_run_command(commands, "bench", text, _bench)
    bench.add_argument("--steps", type=positive, default=5, help="timed steps of each loop (default 5)")


def _selftest(arguments: Arguments) -> None:
    config = read_run(arguments) if arguments.run else None
    from ds_finetune.plan.settings import RunSettings
    from ds_finetune.reference.selftest.run import SelftestSize, selftest, start_world

    run = RunSettings.of(config) if config is not None else None
    size = SelftestSize(arguments.steps, tuple(arguments.families.split(",")))
    if "RANK" in os.environ or (arguments.hostfile is None and arguments.nproc == 1):
        selftest(run, size, say=show_line)
        return
    rank_arguments = [*([arguments.run] if arguments.run else []), *arguments.overrides, *size.arguments]
    raise SystemExit(start_world(rank_arguments, run, nproc=arguments.nproc, hostfile=arguments.hostfile))


def _bench(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.reference.bench.step_speed import compare_step_speed
    from ds_finetune.trainer.resolve import resolve_here

    run = resolve_here(config, World.from_environment(os.environ))
    contest = compare_step_speed(run, steps=arguments.steps, say=show_line)
    show_pairs("one optimizer step, supervised tokens a second", contest.lines())
