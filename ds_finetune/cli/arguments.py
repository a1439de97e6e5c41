"""Command-line arguments that several commands have: the run file with its overrides, and numbers with bounds.

A number out of bounds is a usage error, which is reported before anything is loaded.
"""

import argparse
import difflib
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ds_finetune.config.invalid_keys import meant_key
from ds_finetune.config.other_programs import MEANINGS, NOT_AVAILABLE, value_of
from ds_finetune.config.schema import RunConfig, read_config
from ds_finetune.console.tables import show_line
from ds_finetune.errors import ExportError
from ds_finetune.plan.config_json import check_model_path

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Type of the object that argparse's `add_subparsers` returns, to which each command adds its parser."""
Arguments = argparse.Namespace
BEGINNING = """\
where to begin:
  ds-finetune init ROWS       write a run file for your rows
  ds-finetune demo FOLDER     write an example that trains in minutes
  ds-finetune config schema   print every key of a run file
  docs/index.md               of the repository leads to the documentation
"""
"""Text at the end of `ds-finetune --help` that names first commands to try."""


_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_RUN_FILES = ("config", "config_file", "cfg", "yaml", "run")
"""Names of options such as `--config` by which other trainers take their configuration file."""


class CommandParser(argparse.ArgumentParser):
    """Parser that refuses unknown options. For an option of another trainer, the error names a run-file key."""

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def,override]  # noqa: ANN001, ANN201
        """Parse as argparse does, but refuse unknown options that begin with `--`."""
        words = list(args or ())
        words = words[: words.index("--")] if "--" in words else words
        takes_keys = any(action.dest == "overrides" for action in self._actions)
        lines = []
        for number, word in enumerate(words):
            option, equals, value = word.partition("=")
            # An argument such as `-oFILE` is the option `-o` followed by its value.
            name = option if option.startswith("--") else option[:2]
            if not _OPTION.fullmatch(option) or name in self._option_string_actions:
                continue
            after = words[number + 1] if number + 1 < len(words) and not words[number + 1].startswith("--") else ""
            near = difflib.get_close_matches(option, self._option_string_actions, n=1, cutoff=0.8)
            meant = f"did you mean `{near[0]}`?" if near else "no option of this command"
            as_key = _as_override(option, value if equals else after, self.prog) if takes_keys and not near else ""
            lines.append(f"`{word}`: {as_key or meant}")
        if lines and self.get_default("command") is not None:
            self.error("\n  ".join(lines))
        return super().parse_known_args(args, namespace)


def _as_override(option: str, value: str, command: str) -> str:
    """Say what to write instead of an unknown option, which may be another trainer's or a key of the run file."""
    word = option.lstrip("-").replace("-", "_")
    if word in _RUN_FILES:
        return f"the run file is given without an option: `{command} {value or 'run.yaml'}`"
    if word.lower() in NOT_AVAILABLE:
        return "not available here"
    key = meant_key(word, RunConfig, RunConfig)
    if key is None:
        return "no option of this command; values are overridden as `section.key=value`"
    text = value_of(word, value or "true", key)
    if text is None:
        return f"the key is `{key}`: {MEANINGS.get(key, 'docs/reference/run-file.md describes it')}"
    text = text if value or text != "true" else "VALUE"
    return f"values are overridden as `{shlex.quote(f'{key}={text}')}`"


def add_command(
    commands: Commands, name: str, text: str, command: Callable[[Arguments], None], *, epilog: str | None = None
) -> argparse.ArgumentParser:
    """Add a command to the program, and return the command's parser. `epilog` is printed verbatim after its help."""
    layout = argparse.HelpFormatter if epilog is None else argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=text, epilog=epilog, formatter_class=layout, allow_abbrev=False)
    parser.set_defaults(command=command)
    return parser


def add_run_command(
    commands: Commands, name: str, text: str, command: Callable[[Arguments], None]
) -> argparse.ArgumentParser:
    """Add a command that takes a run file and overrides, and return its parser."""
    parser = add_command(commands, name, text, command, epilog=BEGINNING)
    add_local_rank(parser)
    parser.add_argument("run", metavar="RUN.yaml", help="the run file")
    add_overrides(parser)
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the arguments `section.key=value` to a command, which replace values of the run file."""
    text = "values that replace those of the run file"
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help=text)


def add_local_rank(parser: argparse.ArgumentParser) -> None:
    """Accept and ignore `--local_rank`, which the `deepspeed` launcher puts before the program's arguments. The
    environment variable LOCAL_RANK holds the same number.
    """
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)


def add_allowed_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the option `--allow-host` to a command that serves HTTP."""
    text = "another name under which requests may reach this server, such as a proxy's; `*` for any; may be repeated"
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help=text)


def read_run(arguments: Arguments) -> RunConfig:
    """Read the run file and the overrides that the command line names; ConfigError if one of them is invalid."""
    return read_config(arguments.run, arguments.overrides)


def exported_folder(path: str) -> Path:
    """Find the exported folder at `path`, or of the run at `path`; ExportError if there is none."""
    folder = Path(export_of(path))
    if folder.is_dir():
        check_model_path(str(folder))
    if not (folder / "config.json").is_file():
        raise ExportError(f"`{folder}` has no config.json", hint="name an exported folder, e.g. runs/r1/export")
    return folder


def export_of(path: str) -> str:
    """Return the exported folder of the run at `path` (a folder or run file), and print it. Keep other paths as is."""
    is_run_file = Path(path).suffix in (".yaml", ".yml") and Path(path).is_file()
    folder = Path(read_config(path).output_dir if is_run_file else path)
    if (folder / "config.json").is_file() or not (is_run_file or (folder / "plan.json").is_file()):
        return str(folder) if is_run_file else path
    if not (folder / "export" / "config.json").is_file():
        raise ExportError(f"the run in `{folder}` holds no export", hint="train it to its end, or name another folder")
    show_line(f"{path}: the export is {folder / 'export'}")
    return str(folder / "export")


def _whole_number(text: str, *, least: int, most: int | None = None) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number") from None
    if number < least or (most is not None and number > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise argparse.ArgumentTypeError(f"{number} is not {allowed}")
    return number


zero_or_more, positive, two_or_more = (partial(_whole_number, least=least) for least in range(3))
port = partial(_whole_number, least=0, most=65_535)
"""Parse a command-line argument as a network port; 0 stands for any free port."""
