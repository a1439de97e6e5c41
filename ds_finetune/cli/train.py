"""`ds-finetune train`: fine-tunes a model."""

from ds_finetune import api
from ds_finetune.cli.arguments import Arguments, Commands, add_run_command, read_run
from ds_finetune.errors import INTERRUPTED_EXIT_CODE


def add_commands(commands: Commands) -> None:
    """Add `train`."""
    add_run_command(commands, "train", "fine-tune a model as RUN.yaml says", _train)


def _train(arguments: Arguments) -> None:
    report = api.train(read_run(arguments))
    if report.interrupted:
        raise SystemExit(INTERRUPTED_EXIT_CODE)
