"""Reads the configuration file of another trainer, such as axolotl or TRL, and converts it to a run file. Here a `word`
is a key of the other trainer's file.
"""

import difflib
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Literal

import yaml

from ds_finetune.config.ineffective_keys import NoEffectError
from ds_finetune.config.invalid_keys import field_of, meant_key, section_of
from ds_finetune.config.objectives import OBJECTIVES, GrpoObjective, is_grpo, read_objective
from ds_finetune.config.other_programs import (
    HAPPENS,
    KEY_OF,
    MEANINGS,
    MEANT,
    NO_KEY,
    PER_16_ROWS,
    PROGRAMS,
    SAMPLING,
    TWICE_THE_RANK,
    Program,
    value_of,
)
from ds_finetune.config.run_file import SHORT_FORMS, one_line_yaml, parse_yaml, read_text, set_key
from ds_finetune.config.schema import RunConfig, validate_tree
from ds_finetune.errors import ConfigError

FILL_IN = "FILL_IN"
"""Placeholder in a converted run file for a value that the other trainer's file does not have."""
Outcome = Literal["taken", "default", "not available"]
_MERGED = "train"
"""Section of ms-swift's files for Ray whose keys are those of the top level."""
_SECTIONS = ("trl", "lr_scheduler_kwargs", "peft_config", "optim_config", "dist_config", "quant_config")
"""Sections of other trainers' files whose keys are converted like top-level keys."""
_LISTS = ("lora.modules_to_save", "log.trackers", "rollout.stop")
_ACCUMULATION = ("gradient_accumulation_steps", "gradient_accumulation", "accumulation_steps")
_BATCH = ("train.micro_batch_size", "train.global_batch_size")
_PLAIN_TYPES = ("completion", "pretrain")
_KNOWN_TYPES = ("chat_template", "sharegpt", *_PLAIN_TYPES)
_OFF: tuple[object, ...] = (None, "", False, 0, "none", "no", "false", "full", "steps", "disabled", [], {})
_COLUMNS = {"field": "text", "field_messages": "messages", "field_chosen": "chosen", "field_rejected": "rejected"}
"""Maps a key of a data set in an axolotl file to the key of `data.columns` that names the same column."""
_WIDTH = 60
_MISSPELT = 0.93
"""Least similarity (difflib's ratio, 0 to 1) at which an unknown key counts as a misspelling of a known one."""
_LENGTHS = ("train.for", "optim.warmup", "checkpoint.every", "eval.every")
"""Run-file keys whose value is a number with a unit, such as `100 steps`. Other trainers write only the number."""
_MISWRITTEN = re.compile(r"(?P<before>\d+),(?P<after>\d+)|(?P<factor>\d+(\.\d+)?)(?P<unit>[kKmM])|\d+(:\d+)+")
"""Pattern of texts such as `3,14`, `5k` and `3:30`, which a user means as numbers although YAML and JSON read them as
texts.
"""


