"""The program `ds-finetune`: builds the parser, runs one command, prints an error once and ends the process.

The parser and the function of each command are in a module of this package.
"""

import argparse
import atexit
import codecs
import errno
import io
import locale
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from ds_finetune import __version__
from ds_finetune.cli.arguments import BEGINNING, Arguments, CommandParser, add_command
from ds_finetune.console.quiet import quiet_packages
from ds_finetune.console.tables import LOST, show_error, show_piece
from ds_finetune.errors import RUN_ERROR_EXIT_CODE, USER_ERROR_EXIT_CODE, ConfigError, FinetuneError
from ds_finetune.system.processes import INTERRUPT_EXIT_CODE
from ds_finetune.system.rank_files import RUN_ID, record_error
from ds_finetune.system.versions import check_versions

_MODULES = (
    *("train", "launch", "plan", "report", "doctor", "config", "rewards", "checkpoint", "export", "evaluate"),
    *("serve", "selftest", "sweep", "init", "demo"),
)
"""Modules of this package that implement commands, in the order in which `--help` lists the commands."""
_WITHOUT_MODELS = ("launch", "report", "watch", "doctor", "config", "checkpoint", "init", "demo", "completion")
"""Commands that use no model in this process, so they accept any version of torch, transformers and DeepSpeed."""
_LONG = ("train", "launch", "sweep", "scaling", "serve", "watch")
"""Commands whose purpose is not their printed text, so they continue if a line cannot be printed."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_QUIET_SECONDS = 5.0
"""Seconds that the ranks of a host, except local rank 0, wait before they exit with an error, so that local rank 0
prints the error first.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 success, 1 failed run, 2 wrong usage or run file, 130 Ctrl-C.

    Commands end with other exit codes by SystemExit, e.g. with 3 if a signal ended a run after its checkpoint was
    saved.
    """
    command_line = sys.argv[1:] if argv is None else list(argv)
    arguments = parse_arguments(command_line)
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks become escapes, since an encoding error would end the program.
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    try:
        _check_encoding()
        _check_given_once(getattr(arguments, "overrides", ()))
        if command_line[0] not in _WITHOUT_MODELS:
            check_versions()
        quiet_packages()
        LOST.clear()
        arguments.command(arguments)
        _check_printed(command_line[0])
    except FinetuneError as error:
        _print_once(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _print_once("interrupted")
        return INTERRUPT_EXIT_CODE
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            _print_once(f"standard output, or a file, cannot be written: {error.strerror}\n  hint: free some space")
            return RUN_ERROR_EXIT_CODE
        text = "".join(traceback.format_exception(error))
        record_error(text)
        show_error(f"rank {os.environ.get('RANK', '0')}: {text}")
        return RUN_ERROR_EXIT_CODE
    return 0


def _check_printed(command: str) -> None:
    """Raise the error if a full disk kept a line from being printed. Commands in `_LONG` ignore the error."""
    if LOST and LOST[-1].errno in _FULL and command not in _LONG:
        raise LOST.pop()


def _check_encoding() -> None:
    """Raise ConfigError unless the locale's encoding is UTF-8, since packages read files in the locale's encoding."""
    encoding = locale.getpreferredencoding(do_setlocale=False)
    if codecs.lookup(encoding).name != "utf-8":
        raise ConfigError(
            f"the text encoding of this locale is {encoding}, with which packages would read their files wrongly",
            hint="set PYTHONUTF8=1 in the environment, or a UTF-8 locale such as LC_ALL=C.UTF-8",
        )


def run_and_exit(argv: Sequence[str], *, linger: float = 0.0) -> NoReturn:
    """Run `main` in a process that a launcher started, and end the process with the exit code. After a mistake of the
    user, wait for `linger` seconds before the end.
    """
    try:
        code = main(argv)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    time.sleep(linger if code == USER_ERROR_EXIT_CODE else 0.0)
    exit_process(code)


def exit_process(code: int = 0) -> NoReturn:
    """Run the exit handlers, flush the output, and end the process without the interpreter's own shutdown.

    DeepSpeed 0.19.8 keeps process groups and engines (utils/groups.py:37). If a thread of gloo releases its last tensor
    while the interpreter shuts down, the process aborts after its work ("terminate called without an active exception",
    exit code -6).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A closed stream is None, and a stream cannot be flushed if its disk is full.
        with suppress(AttributeError, OSError):
            stream.flush()
    os._exit(code)


def build_parser(command: str = "") -> argparse.ArgumentParser:
    """Build the parser of all commands. If `command` is the name of a module, add only that module's commands, so that
    a rank does not import the code of other commands.
    """
    parser: argparse.ArgumentParser = CommandParser(
        prog="ds-finetune",
        description="Fine-tune DeepSeek-style causal LMs with DeepSpeed.",
        epilog=BEGINNING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ds-finetune {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in (command,) if command in _MODULES else _MODULES:
        import_module(f"ds_finetune.cli.{name}").add_commands(commands)
    text = "print a script that completes commands in a shell, e.g. for ~/.bashrc"
    completion = add_command(commands, "completion", text, _print_completion)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="your shell")
    return parser


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of a command. Overrides `section.key=value` may come before and after options.

    argparse itself accepts overrides in one place only (Python 3.11, argparse.py, `_match_arguments_partial`).
    """
    parser = build_parser(argv[0] if argv else "")
    arguments, rest = parser.parse_known_args(argv)
    if not hasattr(arguments, "overrides") or any(word.startswith("-") or "=" not in word for word in rest):
        return parser.parse_args(argv)
    arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _check_given_once(overrides: Sequence[str]) -> None:
    first_values: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if first_values.setdefault(key, value) != value:
            raise ConfigError(
                f"`{key}` is given twice: {key}={first_values[key]} and {override}", hint=f"give `{key}` once"
            )


def _print_completion(arguments: Arguments) -> None:
    import shtab

    parser = build_parser()
    _complete_files(parser, shtab.FILE)
    show_piece(shtab.complete(parser, shell=arguments.shell) + "\n")


def _complete_files(parser: argparse.ArgumentParser, how: Mapping[str, object]) -> None:
    """Make shells complete file names for all arguments that take a text, since most of them are files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, how)
        elif action.choices is None and action.type is None and action.nargs != 0:
            action.complete = how  # type: ignore[attr-defined]


def _print_once(text: str) -> None:
    """Record and print an error. Without a log for each rank, ranks other than local rank 0 print only its first line,
    because all ranks of a host meet the same error.
    """
    record_error(text)
    if os.environ.get("LOCAL_RANK", "0") == "0" or {RUN_ID, "TORCHELASTIC_RUN_ID"} <= os.environ.keys():
        # Under `launch` no rank waits for local rank 0, since each has its own log and the first to end is blamed.
        show_error(f"error: {text}")
        return
    time.sleep(_QUIET_SECONDS)
    show_error(f"rank {os.environ.get('RANK')}: {text.splitlines()[0]}")
