"""Types of run-file values that can be written in several ways: paths with names or weights, durations, times."""

import math
import os
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from fractions import Fraction
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from ds_finetune.config.schedule import Duration, Interval, seconds_of, warmup_steps
from ds_finetune.config.units import parse_bytes
from ds_finetune.errors import ConfigError

Layout = Literal[
    "auto",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "text",
    "messages_pair",
    "response_pair",
    "prompt_pair",
    "question_pair",
    "alpaca_pair",
    "sharegpt_pair",
    "chat_pair",
    "pair",
    "ranked_pair",
    "labelled",
    "prompt",
    "input",
]


class OnResume(StrEnum):
    """What happens if a key's value differs from that in the checkpoint from which a run resumes."""

    REFUSED = "refused"
    ROWS = "refused if it changes the training rows"
    PRINTED = "printed"
    FREE = "free"


_T = TypeVar("_T")
# The type of a run-file key says what happens if a resumed run changes its value: an error (Refused), an error if other
# rows are trained on (Rows), or nothing (Free: results do not depend on it). The change of any other key is printed.
Refused = Annotated[_T, OnResume.REFUSED]
Rows = Annotated[_T, OnResume.ROWS]
Free = Annotated[_T, OnResume.FREE]
_LIKE_A_SHARE = re.compile(r"\s*(\d+([.,]\d*)?|[.,]\d+)\s*%\s*")
_SHARE = re.compile(r"(\d*[1-9]\d*(\.\d+)?|0*\.\d*[1-9]\d*)%")
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
"""Pattern that names of held-out sets and of rewards match."""


