"""The commands `ds-finetune train`, which fine-tunes a model, and `teach`, which stores a teacher's distributions."""

import os
from pathlib import Path

from ds_finetune import __version__, api
from ds_finetune.cli.arguments import (
    Arguments,
    Commands,
    add_command,
    add_local_rank,
    add_overrides,
    add_run_command,
    positive,
    read_run,
)
from ds_finetune.console.quiet import quiet_packages
from ds_finetune.console.tables import show_line
from ds_finetune.errors import INTERRUPTED_EXIT_CODE
from ds_finetune.system.processes import ended_by_interrupt
from ds_finetune.system.world import World


def add_commands(commands: Commands) -> None:
    """Add the commands `train` and `teach` to the program."""
    train = add_run_command(commands, "train", "fine-tune a model as RUN.yaml says", _train)
    text = "print every decision and detail, as log.verbose=true does"
    train.add_argument("--verbose", action="store_true", help=text)
    text = "store a teacher's distributions of the next token for a run's training rows"
    teach = add_command(commands, "teach", text, _teach)
    add_local_rank(teach)
    teach.add_argument("teacher", metavar="MODEL", help="folder or hub id of the teacher")
    teach.add_argument("run", metavar="RUN.yaml", help="the run file whose training rows are scored")
    teach.add_argument("out", metavar="OUT", help="folder to write; one that is not complete is continued")
    add_overrides(teach)
    text = "most likely tokens that are stored for each token (default 64)"
    teach.add_argument("--top-k", type=positive, default=64, help=text)


def _train(arguments: Arguments) -> None:
    arguments.overrides += ["log.verbose=true"] if arguments.verbose else []
    config = read_run(arguments)
    quiet_packages()
    if not World.from_environment(os.environ).rank:
        show_line(
            f"ds-finetune {__version__}: {arguments.run}, output_dir {config.output_dir}; "
            "importing torch, transformers and DeepSpeed"
        )
    with ended_by_interrupt():
        import ds_finetune.trainer.train  # noqa: F401
    report = api.train(config)
    if report.interrupted:
        raise SystemExit(INTERRUPTED_EXIT_CODE)


def _teach(arguments: Arguments) -> None:
    config = read_run(arguments)
    from ds_finetune.plan.settings import RunSettings
    from ds_finetune.trainer.teach import teach

    teach(RunSettings.of(config), arguments.teacher, Path(arguments.out), top_k=arguments.top_k, say=show_line)
