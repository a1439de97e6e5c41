"""`ds-finetune completion`: the script by which a shell completes commands, options and files."""

import argparse
from collections.abc import Mapping

from ds_finetune.cli.arguments import Arguments, Commands
from ds_finetune.console.tables import show_piece


def add_commands(commands: Commands) -> None:
    """Add `completion`."""
    parser = commands.add_parser(
        "completion", help="print a script that completes commands in a shell, e.g. for ~/.bashrc", allow_abbrev=False
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    parser.set_defaults(command=_print_script)


def _print_script(arguments: Arguments) -> None:
    import shtab

    # It has this module among its own.
    from ds_finetune.cli.main import build_parser

    parser = build_parser()
    _complete_files(parser, shtab.FILE)
    show_piece(shtab.complete(parser, shell=arguments.shell) + "\n")


def _complete_files(parser: argparse.ArgumentParser, how: Mapping[str, object]) -> None:
    """Let arguments that take a text be completed with names of files: most are files, and others are typed anyway."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, how)
        elif action.choices is None and action.type is None and action.nargs != 0:
            action.complete = how  # type: ignore[attr-defined]
