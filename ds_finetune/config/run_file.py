"""Reads a YAML run file as a nested dictionary with the line of each key, and applies overrides `a.b=value`. Also finds
the files that come with the package: DeepSpeed configurations, run files and hostfiles.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ds_finetune.errors import ConfigError, LaunchError, OutputError

Lines = dict[tuple[str, ...], int]
"""Line number of each key in the YAML file, by the path of keys such as `("optim", "lr")`."""
SHORT_FORMS = {"model": "path", "objective": "name", "lora": "rank"}
"""Sections with a short form, each with the key that it sets: `model: X` is short for `model: {path: X}`."""
_MOST_NODES, _MOST_DEPTH = 50_000, 100


class PlainLoader(yaml.SafeLoader):
    """YAML loader that reads `010`, `1:30` and `2026-01-31` as texts. SafeLoader follows YAML 1.1 and makes 8, 90 and a
    date of them.
    """


_TEXT = re.compile(r"(?:[-+]?0[0-7_]+|[-+]?[0-9_]+(:[0-9]+)+\.?[0-9_]*|\d{4}-\d\d?-\d\d?.*)$")
PlainLoader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", _TEXT), *resolvers]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(text: str, loader: Any = PlainLoader) -> Any:  # noqa: ANN401 - any YAML value, by a class of yaml
    """Parse a YAML document; yaml.YAMLError where it is invalid or has too many values or levels.

    An alias counts as all values that it expands to, so that a small file cannot fill the memory.
    """
    opened: list[tuple[str | None, int]] = []
    sizes: dict[str | None, int] = {}
    count = 0
    for event in yaml.parse(text, Loader=loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent) and event.anchor in dict(opened):
            raise yaml.YAMLError(f"`*{event.anchor}` in line {line} contains itself")
        if isinstance(event, yaml.NodeEvent):
            count += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if count > _MOST_NODES or len(opened) > _MOST_DEPTH:
            limit = f"{_MOST_NODES} values" if count > _MOST_NODES else f"{_MOST_DEPTH} levels"
            raise yaml.YAMLError(f"it has more than {limit} at line {line}")
    try:
        return yaml.load(text, Loader=loader)
    except ValueError as wrong:
        raise yaml.YAMLError(str(wrong)) from None


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """Read a YAML mapping with the line of each key; ConfigError if the file is not a mapping or repeats a key."""
    text = read_text(path, "run file", "give the run's YAML file as the first argument")
    try:
        tree, node = parse_yaml(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as broken:
        raise ConfigError(
            f"{path} cannot be read as YAML: {broken}", hint="check the named line and its indentation"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            f"run file {path} holds {'nothing' if tree is None else kind_of_value(tree)}, not a mapping",
            hint="write keys with values, such as `model: FOLDER`; `ds-finetune init ROWS` writes a run file",
        )
    return tree, dict(_key_lines(node, ()))


def kind_of_value(value: object) -> str:
    """Kind of a YAML or JSON value, as shown in error messages."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _key_lines(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigError(
                f"key `{'.'.join((*path, key.value))}` is given twice, in lines {seen[key.value]} and {line}",
                hint="keep one of them",
            )
        seen[key.value] = line
        yield (*path, key.value), line
        yield from _key_lines(value, (*path, key.value))


def apply_override(tree: dict[str, Any], lines: Lines, override: str) -> None:
    """Apply the override `section.key=value` to `tree`. Remove the key's line number: the value is not the file's."""
    name, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override `{override}` is not of the form section.key=value", hint="e.g. optim.lr=1e-5")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        value = text
    set_key(tree, lines, name, value, source=f"override `{override}`")


