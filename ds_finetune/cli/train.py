"""`ds-finetune train`: fine-tunes a model."""

import os

from ds_finetune import __version__, api
from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, read_run
from ds_finetune.cli.interrupts import ended_by_interrupt
from ds_finetune.console.quiet import quiet_packages
from ds_finetune.console.tables import show_line
from ds_finetune.errors import INTERRUPTED_EXIT_CODE
from ds_finetune.system.world import World


def add_commands(commands: Commands) -> None:
    """Add `train`."""
    add_run_command(commands, "train", "fine-tune a model as RUN.yaml says", _train)


def _train(arguments: Arguments) -> None:
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