def check_whole_number(name: str, value: object, *, least: int) -> None:
    """Raise a ConfigError if `value`, the argument `name` of a function, is not an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"argument {name} is {value!r}", hint=f"give a whole number of {least} or more")


def as_list(value: object) -> object:
    """Convert a single text to a list of one."""
    return [value] if isinstance(value, str) else value


def _check_path(text: str) -> str:
    if "\0" in text or any(len(part.encode()) > 255 for part in text.split("/")):
        raise ValueError("no file or folder can have this name: a part of a path has at most 255 bytes, none of them 0")
    return text


def _check_folder_name(text: str) -> str:
    if re.match(r"~|.*\$[\w{]", text) and not os.path.exists(text):  # noqa: PTH110 - also false for invalid paths
        raise ValueError("`~` and variables are not expanded, which would make such a folder: write the full path")
    return text


def stage_as_file(value: object) -> object:
    """Convert a ZeRO stage 0 to 3 to the name of its shipped configuration, such as `zero3`."""
    return f"zero{value}" if type(value) is int and value in range(4) else value


def named_files(path: str) -> list[str]:
    """Expand a pattern such as `data/*.jsonl` to its matches, sorted; `path` itself where nothing matches."""
    return [path] if Path(path).exists() else sorted(glob(path, recursive=True)) or [path]  # noqa: PTH207 - absolute too


def _as_weighted(value: object) -> object:
    if not isinstance(value, dict):
        return as_list(value)
    for path, weight in value.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (isinstance(path, str) and is_number and 0 < weight < math.inf):
            raise ValueError(
                f"it should be files, or a mapping of files to weights above 0, and `{path}` has the weight {weight!r}"
            )
        _check_path(path)
    if not value:
        raise ValueError("the mapping is empty: name files with weights, as in `{new.txt: 0.9, old.txt: 0.1}`")
    return value


def _as_sets(value: object) -> object:
    if isinstance(value, int | float):
        percent = f"{value * 100:g}%" if 0 < value < 1 else "5%"
        raise ValueError(f"name files, or a share of data.train such as `{percent}`")  # noqa: TRY004 - for pydantic
    given = value if isinstance(value, dict) else {"": value}
    sets: dict[Any, Any] = {name: as_list(paths) for name, paths in given.items()}
    if not sets:
        raise ValueError("the mapping is empty: name held-out sets, as in `{new: a.txt, old: b.txt}`")
    for name, paths in sets.items():
        if isinstance(value, dict) and not (isinstance(name, str) and SET_NAME.fullmatch(name)):
            raise ValueError(f"the name `{name}` of a held-out set may have only letters, digits, `_`, `-` and `.`")
        is_list = isinstance(paths, list | tuple) and all(isinstance(path, str) for path in paths)
        if not is_list or (isinstance(value, dict) and not paths):
            raise ValueError("it should be files, or a mapping of names to files")
        for path in paths if isinstance(value, dict) else ():
            _check_path(path)
    _check_shares([path for paths in sets.values() for path in paths], is_alone=not isinstance(value, dict))
    return sets if isinstance(value, dict) else sets[""]


def _check_shares(texts: Sequence[str], *, is_alone: bool) -> None:
    """Refuse values of `data.eval` that are meant as a share of data.train and are none."""
    for share in filter(_LIKE_A_SHARE.fullmatch, texts):
        meant = "".join(share.replace(",", ".").split())
        if len(texts) > 1 or not is_alone:
            raise ValueError(f"a share of data.train such as `{meant}` has no name, and no files beside it")
        if not float(meant[:-1]):
            raise ValueError(f"`{share}` holds out no rows; leave data.eval out, or write e.g. `5%`")
        if share != meant:
            raise ValueError(f"`{share}` is no share of data.train; write `{meant}`")
        if share_of(share) >= 1:
            raise ValueError("it holds out all rows of data.train; write e.g. `5%`")


def share_of(held_out: object) -> Fraction:
    """The fraction of the training rows that `data.eval` holds out: 1/20 for `5%`, 0 where it names files."""
    text = held_out[0] if isinstance(held_out, list | tuple) and len(held_out) == 1 else held_out
    return Fraction(text[:-1]) / 100 if isinstance(text, str) and _SHARE.fullmatch(text) else Fraction(0)


def checked(parse: Callable[[str], object], *words: str) -> BeforeValidator:
    """Make a validator for texts: it accepts the texts `words`, and texts that `parse` reads without a ValueError."""

    def check(value: object) -> str:
        if value not in words:
            parse(str(value))
        return str(value)

    return BeforeValidator(check)


def _check_warmup(text: str) -> None:
    if "%" in text and warmup_steps(text, 100) > 100:
        raise ValueError(f"`{text}` is more than the run; write at most `100%`")
    warmup_steps(text, 1)


def _check_size(text: str) -> str:
    if parse_bytes(text, name="export.max_shard_size") < 1:
        raise ValueError(f"`{text}` is less than a byte; write e.g. `5GB`")
    return text


def _check_micro_batch(value: object) -> object:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError("it should be a whole number of at least 1, or `auto`")
    return value


MicroBatchSize = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(_check_micro_batch)]
PathText = Annotated[str, AfterValidator(_check_path)]
WeightedPaths = Annotated[tuple[PathText, ...] | dict[str, float], BeforeValidator(_as_weighted)]
HeldOutPaths = Annotated[tuple[PathText, ...] | dict[str, tuple[str, ...]], BeforeValidator(_as_sets)]
DurationText = Annotated[str, BeforeValidator(lambda text: str(Duration.parse(str(text))))]


def _check_length(text: object) -> str:
    if not re.search("step|epoch", str(text)):
        raise ValueError(f"`{text}` is no number of steps or epochs; write e.g. `100 steps` or `1 epoch`")
    return str(Duration.parse(str(text)))


InexactName = Literal[
    "quantized_weights", "quantized_gradients", "hierarchical_partition", "bf16_reduction", "zenflow", "superoffload"
]
InexactNames = Annotated[tuple[InexactName, ...], BeforeValidator(as_list)]

FolderText = Annotated[PathText, AfterValidator(_check_folder_name)]
SizeText = Annotated[str, AfterValidator(_check_size)]
TimeText = Annotated[str, checked(seconds_of)]
LengthText = Annotated[str, BeforeValidator(_check_length)]
EveryText = Annotated[str, checked(Interval.parse, "never")]
WarmupText = Annotated[str, checked(_check_warmup)]
