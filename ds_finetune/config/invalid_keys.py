"""Error messages for keys and values of a run file that do not fit its schema."""

import difflib
import json
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ds_finetune.config.objectives import (
    OBJECTIVES,
    GrpoObjective,
    ObjectiveConfig,
    explain_objective,
    objectives_with,
)
from ds_finetune.config.other_programs import KEY_OF, KEYS_OF_GRPO, MEANINGS, NOT_AVAILABLE, value_of
from ds_finetune.config.run_file import Lines
from ds_finetune.config.sections import Section
from ds_finetune.errors import ConfigError

_NEAR = 0.6
"""Least similarity (difflib's ratio, 0 to 1) at which an unknown name counts as a misspelling of a known one."""
_BOUNDS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))


def explain(invalid: ValidationError, root: type[Section], source: str, lines: Lines) -> ConfigError:
    """Make the ConfigError for a run file that does not fit the schema `root`. It names each wrong key with its line,
    and says what to write.
    """
    # pydantic reports one error for each member of a union; keep the first error of each key.
    firsts = {_keys_of(error): error for error in reversed(invalid.errors())}
    errors = list(reversed(firsts.values()))
    unknown = [error for error in errors if _is_foreign(error)]
    if len(unknown) < 2:
        wrong_keys, remedies = zip(*(_explain_one(error, root, source, lines) for error in errors), strict=True)
        return ConfigError("; ".join(wrong_keys), hint="; ".join(dict.fromkeys(remedies)))
    # Several unknown keys were probably pasted from a file of another trainer.
    rows, sections = list[tuple[int, str]](), set()
    for error in unknown:
        path, section = section_of(root, _keys_of(error))
        sections.add((meant_key(path[-1], section, root) or "").partition(".")[0])
        where, text = lines.get(path, 0), _instead(path, section, root, error["input"])
        rows.append((where, f"line {where}  " * bool(where) + ".".join(path) + text))
    others = [error for error in errors if error not in unknown]
    missing = [e for e in others if e["type"] == "missing" and _keys_of(e)[0] in sections]
    texts = [text for _, text in sorted(rows, key=itemgetter(0))]
    texts += [_explain_one(error, root, source, lines)[0] for error in others if error not in missing]
    return ConfigError(
        "\n  ".join([f"{source} has {len(unknown)} keys that a run file does not have:", *texts]),
        hint="write the keys right of the arrows; docs/reference/other-trainers.md lists keys of other trainers, and "
        "`ds-finetune init ROWS` writes a run file",
    )


def _instead(path: Sequence[str], section: type[BaseModel], root: type[BaseModel], value: object) -> str:
    """Text after an unknown key in a list of such keys: the run-file key to write instead, or why there is none."""
    word, key = path[-1], meant_key(path[-1], section, root)
    if word.lower() in NOT_AVAILABLE:
        return ": not available here"
    if key == ".".join(path):
        return f": a key of {', '.join(objectives_with(word))}"
    near = _similar(word, _own_names(section))
    meant = written(word, value, key) if key else ".".join((*path[:-1], near[0])) + "?" if near else ""
    return f" -> {meant}" if meant else ": unknown"


def _is_foreign(error: Any) -> bool:  # noqa: ANN401 - pydantic's ErrorDetails
    """Whether a pydantic error is about an unknown key, or about a section that got a plain value because another
    trainer has a key of this name, as in `optim: adamw_torch`.
    """
    is_value = error["type"] == "model_type" and len(error["loc"]) == 1 and error["loc"][0] in KEY_OF
    return error["type"] == "extra_forbidden" or is_value


def _example(word: str, value: object, key: str) -> str:
    text, (section, _, name) = value_of(word, value, key), key.rpartition(".")
    if text is None:
        return f"`{key}` is {MEANINGS[key]}" if key in MEANINGS else ""
    return f"write `{section}: {{{name}: {text}}}`" if section else f"write `{key}: {text}`"


def written(word: str, value: object, key: str) -> str:
    """Text that names run-file key `key` as the replacement of `word: value` in another trainer's file.

    It ends with the converted value if that differs from `value`. If `value` cannot be converted, it ends with the
    meaning of `key`, if `MEANINGS` has it.
    """
    text = value_of(word, value, key)
    if text is None and key in MEANINGS:
        return f"{key} ({MEANINGS[key]})"
    if text is None:
        return key if isinstance(value, list | dict) or value is None else f"{key}, which has other values"
    return key if text in (str(value), str(value).lower()) else f"{key}: {text}"


def _keys_of(error: Any) -> tuple[str, ...]:  # noqa: ANN401 - pydantic's ErrorDetails
    """Path of run-file keys in a pydantic error, without list indices and union members such as `dict[str,float]`."""
    parts = [part for part in error["loc"] if isinstance(part, str)]
    return tuple(part for part in parts if part not in ("str", "int", "float") and "[" not in part)


