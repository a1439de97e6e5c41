"""Reads a file of another trainer: YAML, JSON, or the arguments of its command in a shell script."""

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from string import Template

import yaml

from ds_finetune.config.objectives import OBJECTIVES
from ds_finetune.config.other_programs import KEY_OF, MEANT, PROGRAMS, SAMPLING, Program
from ds_finetune.config.run_file import parse_yaml, read_text
from ds_finetune.errors import ConfigError

_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(\S*)\s*$", re.MULTILINE)
_RANKS = ("NPROC_PER_NODE", "NNODES", "num_processes", "nproc_per_node", "nnodes")
_ACCEPTED = (
    "a YAML or JSON file of axolotl, LLaMA-Factory, ms-swift or TRL, or a shell script with its training command; "
    "`ds-finetune init ROWS` writes a run file without one"
)


@dataclass(frozen=True)
class OtherFile:
    """Keys and values of another trainer's file, and the number of ranks that its command starts, if it names one."""

    program: Program
    words: dict[str, object]
    ranks: int | None = None


def read_other_file(path: Path) -> OtherFile:
    """Read another trainer's file; ConfigError if it has no key or command of a known trainer."""
    text = read_text(path, "file", f"give {_ACCEPTED}")
    tree = _tree(text)
    if tree is None:
        return _from_script(text, path)
    counts = [len(tree.keys() & set(program.marks.split())) for program in PROGRAMS]
    if not max(counts):
        raise ConfigError(
            f"`{path}` is not the file of a known trainer; its keys are {', '.join(tree)}", hint=f"give {_ACCEPTED}"
        )
    return OtherFile(PROGRAMS[counts.index(max(counts))], tree)


def _tree(text: str) -> dict[str, object] | None:
    try:
        tree = parse_yaml(text)
    except yaml.YAMLError:
        return None
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else None


def _from_script(text: str, path: Path) -> OtherFile:
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    values = dict(_ASSIGNED.findall(lines))
    lines = Template(re.sub(r"\\\s*(\n|$)", " ", lines)).safe_substitute(values)
    commands = [(program, rf"^(?P<before>.*?)(?:{program.command})") for program in PROGRAMS]
    commands_found = [
        (program, match) for program, command in commands for match in re.finditer(command, lines, re.MULTILINE)
    ]
    if len(commands_found) != 1:
        raise ConfigError(
            f"`{path}` has {len(commands_found)} training commands of known trainers instead of one",
            hint="keep one of them in the file" if commands_found else f"give {_ACCEPTED}",
        )
    program, match = commands_found[0]
    options, files = _options(lines[match.end() :].partition("\n")[0])
    before = {
        name: value[0] if isinstance(value, list) else value
        for name, value in _options(match["before"], may_repeat=True)[0].items()
    }
    files += [str(options.pop("config"))] if "config" in options else []
    words: dict[str, object] = {}
    for name in files:
        named = next((file for file in (Path(name), path.parent / name) if file.is_file()), None)
        tree = _tree(named.read_text(encoding="utf-8")) if named else None
        if tree is None:
            raise ConfigError(f"`{path}` names `{name}`, which is not a file with keys", hint="give the file with keys")
        words = tree
    words |= {key: before[key] for key in ("config_file",) if key in before} | options
    trainer = next(filter(None, match.groups()[1:]), "")
    if trainer and not any(KEY_OF.get(word) == "objective" for word in words):
        words["trainer"] = _objective_of(trainer)
    ranks = math.prod(int(str(before[key])) for key in _RANKS if str(before.get(key)).isdecimal())
    return OtherFile(program, words, ranks if any(key in before for key in _RANKS) else None)


def _objective_of(trainer: str) -> str:
    """Objective named by a command or script such as `sft_gemma3.py`; `swift rlhf` trains DPO by default."""
    parts = trainer.split("_")
    names = ("_".join(parts[:count]) for count in range(len(parts), 0, -1))
    return "dpo" if trainer == "rlhf" else next((n for n in names if n in {*OBJECTIVES, *MEANT, *SAMPLING}), trainer)


def _options(text: str, *, may_repeat: bool = False) -> tuple[dict[str, object], list[str]]:
    """Parse a shell command to its options and variable assignments, by name, and its YAML and JSON arguments.

    ConfigError if an option is given twice, unless it `may_repeat`, as options of `mpirun` do.
    """
    options, files, values = dict[str, list[str]](), list[str](), list[str]()
    try:
        tokens = shlex.split(text)
    except ValueError as wrong:
        raise ConfigError(
            f"the command `{text.strip()[:60]}` cannot be read: {wrong}", hint="close its quotes"
        ) from None
    for token in tokens:
        if token in ("&&", "||", "|", "&", ";") or token.startswith((">", "2>", "&>", "#")):
            break
        name, equals, value = token.partition("=")
        if token.startswith("--") or (equals and name.isidentifier()):
            values = [value] if equals else []
            key = name.removeprefix("--").replace("-", "_")
            if token.startswith("--") and key in options and not may_repeat:
                raise ConfigError(f"the training command gives `{name}` twice", hint=f"keep one `{name}`")
            options[key] = values
        elif options:
            values.append(token)
        elif token.endswith((".yaml", ".yml", ".json")):
            files.append(token)
    return {name: _value(values) for name, values in options.items()}, files


def _value(values: list[str]) -> object:
    return (values[0] if len(values) == 1 else values) if values else True