def set_key(tree: dict[str, Any], lines: Lines, name: str, value: object, *, source: str) -> None:
    """Set the dotted key `name` of `tree`. Remove its line number, since the value is no longer that of the file.

    ConfigError, which begins with `source`, if `name` has an empty part or if a key above it has a plain value.
    """
    keys = tuple(name.strip().split("."))
    if not all(keys):
        raise ConfigError(f"{source} is not of the form section.key=value", hint="write e.g. optim.lr=1e-5")
    branch = tree
    for depth, key in enumerate(keys[:-1]):
        section = branch.setdefault(key, {})
        if depth == 0 and key in SHORT_FORMS and isinstance(section, str | int):
            section = branch[key] = {} if isinstance(section, bool) else {SHORT_FORMS[key]: section}
        if not isinstance(section, dict):
            raise ConfigError(
                f"{source}: `{'.'.join(keys[: depth + 1])}` is `{section}`, not a section",
                hint=f"set `{'.'.join(keys[: depth + 1])}` as a whole",
            )
        branch = section
    branch[keys[-1]] = value
    lines.pop(keys, None)


def one_line_yaml(value: object) -> str:
    """Format a value as YAML on one line, with quotes where YAML needs them, also inside a flow mapping `{...}`."""
    # A text with line ends or control characters needs double quotes, because in other styles YAML folds line ends.
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    options: dict[str, Any] = {"sort_keys": False, "width": math.inf, "allow_unicode": True, "default_style": style}
    return str(yaml.safe_dump([value], default_flow_style=True, **options)).strip()[1:-1]


def write_run_file(path: Path, text: str) -> None:
    """Write a new run file to `path`, given by CLI option `--out`; OutputError if it exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise OutputError(f"`{path}` exists already", hint="give --out another name, or remove the file") from None
    except OSError as failed:
        raise OutputError(f"`{path}` cannot be written: {failed.strerror}", hint="give --out another name") from failed


def values_by_key(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested sections to `{dotted key: value}`, with `above` before each key; an empty section is kept as the
    value `{}`.
    """
    values: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        values |= values_by_key(value, f"{above}{key}.") if is_section else {f"{above}{key}": value}
    return values


def set_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested sections to `{dotted key: value}`, leaving out None and empty sections."""
    return {key: value for key, value in values_by_key(tree).items() if value is not None and value != {}}


DS_CONFIGS, HOSTFILES = "ds_configs", "hostfiles"
"""Folders of the package with shipped files. In a checkout they are links to folders of the repository."""
_PACKAGE = Path(__file__).parent
_MOST_BYTES = 2**20


def shipped_file(given: str) -> Path | None:
    """Path of a file that comes with the package, such as `ds_configs/zero3.json`; None where there is none."""
    parts, path = Path(given).parts, _PACKAGE / given
    is_inside = len(parts) > 1 and parts[0] in (DS_CONFIGS, HOSTFILES) and ".." not in parts
    return path if is_inside and path.is_file() else None


def shipped_names(folder: str) -> Iterator[str]:
    """Paths of the files in a folder of the package, relative to that folder."""
    root = _PACKAGE / folder
    return (str(path.relative_to(root)) for path in sorted(root.rglob("*")) if path.is_file())


def read_text(given: str | Path, kind: str, hint: str, error: type[ConfigError | LaunchError] = ConfigError) -> str:
    """Text of the file `given`, or of the file of that name that comes with the package. If it cannot be read or is
    larger than 1 MiB, raise `error` with `hint` and a message that names `kind`, such as "hostfile".
    """
    path = Path(given)
    try:
        with (path if path.exists() else shipped_file(str(given)) or path).open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise error(f"{kind} `{given}` has more than {_MOST_BYTES} bytes", hint=hint)
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as binary:
        raise error(f"{kind} `{given}` is not UTF-8 text: {binary}", hint="save it as UTF-8") from None
    except (FileNotFoundError, ValueError):  # ValueError for a name with a zero byte
        raise error(f"{kind} `{given}` does not exist", hint=hint) from None
    except OSError as unreadable:
        raise error(f"{kind} `{given}` cannot be read: {unreadable.strerror}", hint=hint) from None