class ConvertedRun:
    """A run file converted from another trainer's file, with the origin of each key that the run file has."""

    def __init__(self, program: Program, words: Mapping[str, object], ranks: int | None) -> None:
        self.program, self.ranks = program, ranks or 1
        self.given = dict(_flattened(words))
        self.words = {word: value for word, value in self.given.items() if not _not_known(word, value)}
        """Keys of the other file whose values are known; `given` also has those that a shell or a loader computes."""
        self.tree: dict[str, Any] = {"model": FILL_IN, "data": {"train": [FILL_IN]}, "output_dir": FILL_IN}
        self.origins: dict[str, str] = {}
        """Source of each run-file key's value: a key and value of the other file, or the other trainer's default."""
        self.outcomes: dict[str, tuple[Outcome, str]] = {}
        """Outcome of each key of the other file, with the run-file key that it set or the reason why it set none."""
        self.to_fill: dict[str, str] = {}
        """Run-file keys whose values the user has to write, each with the reason."""
        self._take_objective()
        self._leave_open(has_ranks=bool(ranks))
        for word, value in self.words.items():
            self._check_number(word, value)
        adapters = program.of_lora if self._take_adapters() else {}
        methods = (program.of_objective.get(name) for name in (self.method, self.objective.name))
        self.defaults = {**program.defaults, **adapters, **next(filter(None, methods), {})}
        self._take_rows()
        self._take_batch()
        for is_last in (False, True):
            # Some keys have an effect only once another key is set, so that a second pass tries the keys that the first
            # pass could not convert.
            for word in [word for word in self.words if word not in self.outcomes]:
                self._take_word(word, self.words[word], is_last=is_last)
        self._take_defaults()
        for key, note in program.notes.items():
            if key == "data.train" or self.origins.get(key, "").startswith("default of "):
                self.origins[key] = f"{self.origins.get(key, '')}; {note}"
        for key in ("model.path", "data.train", "output_dir"):
            if key not in self.origins:
                names = ", ".join(self._words_of(key))
                self.to_fill[key] = f"{names} is not converted" if names else f"the file of {program.name} names none"
        assert self.given.keys() <= self.outcomes.keys(), self.given.keys() - self.outcomes.keys()
        self.config = validate_tree(self.tree, {}, "the run file")

    def _leave_open(self, *, has_ranks: bool) -> None:
        hint = "the number of ranks is not known; give the number by --ranks"
        for word in [word for word in self.given if word not in self.words]:
            needs_ranks = word in _RANKS and not has_ranks
            self.outcomes[word] = "not available", _not_known(word, self.given[word]) + f", and {hint}" * needs_ranks
            if needs_ranks:
                key = "rollout.prompts_per_step" if is_grpo(self.objective) else "train.global_batch_size"
                self.to_fill[key] = f"1 rank is assumed: {hint}"

    def _check_number(self, word: str, value: object) -> None:
        key, match = self._key(word), _MISWRITTEN.fullmatch(value.strip()) if isinstance(value, str) else None
        path, section = section_of(RunConfig, key.split("."))
        field = field_of(section, path[-1])
        # A key of another objective has no field in this section; its value is taken to be a number.
        is_number = re.search(r"\b(int|float)\b", str(field.annotation)) if field else path[0] == "objective"
        if match is None or not (is_number or key in _LENGTHS):
            return
        before, after = match["before"], match["after"]
        number = "one number"
        if before:
            is_thousands = len(after) == 3 and before != "0"
            number = f"{before}.{after}" + f", or {before}{after} for thousands" * is_thousands
        elif match["unit"]:
            number = f"{float(match['factor']) * (1e3 if match['unit'] in 'kK' else 1e6):.0f}"
        raise ConfigError(f"`{word}` is `{value}`, which is not a number", hint=f"write {number}")

    def _take_defaults(self) -> None:
        asked = {self._key(word) for word, value in self.given.items() if not _is_off(value)}
        before = dict(self.outcomes)
        for word, value in self.defaults.items():
            if value is not None and self._key(word) not in {*asked, *self.origins, *_BATCH}:
                self._take_word(word, value, is_default=True)
                outcome, reason = self.outcomes.pop(word)
                if outcome == "not available":
                    before[f"{word}: {value}, default of {self.program.name}"] = outcome, reason
        self.outcomes = before
        if _entry(self.tree.get("rollout")).get("engine") == "vllm" and "rollout.address" not in self.origins:
            self.to_fill["rollout.address"] = "the address of a vLLM server, such as http://127.0.0.1:8000"

    def text(self, source: str) -> str:
        """Text of the run file. Comments name each key's origin, and keys of the other file that are not converted."""
        tree = self.config.model_dump(mode="json", by_alias=True, exclude_unset=True)
        origins = " ".join(self.origins.values())
        lines = [
            _comment(
                f"# Written by `ds-finetune init --from {source}` for {self.ranks} rank{'s' * (self.ranks > 1)} "
                f"({self.program.name})."
            ),
            "# docs/reference/other-trainers.md says how keys are converted.",
            *(_comment(f"# FILL IN {key}: {reason}") for key, reason in self.to_fill.items()),
            *self._lines(tree, ""),
            *(
                _comment(f"# {outcome}: {self.text_of(word)} ({reason})")
                for word, (outcome, reason) in sorted(self.outcomes.items(), key=lambda item: item[1][0])
                if outcome != "taken" or f"{word}:" not in origins
            ),
        ]
        return "\n".join([*lines, ""])

    def _lines(self, tree: Mapping[str, Any], above: str) -> Iterator[str]:
        indent = "  " * above.count(".")
        for name, value in tree.items():
            key = f"{above}{name}"
            is_short = key == "model" and value.keys() == {SHORT_FORMS[key]}
            origin = self.origins.get("model.path" if is_short else key)
            comment = _comment(f"  # {origin}") if origin else ""
            if name in ("model", "objective") and value.keys() == {SHORT_FORMS[name]}:
                value = value[SHORT_FORMS[name]]
            if isinstance(value, Mapping) and value and key != "data.columns":
                yield f"{indent}{name}:{comment}"
                yield from self._lines(value, f"{key}.")
            else:
                yield f"{indent}{name}: {one_line_yaml(value)}{comment}"

    def _take_objective(self) -> None:
        words = [word for word, value in self.words.items() if KEY_OF.get(word) == "objective" and value]
        word = next((word for word in words if str(self.words[word]).lower() != "causal_lm"), "")
        name = value_of(word, self.words[word], "objective") if word else "sft"
        name = str(name)
        loss = str(self.words.get("pref_loss") or self.words.get("loss_type"))
        if name == "dpo" and loss in ("orpo", "simpo"):
            name = loss
        if self.words.get("reward_model") is True:
            word, name = "reward_model", "reward"
        if name == "sft" and self._is_plain_text():
            word, name = "datasets", "pretrain"
        self.method = str(self.words.get(word) or name)
        self.tree["objective"] = yaml.safe_load(name) if name.startswith("{name: ") else name
        try:
            self.objective = read_objective(self.tree["objective"])
        except ConfigError as wrong:
            # A file of another trainer has no key `objective`, and its methods are not misspelt names of objectives.
            named = "the trainer of the command" if word == "trainer" else f"`{word}`"
            hint = re.sub(r"^did you mean .*?\? ", "", wrong.hint)
            raise ConfigError(f"{named} {wrong.message.partition(' ')[2]}", hint=hint) from None
        self.origins["objective"] = self.text_of(word)
        self.origins |= {
            f"objective.{key}": self.text_of(word) for key in _entry(self.tree["objective"]) if key != "name"
        }
        if not word and not self.program.names_objective:
            self.to_fill["objective"] = (
                f"a file of {self.program.name} does not say it, but its command does: sft is assumed"
            )
        if computed := [each for each in self.given if each not in self.words and KEY_OF.get(each) == "objective"]:
            self.to_fill["objective"] = f"{computed[0]} is not converted: {name} is assumed"
        if self.method == "gkd":
            self.to_fill["objective"] = "gkd samples answers and mixes two divergences; distill uses the forward one"
        for each in [*words, *([word] if word == "reward_model" else [])]:
            self.outcomes[each] = "taken", "objective"

    def _is_plain_text(self) -> bool:
        sets = self.given.get("datasets")
        kinds = [_entry(each).get("type") for each in sets] if isinstance(sets, list) else []
        return bool(self.given.get("pretraining_dataset")) or (
            bool(kinds) and all(kind in _PLAIN_TYPES for kind in kinds)
        )

    def _take_adapters(self) -> bool:
        given = {word: value for word, value in self.words.items() if KEY_OF.get(word) == "lora"}
        for word, value in given.items():
            if text := value_of(word, value, "lora"):
                self.outcomes[word] = "taken", "lora"
                self.tree["lora"] = {key: part for key, part in yaml.safe_load(text).items() if key != "rank"}
                self.origins["lora"] = self.text_of(word)
            else:
                outcome: Outcome = "default" if _is_off(value) else "not available"
                self.outcomes[word] = outcome, "adapters are those of LoRA; without `lora` all weights are trained"
        if self.program.trains_adapters and not any(KEY_OF.get(word) == "lora" for word in self.given):
            self.tree["lora"], self.origins["lora"] = {}, self.text_of()
        return "lora" in self.tree

    def _take_rows(self) -> None:
        parts = [word for word in ("dataset_name", "dataset_config", "dataset_train_split") if word in self.given]
        computed = [word for word in parts if word not in self.words]
        if computed:
            reason = f"rows are named with {computed[0]}, which is not known"
            self.outcomes |= {word: ("not available", reason) for word in parts if word in self.words}
        for word, value in self.words.items():
            key = KEY_OF.get(word)
            if word == "dataset_dir" or word in self.outcomes or not value or not isinstance(value, str | list):
                continue
            if key in ("data.train", "data.eval"):
                entries = value.split(",") if isinstance(value, str) else value
                self._take(key, [self._source(word, entry, is_only=len(entries) == 1) for entry in entries], word)
        for word in ("dataset_dir", "dataset_config", "dataset_train_split", "dataset_test_split"):
            if self.words.get(word):
                self.outcomes.setdefault(word, ("taken", "data.train and data.eval"))
        has_split = ("dataset_test_split" in self.words) == ("dataset_test_split" in self.given)
        is_known = "dataset_name" in self.words and not computed and has_split
        if is_known and self.words.get("eval_strategy") not in (None, "no", False):
            held_out = self._named_split("dataset_test_split", "test")
            self._take("data.eval", [held_out], origin=self.text_of("eval_strategy"))

    def _named_split(self, word: str, default: str) -> str:
        subset, split = self.words.get("dataset_config"), self.words.get(word, default)
        return ":".join(str(part) for part in (self.words["dataset_name"], subset, split) if part)

    def _source(self, word: str, entry: object, *, is_only: bool) -> str:
        if isinstance(entry, Mapping):
            return self._described_source(word, entry)
        if word == "dataset_name":
            return self._named_split("dataset_train_split", "train" if self.words.get("dataset_config") else "")
        name, _, count = re.sub(r"^(HF|MS)::", "", str(entry).strip()).partition("#")
        if count and is_only and KEY_OF.get(word) == "data.train" and not self.words.get("streaming"):
            self._take("data.rows", _as_number(count), origin=f"{word} {entry}: there a random sample")
        elif count:
            self.outcomes[f"{word} {entry}"] = "not available", f"all rows are used: write {count} of them to a file"
        if not Path(name).exists() and ("/" not in name or name.endswith((".yaml", ".yml"))):
            self.to_fill[f"`{name}` of data"] = f"only {self.program.name} knows this name; write the file or hub id"
        return name

    def _described_source(self, word: str, entry: Mapping[str, Any]) -> str:
        rest = {key: value for key, value in entry.items() if value not in _OFF}
        path, subset, split = (str(rest.pop(key, "")) for key in ("path", "name", "split"))
        files = rest.pop("data_files", None)
        columns = {_COLUMNS[key]: rest.pop(key) for key in _COLUMNS if key in rest}
        if renamed := {key: name for key, name in columns.items() if name not in (key, "conversations")}:
            self._take("data.columns", renamed, f"{word}.field")
        for key, value in rest.items():
            if key == "type" and value in _KNOWN_TYPES:
                continue
            reason = "rows are read by their columns; `ds-finetune data show` shows what they become"
            self.outcomes[f"{word}.{key}: {_short(value)}"] = "not available", reason
        if files and "/" not in path:
            return str(files[0] if isinstance(files, list) else files)
        return ":".join(part for part in (path, subset, split or (subset and "train")) if part)

    def _take_batch(self) -> None:
        mine = {word: self._key(word) for word, value in self.given.items() if value is not None}
        mine = {word: key for word, key in mine.items() if key in _BATCH}
        self.outcomes |= {word: ("taken", key) for word, key in mine.items() if word in self.words}
        totals = [w for w, key in mine.items() if key == "train.global_batch_size" and w not in _ACCUMULATION]
        micros = [word for word, key in mine.items() if key == "train.micro_batch_size"]
        micro = self.given[micros[0]] if micros else self.defaults["per_device_train_batch_size"]
        dp = max(1, self.ranks // math.prod(self._size(f"parallel.{axis}", 1) for axis in ("tp", "pp", "sp")))
        given = next((self.given[word] for word in _ACCUMULATION if self.given.get(word)), None)
        accumulation = given or self.defaults["gradient_accumulation_steps"]
        if isinstance(micro, int) and accumulation == PER_16_ROWS:
            accumulation = math.ceil(16 / max(micro, 1) / dp)
        rows, origin = self.given[totals[0]] if totals else None, self.text_of(*totals)
        if isinstance(rows, int):
            rows, accumulation = rows * (dp if totals == ["batch_size"] else 1), 1
        elif isinstance(micro, int) and isinstance(accumulation, int):
            rows, origin = (
                micro * accumulation * dp,
                f"{micro} of a forward x accumulation {accumulation} x {dp} data parallel ranks",
            )
        if not isinstance(rows, int) or not isinstance(accumulation, int):
            self.to_fill["train.global_batch_size"] = f"a forward has {micro} rows, accumulation is {accumulation}"
            self.outcomes |= {
                word: ("not available", "the rows of a step do not follow from it")
                for word in mine
                if word in self.words
            }
            return
        self._take("train.micro_batch_size", micro, origin=self.text_of(*micros))
        if not is_grpo(self.objective):
            self._take("train.global_batch_size", rows, origin=origin)
            return
        group = self._size("objective.group_size", 8)
        if rows % group:
            reason = f"a step has {rows} answers ({origin}), no groups of {group}; give the ranks with --ranks"
            self.to_fill["rollout.prompts_per_step"] = reason
        else:
            self._take("rollout.prompts_per_step", rows // group, origin=f"{origin} / {group} answers to a prompt")

    def _take_word(self, word: str, value: object, *, is_last: bool = True, is_default: bool = False) -> None:
        key, inner = self._key(word), word.rpartition(".")[2].lower()
        family = NO_KEY.get(f"{inner.partition('_')[0]}_*") if not key else None
        reason = self.program.absent.get(word) or NO_KEY.get(inner) or family
        outcome: Outcome = "default" if _is_off(value) or reason in HAPPENS else "not available"
        if value is None or value == "":
            self.outcomes[word] = "default", "it has no value"
        elif reason or not key or (isinstance(value, Mapping) and key not in _CONVERTERS):
            self.outcomes[word] = outcome, reason or self._unknown(inner)
        elif unused := self._unused(key):
            self.outcomes[word] = "default", unused
        elif (converted := self._value(word, value, key)) is None:
            meaning = f"; it may be {MEANINGS[key]}" if key in MEANINGS else ""
            reason = (
                f"`{key}` is not set by this value" if outcome == "default" else f"`{key}` keeps its default{meaning}"
            )
            self.outcomes.setdefault(word, (outcome, reason))
        else:
            origin = f"default of {self.program.name}" if is_default else self.text_of(word)
            self._take(key, converted, word, origin=origin, is_last=is_last)

    def _unknown(self, word: str) -> str:
        near = difflib.get_close_matches(word, [*KEY_OF, *NO_KEY], n=1, cutoff=_MISSPELT)
        guess = f"did you mean `{near[0]}`?" if near else f"the documentation of {self.program.name} says what it does"
        return f"this program does not know the key; {guess}"

    def _unused(self, key: str) -> str:
        section, _, name = key.partition(".")
        if section == "lora" and "lora" not in self.tree:
            return "all weights are trained"
        if section == "objective" and name not in type(self.objective).model_fields:
            return f"objective {self.objective.name} has no such key"
        return ""

    def _value(self, word: str, value: object, key: str) -> object:
        if key in _CONVERTERS:
            return _CONVERTERS[key](self, word, value)
        if isinstance(value, list) and key in _LISTS:
            return value
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        text = value_of(word if word in KEY_OF else word.rpartition(".")[2], value, key)
        return value if text == str(value) else text and yaml.safe_load(text)

    def _take(self, key: str, value: object, word: str = "", *, origin: str = "", is_last: bool = True) -> None:
        """Set run-file key `key` to `value`, which comes from `origin`, if that is valid and has an effect.

        Record the outcome of `word`, if given. Before the last pass (`is_last`), a key without an effect stays open.
        """
        tree, origin = deepcopy(self.tree), origin or self.text_of(word)
        set_key(tree, {}, key, value, source=self.program.name)
        try:
            config = validate_tree(tree, {}, self.program.name)
        except ConfigError as wrong:
            has_effect = not isinstance(wrong, NoEffectError)
            if word and (has_effect or is_last):
                is_default = not has_effect or _is_off(self.words.get(word))
                self.outcomes[word] = "default" if is_default else "not available", wrong.message.partition(": ")[2]
            return
        is_same = config == validate_tree(self.tree, {}, self.program.name)
        if word:
            is_taken = is_same or key not in self.origins
            self.outcomes[word] = ("taken", key) if is_taken else ("default", f"{key} is from {self.origins[key]}")
        if key not in self.origins and not (is_same and origin.startswith("default of ")):
            self.tree, self.origins[key] = tree, origin
        elif key in self.origins and is_same:
            self.origins[key] += f", {origin}"

    def _key(self, word: str) -> str:
        inner = word.rpartition(".")[2]
        section = GrpoObjective if is_grpo(self.objective) else RunConfig
        key = KEY_OF.get(word) if "." in word or word == "max_length" else None
        key = key or (meant_key(inner, section, RunConfig) if inner != "name" else None)
        return "model.path" if key == "model" else key or ""

    def _words_of(self, key: str) -> list[str]:
        return [word for word, value in self.given.items() if value is not None and self._key(word) == key]

    def _number(self, name: str, default: float) -> float:
        for words in (self.words, self.defaults):
            for word, value in words.items():
                if name in (word, self._key(word)) and isinstance(value, int | float) and not isinstance(value, bool):
                    return value
        return default

    def _size(self, name: str, default: int) -> int:
        return max(1, int(self._number(name, default)))

    def text_of(self, *words: str) -> str:
        """Keys of the other file, with their values, as a comment of the run file names them."""
        texts = (f"{word}: {_short(self.given[word])}" if word in self.given else word for word in words if word)
        return ", ".join(texts) or f"default of {self.program.name}"


def _flattened(words: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for word, value in words.items():
        if word in _SECTIONS and isinstance(value, str):
            with suppress(yaml.YAMLError):
                value = yaml.safe_load(value)
        if word in _SECTIONS and isinstance(value, Mapping):
            yield from ((f"{word}.{inner}", _as_number(part)) for inner, part in value.items())
        elif word == _MERGED and isinstance(value, Mapping):
            yield from ((str(inner), _as_number(part)) for inner, part in value.items())
        else:
            yield word, _as_number(value)


def _as_number(value: object) -> object:
    """Convert a text such as `1e-5` or `true` to the number or boolean that it spells; other values are returned."""
    if isinstance(value, str):
        with suppress(ValueError):
            number = int(value) if value.isdecimal() else float(value)
            return number if math.isfinite(number) else value
        return {"true": True, "false": False}.get(value.lower(), value)
    return value


def _comment(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _short(value: object) -> str:
    text = one_line_yaml(value)
    return text if len(text) < _WIDTH else f"{text[:_WIDTH]}..."


def _is_off(value: object) -> bool:
    return value in _OFF or (isinstance(value, int | float) and value < 0)


def _is_computed(value: object) -> bool:
    """Whether a value is or has an expression, such as `$LR`, `$((64 / N))`, `${oc.env:X}` or a command's output."""
    if isinstance(value, Mapping):
        # No shell reads a mapping of a YAML file, whose prompts may have backticks and prices.
        return bool(re.search(r"\$[a-zA-Z_{]", str(value)))
    if isinstance(value, list):
        return any(map(_is_computed, value))
    return isinstance(value, str) and bool(_COMPUTED.search(value))


def _not_known(word: str, value: object) -> str:
    """Why the value of a key cannot be read from the other file; empty if it can."""
    if _is_computed(value):
        return "the shell or a loader computes it, which is not done here"
    is_number = word not in _RANKS or value is None or str(value).isdecimal()
    return "" if is_number else "it is not a whole number"


def _entry(value: object) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _duration(self: ConvertedRun, word: str, value: object) -> object:
    if value_of(word, 1, "train.for") == "1 steps":
        return f"{value} steps" if not _is_off(value) else None
    for other in self._words_of("train.for"):
        if other != word and value_of(other, 1, "train.for") == "1 steps" and not _is_off(self.given[other]):
            self.outcomes[word] = "default", f"{other} counts"
            return None
    return f"{value} epochs"


def _row_length(self: ConvertedRun, word: str, value: object) -> object:
    """Value of `train.max_seq_len`. With GRPO, `value` is the length of prompts; the length of answers is added."""
    if is_grpo(self.objective) and isinstance(value, int):
        return value + self._size("rollout.max_new_tokens", 1)
    return value


def _betas(self: ConvertedRun, word: str, value: object) -> object:
    return value if isinstance(value, list) else [self._number("adam_beta1", 0.9), self._number("adam_beta2", 0.999)]


def _last_rate(self: ConvertedRun, word: str, value: object) -> object:
    if not isinstance(value, int | float):
        return None
    is_rate = word.rpartition(".")[2] in ("min_lr", "eta_min")
    return float(f"{value / (self._number('optim.lr', 1.0) or 1.0):.6g}") if is_rate else value


def _warmup(self: ConvertedRun, word: str, value: object) -> object:
    schedulers = [self.given[other] for other in self._words_of("optim.lr_scheduler")]
    if value and schedulers and schedulers[0] == "constant":
        self.outcomes[word] = "default", "the scheduler `constant` has no warm-up"
        return None
    return value_of(word, value, "optim.warmup")


def _stage(self: ConvertedRun, word: str, value: object) -> object:
    """Name of the shipped configuration, such as `zero2_offload`, for another trainer's DeepSpeed or FSDP setting."""
    text = str(value).lower()
    if word.startswith("fsdp") or "fsdp" in text:
        offload = "_offload" * ("offload_params': true" in text)
        return None if _is_off(value) else ("zero2" if "grad_op" in text else "zero3") + offload
    stage = re.search(r"z(?:ero)?(?:_stage)?\W*_?([0-3])", text)
    if stage is None:
        return None
    return f"zero{stage[1]}" + "_offload" * ("offload" in text and stage[1] in "23")


def _every(self: ConvertedRun, word: str, value: object) -> object:
    if word.endswith("s_per_epoch"):
        return f"{1 / value:g} epochs" if isinstance(value, int | float) and value > 0 else None
    if isinstance(value, float):
        return None
    return value_of(word, value, "eval.every")


def _targets(self: ConvertedRun, word: str, value: object) -> object:
    text = value_of(word.rpartition(".")[2], value, "lora.target_modules")
    if text is None and not _is_off(value) and not isinstance(value, bool):
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    return text


def _clip_low(self: ConvertedRun, word: str, value: object) -> object:
    if not self._words_of("objective.clip_high"):
        self._take("objective.clip_high", value, origin=f"{self.text_of(word)}, for both sides")
    return value


def _rows(self: ConvertedRun, word: str, value: object) -> object:
    reason = "data.rows is not possible with data.streaming" if self.words.get("streaming") else ""
    if len(self.tree["data"]["train"]) > 1:
        reason = "it counts rows of each data set; data.rows counts those of all, from the first set on"
    if reason:
        self.outcomes[word] = "not available", reason
        return None
    return value_of(word, value, "data.rows")


_CONVERTERS: Mapping[str, Callable[[ConvertedRun, str, object], object]] = {
    "data.rows": _rows,
    "train.for": _duration,
    "train.max_seq_len": _row_length,
    "optim.betas": _betas,
    "optim.min_lr_ratio": _last_rate,
    "optim.warmup": _warmup,
    "deepspeed": _stage,
    "eval.every": _every,
    "checkpoint.every": _every,
    "lora.target_modules": _targets,
    "lora.alpha": lambda self, _, value: 2 * self._number("lora.rank", 8) if value == TWICE_THE_RANK else value,
    "objective.clip_low": _clip_low,
    **dict.fromkeys(("output_dir", "data.cache_dir"), lambda self, _, value: os.path.expanduser(str(value))),  # noqa: PTH111 - keeps `./`
    **dict.fromkeys(("data.train", "rollout.prompts_per_step"), lambda self, word, value: None),
    "rewards": lambda self, word, value: self.to_fill.update(rewards=f"{word} is {value}"),
}
"""Maps a run-file key to the function that computes its value from the other trainer's file. It lists keys whose value
depends on several keys of that file or needs a calculation.
"""


_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(\S*)\s*$", re.MULTILINE)
_ARITHMETIC = re.compile(r"\$\(\(?\s*(?:expr\s+)?(\d+(?:\s*[*/]\s*\d+)+)\s*\)?\)")
"""Pattern of products and quotients in a shell script, such as `$(expr 16 / 4)`."""
_COMPUTED = re.compile(r"\$[\w({]|`")
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
    assigned = {*_ASSIGNED.findall(lines)}
    names = [name for name, _ in assigned]
    # A variable that has several values, e.g. those of the branches of an `if`, is left as it is.
    values = {name: value for name, value in assigned if names.count(name) == 1}
    lines = _ARITHMETIC.sub(_result, Template(re.sub(r"\\\s*(\n|$)", " ", lines)).safe_substitute(values))
    commands = [
        (program, rf"^(?P<before>.*?)[\"']?(?:https?://\S*?)?(?:{program.command})[\"']?") for program in PROGRAMS
    ]
    commands_found = [
        (program, match) for program, command in commands for match in re.finditer(command, lines, re.MULTILINE)
    ]
    if len(commands_found) != 1:
        raise ConfigError(
            f"`{path}` has {len(commands_found)} training commands of known trainers instead of one",
            hint="keep one of them in the file" if commands_found else f"give {_ACCEPTED}",
        )
    program, match = commands_found[0]
    options, files, computed = _options(lines[match.end() :].partition("\n")[0])
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
            raise ConfigError(f"`{path}` names `{name}`, which is not a file with keys", hint="correct the path")
        words = tree
    words |= {key: before[key] for key in ("config_file",) if key in before} | options
    trainer = next(filter(None, match.groups()[1:]), "")
    objectives = (str(value).lower() for word, value in words.items() if value and KEY_OF.get(word) == "objective")
    if trainer and not {*objectives} - {"causal_lm"}:
        words["trainer"] = _objective_of(trainer)
    given = {key: str(before[key]) for key in _RANKS if key in before}
    words |= {computed: computed} if computed else {}
    words |= {key: number for key, number in given.items() if _not_known(key, number)}
    is_known = given and not any(_not_known(key, number) for key, number in given.items())
    return OtherFile(program, words, math.prod(map(int, given.values())) if is_known else None)


def _result(product: re.Match[str]) -> str:
    value, *factors = re.findall(r"[*/]?\s*\d+", product[1])
    result = int(value)
    for factor in factors:
        number = int(factor[1:])
        if factor[0] == "/" and not number:
            return product[0]
        result = result * number if factor[0] == "*" else result // number
    return str(result)


def _objective_of(trainer: str) -> str:
    """Objective named by a command or script such as `sft_gemma3.py`; `swift rlhf` trains DPO by default."""
    parts = trainer.split("_")
    names = ("_".join(parts[:count]) for count in range(len(parts), 0, -1))
    return "dpo" if trainer == "rlhf" else next((n for n in names if n in {*OBJECTIVES, *MEANT, *SAMPLING}), trainer)


def _options(text: str, *, may_repeat: bool = False) -> tuple[dict[str, object], list[str], str]:
    """Parse a shell command: its options and variable assignments by name, the YAML or JSON files before them, and the
    expressions that the shell computes which are not the value of an option.

    ConfigError if an option is given twice, unless it `may_repeat`, as options of `mpirun` do.
    """
    options, files, computed = dict[str, list[str]](), list[str](), list[str]()
    values, key = computed, ""
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
        if token in ("$@", "$*"):
            continue
        if token.startswith("--") or (equals and name.isidentifier()):
            values = [value] if equals else []
            key = name.removeprefix("--").replace("-", "_")
            if token.startswith("--") and key in options and not may_repeat:
                raise ConfigError(f"the training command gives `{name}` twice", hint=f"keep one `{name}`")
            options[key] = values
        elif not options and token.endswith((".yaml", ".yml", ".json")):
            files.append(token)
        elif options and not (len(values) == 1 and _is_computed(token) and not _takes_several(key)):
            values.append(token)
        elif _is_computed(token):
            # The words up to the next option may belong to the expression: `$(seq 1 2)` is three.
            values = computed
            values.append(token)
    return {name: _value(values) for name, values in options.items()}, files, " ".join(computed)


def _takes_several(word: str) -> bool:
    is_list = KEY_OF.get(word) in (*_LISTS, "data.train", "data.eval") and word != "dataset_name"
    return is_list or word.endswith("target_modules")


def _value(values: list[str]) -> object:
    return (values[0] if len(values) == 1 else values) if values else True