def _explain_one(error: Any, root: type[Section], source: str, lines: Lines) -> tuple[str, str]:  # noqa: ANN401 - pydantic's ErrorDetails
    path, section = section_of(root, _keys_of(error))
    line = lines.get(path)
    where = f"{source} line {line}" if line else source
    name = ".".join(path)
    if objective := explain_objective(error):
        return f"{where}: {objective.message}", objective.hint
    if error["type"] == "extra_forbidden":
        owner = f" of objective {_tag(section)}" if path[0] == "objective" else ""
        return f"{where}: unknown key `{name}`{owner}", _suggestion(path, section, root, error["input"])
    # pydantic reports a missing item of a tuple by its index, so an integer location means that the list is too short.
    is_too_short = error["type"] == "missing" and isinstance(error["loc"][-1], int)
    if error["type"] == "missing" and not is_too_short:
        return f"{where}: `{name}` is missing", f"add it; {root.page} describes `{name}`"
    message = _plain_message(error["msg"])
    field = field_of(section, path[-1])
    if field is not None and (is_too_short or error["type"] == "too_long"):
        message = f"it should have {len(get_args(field.annotation))} values"
    hint = f"give `{name}` a value, or leave it out" if error["input"] is None else _value_hint(name, field, root.page)
    if _is_foreign(error):
        hint = _example(name, error["input"], KEY_OF[name]) or hint
    if isinstance(error["input"], bool) and name in MEANINGS:
        hint = f"it is {MEANINGS[name]}; {hint}"
    return f"{where}: `{name}` is {error['input']!r}: {message}", hint


def field_of(section: type[BaseModel], key: str) -> FieldInfo | None:
    """The pydantic field of key `key` in class `section`; None if the section has no such key."""
    return next((field for name, field in section.model_fields.items() if key in (name, field.alias)), None)


def _value_hint(name: str, field: FieldInfo | None, page: str) -> str:
    if field is None:
        return f"{page} describes `{name}`"
    facts = [f"{word} {getattr(part, key)}" for part in field.metadata for key, word in _BOUNDS if hasattr(part, key)]
    if isinstance(field.default, str | int | float | tuple):
        facts.append(f"by default {json.dumps(field.default)}")
    text = " ".join((field.description or f"see {page}").split())
    text = text if text.endswith("...") else text.removesuffix(".")
    return f"`{name}`{' (' * bool(facts)}{', '.join(facts)}{')' * bool(facts)}: {text}"


def section_of(root: type[BaseModel], parts: Sequence[str]) -> tuple[tuple[str, ...], type[BaseModel]]:
    """Split the location of a pydantic error into a path of run-file keys and the class of the section of the last key.

    The path omits the tags that pydantic adds for members of a discriminated union.
    """
    path: tuple[str, ...] = ()
    section, rest = root, list(parts)
    while len(rest) > 1:
        key = rest.pop(0)
        path, choices = (*path, key), _sections(section, key)
        if not choices:
            break
        section = next((part for part in choices if _tag(part) == rest[0]), choices[0])
        rest = rest[1:] if len(choices) > 1 else rest
    return (*path, *rest), section


def _tag(section: type[BaseModel]) -> str:
    """Value of `name`, such as `dpo`, by which pydantic selects an objective's class; empty for other sections."""
    field = section.model_fields.get("name")
    values = get_args(field.annotation) if field is not None else ()
    return str(values[0]) if values else ""


def _suggestion(path: Sequence[str], section: type[BaseModel], root: type[BaseModel], value: object) -> str:
    """Hint for an unknown key: the run-file key that was probably meant. The unknown key may be another trainer's name
    for that key, a key of another section, or a misspelling.
    """
    word, names = path[-1], _own_names(section)
    if word.lower() in NOT_AVAILABLE:
        return f"leave it out: `{word}` is not available here"
    owners = objectives_with(word) if path[0] == "objective" and not _grpo_key(word, section) else []
    if owners:
        return f"`{word}` is a key of {', '.join(owners)}; known here: {', '.join(names)}"
    key = meant_key(word, section, root)
    if key is not None:
        facts = [f"It is {MEANINGS[key]}"] if key in MEANINGS else []
        facts += [_example(word, value, key)] if value_of(word, value, key) is not None else []
        return f"did you mean `{key}`? {'; '.join(facts)}".strip()
    near = _similar(word, names)
    return f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(names)}"


def _similar(word: str, names: Sequence[str]) -> list[str]:
    """A list of one name, the first that begins with `word` or else the most similar one; empty if no name is near."""
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    return longer[:1] or difflib.get_close_matches(word, names, n=1, cutoff=_NEAR)


def _grpo_key(word: str, section: type[BaseModel]) -> str | None:
    return KEYS_OF_GRPO.get(word) if section is GrpoObjective else None


def meant_key(word: str, section: type[BaseModel], root: type[BaseModel]) -> str | None:
    """The dotted run-file key that `word` means. `word` is another trainer's name for it, or is in a wrong section."""
    names = (name for key in _own_names(root) for name in (key, *(f"{key}.{own}" for own in section_keys(root, key))))
    own = next((name for name in names if word in (name, name.rpartition(".")[2])), None)
    return _grpo_key(word, section) or KEY_OF.get(word.lower()) or own


def section_keys(root: type[BaseModel], key: str) -> list[str]:
    """Names of the keys of section `key`; for `objective`, of all objectives. Empty where `key` has a plain value."""
    return list(dict.fromkeys(name for section in _sections(root, key) for name in _own_names(section)))


def _sections(parent: type[BaseModel], key: str) -> list[type[BaseModel]]:
    """Section classes that the field `key` of `parent` accepts; empty where it is a plain value or unknown."""
    field = field_of(parent, key)
    kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()
    if ObjectiveConfig in kinds:
        return [row.section for row in OBJECTIVES.values()]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _own_names(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _plain_message(message: str) -> str:
    message = re.sub(r"a valid dictionary or instance of \w+", "a section", message)
    message = re.sub(r"(?:Tuple|List) (should have .*) after validation, not \d+", r"it \1", message)
    return (
        message.removeprefix("Value error, ")
        .replace("a valid dictionary", "a mapping")
        .replace("Input should be a valid tuple", "it should be a list")
        .replace("Input should", "it should")
        .replace("greater than or equal to", "at least")
        .replace("less than or equal to", "at most")
    )
