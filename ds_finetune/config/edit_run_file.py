"""Edits the text of a run file: changes values of some keys and keeps comments and order."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ds_finetune.config.run_file import SHORT_FORMS, parse_yaml
from ds_finetune.config.schema import RunConfig, dump_config, validate_tree
from ds_finetune.config.shipped import shipped_file
from ds_finetune.errors import ConfigError, OutputError


def with_values(text: str, values: Mapping[str, object]) -> str:
    """The text of a run file with the values of some dotted keys changed; a missing section is added at the end."""
    for key, value in values.items():
        text = _with_value(text, tuple(key.split(".")), value)
    return text


def written_run_file(source: Path, values: Mapping[str, object], wanted: RunConfig, *, header: Sequence[str]) -> str:
    """The text of the run file `source` with `values` put in, after the lines of `header` as comments.

    Reading the result gives the configuration `wanted`. Where the text cannot be edited, as with YAML anchors, the
    result is a new text with every key of `wanted`.
    """
    path = source if source.exists() else shipped_file(str(source)) or source
    comment = "".join(f"# {line}\n" for line in header)
    try:
        text = with_values(path.read_text(encoding="utf-8"), values)
        if dump_config(validate_tree(parse_yaml(text), {}, "the run file")) == dump_config(wanted):
            return comment + text
    except (ConfigError, yaml.YAMLError):
        pass
    return comment + dump_config(wanted)


def write_run_file(path: Path, text: str, *, option: str) -> None:
    """Write a new run file to `path`, given by CLI option `option`; OutputError if it exists or cannot be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise OutputError(f"`{path}` exists already", hint=f"give {option} another name, or remove the file") from None
    except OSError as failed:
        raise OutputError(
            f"`{path}` cannot be written: {failed.strerror}", hint=f"give {option} another name"
        ) from failed


def _with_value(text: str, keys: tuple[str, ...], value: object) -> str:
    node, depth = yaml.compose(text, Loader=yaml.SafeLoader), 0
    assert isinstance(node, yaml.MappingNode)
    while depth < len(keys):
        child = next((item for key, item in node.value if key.value == keys[depth]), None)
        if child is None:
            return _insert(text, node, keys[depth:], value)
        depth += 1
        if depth < len(keys) and not isinstance(child, yaml.MappingNode):
            # The section has its short form, such as `model: PATH`.
            given = parse_yaml(text[child.start_mark.index : child.end_mark.index])
            short = {SHORT_FORMS[keys[0]]: given, keys[depth]: value}
            return _replace(text, child, short)
        node = child
    return _replace(text, node, value)


def _replace(text: str, node: yaml.Node, value: object) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    rest = text[end:]
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        # A block value starts on its own line; replace everything from the colon to the next key.
        start = text.rindex(":", 0, start) + 1
        return f"{text[:start]} {one_line_yaml(value)}\n{rest}"
    return f"{text[:start]}{one_line_yaml(value)}{rest}"


def _insert(text: str, node: yaml.MappingNode, keys: tuple[str, ...], value: object) -> str:
    for key in reversed(keys[1:]):
        value = {key: value}
    item = f"{keys[0]}: {one_line_yaml(value)}"
    end = node.end_mark.index
    if node.flow_style:
        end = text.rindex("}", 0, end)
        return f"{text[:end].rstrip()}{', ' if node.value else ''}{item}{text[end:]}"
    # PyYAML ends a block where the next key begins. Comments before that key are kept.
    last = len(text[: node.value[-1][1].end_mark.index].rstrip())
    line = text.find("\n", last)
    line = len(text) if line < 0 else line
    return f"{text[:line]}\n{' ' * node.start_mark.column}{item}{text[line:]}"


def one_line_yaml(value: object) -> str:
    """A value as YAML on one line, quoted where YAML needs quotes, also inside a flow mapping `{...}`."""
    # Only double quotes escape line ends; in other styles YAML folds them.
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    options: dict[str, Any] = {"sort_keys": False, "width": math.inf, "allow_unicode": True, "default_style": style}
    return str(yaml.safe_dump([value], default_flow_style=True, **options)).strip()[1:-1]


def override_values(overrides: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Key and value of overrides `a.b=value`."""
    for override in overrides:
        name, _, text = override.partition("=")
        yield name, parse_yaml(text)
