"""How prompts are rendered and which ids end an answer: the same while a model is trained, in its export, and in every
program that reads the export.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.config.units import MIB
from ds_finetune.data.messages import Conversation, read_conversation
from ds_finetune.data.record_layouts import Completion, Sample
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings
from ds_finetune.errors import ConfigError, DataError

GENERATION = "generation_config.json"
_USER, _ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALLS = [
    {"type": "function", "id": f"abcdefgh{number}", "function": {"name": "f", "arguments": {"a": number}}}
    for number in range(2)
]
"""Tool calls whose ids have nine characters, as Mistral's templates need."""


def template_settings(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> TemplateSettings:
    """How the data section has rows rendered; ConfigError where its template cannot be read."""
    template = _chat_template(config, tokenizer)
    return TemplateSettings(template, config.train_on, config.reasoning, config.control_tokens, config.separator)


def _chat_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    if config.template == "plain":
        return None
    if config.template == "auto":
        template = tokenizer.chat_template
        return template["default"] if isinstance(template, dict) else template
    try:
        with Path(config.template).open(encoding="utf-8") as file:
            text = file.read(MIB + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"data.template `{config.template}` does not exist", hint="use auto, plain, or the path of a Jinja file"
        ) from None
    except (OSError, UnicodeDecodeError) as unreadable:
        raise ConfigError(
            f"data.template `{config.template}` cannot be read: {unreadable}", hint="name a Jinja file in UTF-8"
        ) from None
    if len(text) > MIB:
        raise ConfigError(f"data.template `{config.template}` has more than 1 MiB", hint="name a Jinja file")
    return text


def trained_ends(tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings) -> tuple[int, ...]:
    """Ids of the special tokens that rows teach the model to end an answer with: an answer in text, and tool calls."""
    settings = replace(settings, train_on="last_assistant", reasoning="keep")
    tokeniser = SampleTokeniser(tokenizer, settings)
    if settings.chat_template is None:
        return _end_of(tokeniser, tokenizer, Completion("x", "y", Conversation(()))) or ()
    # A token that also stands between two calls ends no answer. Some templates refuse two.
    calls = (
        read_conversation([_USER, {"role": "assistant", "content": "", "tool_calls": _CALLS[:most]}], [_TOOL], "", "")
        for most in (2, 1)
    )
    ends = (_end_of(tokeniser, tokenizer, sample) for sample in calls)
    of_calls = next((end for end in ends if end is not None), ())
    of_text = _end_of(tokeniser, tokenizer, Conversation((_USER, _ANSWER))) or ()
    return tuple(dict.fromkeys((*of_text, *of_calls)))


def _end_of(tokeniser: SampleTokeniser, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> tuple[int, ...] | None:
    """The last supervised id, where it is a special token that occurs once in the answer; None where the sample is
    refused or dropped.
    """
    try:
        (row,) = tokeniser.tokenise([("", sample)])
    except DataError:
        return None
    answer = [number for number, is_supervised in zip(row.ids, row.mask, strict=True) if is_supervised]
    if not answer:
        return None
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    is_end = answer[-1] in {*special, tokenizer.eos_token_id} and answer.count(answer[-1]) == 1
    return (answer[-1],) if is_end else ()


def read_generation(folder: Path) -> dict[str, Any]:
    """The generation_config.json of a folder; empty where there is none, DataError where it is not JSON."""
    file = folder / GENERATION
    try:
        tree = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as broken:
        raise DataError(f"{file} is not JSON: {broken}", hint="correct it, or remove it") from None
    return tree if isinstance(tree, dict) else {}


def end_ids(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, trained: Iterable[int] = ()
) -> list[int]:
    """Ids that end an answer of the model in `folder`: those that it is trained to end with, those of its
    generation_config.json, or of `config` where that names none, and the tokenizer's end of sequence.
    """
    given = read_generation(folder).get("eos_token_id")
    given = config.get_text_config().eos_token_id if given is None else given
    ids = (*trained, *(given if isinstance(given, list) else [given]), tokenizer.eos_token_id)
    return list(dict.fromkeys(int(number) for number in ids if number is not None))


def served_generation(folder: Path, config: PretrainedConfig, ends: Sequence[int]) -> dict[str, str]:
    """The generation_config.json of an export of the model in `folder`, as text by its name, where that of `folder`
    does not name just `ends`; empty where it does.
    """
    tree, config = read_generation(folder), config.get_text_config()
    given = tree.get("eos_token_id", config.eos_token_id)
    if not ends or set(given if isinstance(given, list) else [given]) == set(ends):
        return {}
    # transformers would take a file with this key for one that repeats config.json.
    tree.pop("_from_model_config", None)
    ids = {} if tree else {key: getattr(config, key, None) for key in ("bos_token_id", "pad_token_id")}
    tree = {key: number for key, number in ids.items() if number is not None} | tree
    return {GENERATION: json.dumps({**tree, "eos_token_id": [*ends] if ends[1:] else ends[0]}, indent=2) + "\n"}
