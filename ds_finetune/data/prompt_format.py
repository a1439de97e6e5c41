"""Defines how prompts are written and which token ids end an answer, so that exports do both as in training."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.config.objectives import OBJECTIVES, BosRule
from ds_finetune.config.run_file import kind_of_value
from ds_finetune.config.sections import DataConfig
from ds_finetune.config.units import MIB
from ds_finetune.data.chat_template import TemplateLimits
from ds_finetune.data.documents import Counts
from ds_finetune.data.messages import Conversation, read_conversation
from ds_finetune.data.prompts import Prompt
from ds_finetune.data.record_layouts import (
    ALPACA_PROMPT,
    ALPACA_PROMPT_WITH_INPUT,
    Completion,
    PlainText,
    Sample,
    read_alpaca,
)
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.sample_tokens import SampleTokeniser, TemplateSettings
from ds_finetune.errors import ConfigError, DataError

GENERATION = "generation_config.json"
_USER, _ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
_CALLS = [
    {"type": "function", "id": f"abcdefgh{number}", "function": {"name": "f", "arguments": {"a": number}}}
    for number in range(2)
]
"""Tool calls that test a chat template; their ids have nine characters, which Mistral's templates require."""
TEMPLATES = Path(__file__).parent / "templates"
"""Folder of the chat templates that data.template may name. Each renders like the published template of this name."""
_MARK = re.compile(r"\{# ds_finetune: (\{.*?\}) #\}")
_TEMPLATE = Template(
    "{# ds_finetune: $mark #}$begin{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'user' %}{{ $prompt }}"
    "{% elif message['role'] == 'assistant' %}{{ content + eos_token }}"
    "{% else %}{{ content + '\\n\\n' }}{% endif %}{% endfor %}"
)
_INTROS = ALPACA_PROMPT_WITH_INPUT, ALPACA_PROMPT
_INSTRUCTION, _INPUT, _RESPONSE = "### Instruction:\n", "\n\n### Input:\n", "\n\n### Response:\n"
_FORMS = {
    "alpaca": "Alpaca's layout",
    "separator": "completions behind a separator",
    "joined": "completions that begin with white space",
}


@dataclass(frozen=True)
class PlainFormat:
    """Format of the prompts of completions that are trained without a chat template."""

    form: str
    """Form of a completion's prompt: `alpaca`, `separator` or `joined` (see `Tokens.form`)."""
    separator: str
    """Text put between a prompt and its completion if neither has white space there."""

    @classmethod
    def of(cls, template: object) -> "PlainFormat | None":
        """Read the prompt format from a chat template that `PlainFormat.template` wrote; None for other templates."""
        match = _MARK.match(template) if isinstance(template, str) else None
        try:
            return cls(**json.loads(match[1])) if match else None
        except (ValueError, TypeError):
            return None

    def sample(self, text: str) -> Completion:
        """Make a prompt of this format from a user's text."""
        if self.form == "alpaca":
            return read_alpaca({"instruction": text, "output": ""}, "")
        messages = Conversation(({"role": "user", "content": text},))
        return Completion(text, "", messages, is_joined=self.form == "joined")

    def template(self, *, has_bos: bool, has_space: bool = False) -> str:
        """Make a chat template that writes a user's text as in training, and ends an answer with the end-of-sequence
        token.

        The template begins with a comment that records this format. It accepts every role, since servers render sample
        dialogues with it. With `has_space`, a space follows BOS, for tokenizers that put one before a text but not
        after BOS.
        """
        separator = "" if self.form == "joined" else self.separator
        prompt = f"content + ('' if content[-1:].strip() != content[-1:] else {_quoted(separator)})"
        if self.form == "alpaca":
            with_input, without = (f"{_quoted(intro)} + {_quoted(_INSTRUCTION)}" for intro in _INTROS)
            prompt = f"({with_input} if {_quoted(_INPUT)} in content else {without}) + content + {_quoted(_RESPONSE)}"
        begin = "{{ bos_token }}" if has_bos else ""
        if has_space:
            begin += "{{ ' ' }}" if self.form == "alpaca" else "{{ '' if messages[0]['content'][:1] == ' ' else ' ' }}"
        return _TEMPLATE.substitute(
            # In the template, this format is recorded in a Jinja comment, which the characters `#}` would end.
            mark=json.dumps(asdict(self)).replace("#", "\\u0023"),
            begin=begin,
            prompt=prompt,
        )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def template_settings(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> TemplateSettings:
    """Chat template and related settings from the data section; ConfigError where the template cannot be read.

    With data.template `auto`, a model already trained on completions without a chat template keeps its prompt format.
    """
    template, separator = _chat_template(config, tokenizer), config.separator
    plain = PlainFormat.of(_named(tokenizer.chat_template, "default"))
    if plain is not None and config.template in ("auto", "plain"):
        template = None
        separator = separator if "separator" in config.model_fields_set else plain.separator
    tool_template = _named(tokenizer.chat_template, "tool_use") if config.template == "auto" and template else ""
    how = (config.train_on, config.reasoning, config.control_tokens, separator)
    return TemplateSettings(template, *how, tool_template)


@dataclass(frozen=True)
class PromptFormat:
    """The format of prompts and answers that a model is trained on, which its exports repeat."""

    settings: TemplateSettings
    template: str = ""
    """Chat template that exports write; empty if they keep the tokenizer's own template."""
    ends: tuple[int, ...] = ()
    """Ids of the special tokens that end answers in the training rows."""
    bos: BosRule = "auto"
    notes: tuple[str, ...] = ()

    @classmethod
    def of_run(
        cls, config: DataConfig, kind: RowKind, counts: Counts, tokenizer: PreTrainedTokenizerBase
    ) -> "PromptFormat":
        """Prompt format of a run's training rows. Exports get data.template. If completions were trained without a
        template, exports get one that writes prompts as in training.
        """
        settings, is_scorer = template_settings(config, tokenizer), OBJECTIVES[kind.objective].head == "scores"
        ends = () if is_scorer or kind.name == "text" else trained_ends(tokenizer, settings)
        template, notes = "" if config.template == "auto" else settings.chat_template or "", list[str]()
        if settings.chat_template is None and not is_scorer and (rows := counts.forms.entries):
            form, *others = sorted(rows, key=lambda name: -rows[name][0])
            plain = PlainFormat(form, settings.separator)
            begin = SampleTokeniser(tokenizer, settings).begin
            ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("x", f"{tokenizer.bos_token}x")]
            template = plain.template(has_bos=bool(begin), has_space=bool(begin) and ids[1] != [*begin, *ids[0]])
            rest = ", ".join(f"{rows[other][0]:,} rows of {_FORMS[other]}" for other in others)
            line = f"the export's chat template writes prompts of {_FORMS[form]}, and not those of {rest}"
            notes += [line] if rest else []
        return cls(settings, template, ends, kind.bos, tuple(notes))

    @classmethod
    def of_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> "PromptFormat":
        """Prompt format of a model that is exported without a run, from its tokenizer."""
        default, for_tools = (_named(tokenizer.chat_template, name) for name in ("default", "tool_use"))
        is_plain = PlainFormat.of(default) is not None
        settings = TemplateSettings(None if is_plain else default or None, "assistant", "keep", tool_template=for_tools)
        return cls(settings, default if is_plain else "")

    def text_ids(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Token ids of a plain text as in training, after the BOS token if texts begin with one."""
        tokeniser = SampleTokeniser(tokenizer, self.settings, bos=self.bos, has_eos=False)
        return tokeniser.tokenise([("", PlainText(text))])[0].ids

    def chat_ids(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Token ids of a user's text as a training prompt, up to the answer. Empty if there is no chat template, or if
        the template refuses the text or writes the date.
        """
        plain = PlainFormat.of(self.template)
        template = self.template or self.settings.chat_template
        # A chat template that writes the date gives other ids on another day, so its ids cannot be compared.
        if not template or "strftime_now" in template:
            return []
        sample = plain.sample(text) if plain else Conversation(({"role": "user", "content": text},))
        settings = replace(self.settings, separator=plain.separator if plain else "")
        try:
            return SampleTokeniser(tokenizer, settings).tokenise([("", Prompt(sample))])[0].ids
        except DataError:
            return []


def _named(given: Any, name: str) -> str:  # noqa: ANN401 - of transformers
    return str((given if isinstance(given, dict) else {"default": given}).get(name) or "")


def _chat_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    if config.template == "plain":
        return None
    if config.template == "auto":
        given = tokenizer.chat_template
        if isinstance(given, dict) and "default" not in given:
            raise ConfigError(
                f"the tokenizer has the chat templates {', '.join(given)} and no `default`",
                hint="name a Jinja file with the right one as data.template",
            )
        return _named(given, "default") or None
    named = {file.stem: file for file in TEMPLATES.glob("*.jinja")}
    if config.template in named:
        return _shipped_template(named[config.template], tokenizer)
    try:
        with Path(config.template).open(encoding="utf-8-sig") as file:
            text = file.read(MIB + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"data.template `{config.template}` does not exist",
            hint=f"use auto (the tokenizer's own), plain (none), {', '.join(sorted(named))}, or name a Jinja file",
        ) from None
    except (OSError, UnicodeDecodeError) as unreadable:
        raise ConfigError(
            f"data.template `{config.template}` cannot be read: {unreadable}", hint="name a Jinja file in UTF-8"
        ) from None
    if len(text) > MIB:
        raise ConfigError(f"data.template `{config.template}` has more than 1 MiB", hint="name a Jinja file")
    if stray := next((character for character in "\0\ufeff\ufffd" if character in text), ""):
        raise ConfigError(
            f"data.template `{config.template}` contains U+{ord(stray):04X}, which it would write into prompts",
            hint="remove the character, which a wrong conversion of the file's encoding leaves behind",
        )
    return text


def _shipped_template(file: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """Read a template of this package; ConfigError if a user's file has its name, or the tokenizer lacks its tokens."""
    name, text = file.stem, file.read_text(encoding="utf-8")
    if Path(name).exists():
        raise ConfigError(
            f"data.template `{name}` names both a template of this program and a file of the working directory",
            hint=f"write ./{name} for the file, or rename it",
        )
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in dict.fromkeys(re.findall(r"<\|\w+\|>", text)) if token not in vocabulary]
    if missing:
        raise ConfigError(
            f"data.template `{name}` writes {', '.join(missing)}, which the tokenizer does not have as tokens",
            hint="add them to a copy of the tokenizer as special tokens, name it as model.tokenizer and set "
            "model.resize_vocabulary: true; alpaca and mistral need no new tokens",
        )
    return text


def served_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A user's text as a server sends it to the model: in its chat template, or unchanged without one."""
    if not tokenizer.chat_template:
        return text
    messages = [{"role": "user", "content": text}]
    with TemplateLimits(str(tokenizer.chat_template)):
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def trained_ends(tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings) -> tuple[int, ...]:
    """Ids of the special tokens that end an answer in training rows, for answers with text and with tool calls."""
    settings = replace(settings, train_on="last_assistant", reasoning="keep")
    tokeniser = SampleTokeniser(tokenizer, settings)
    if settings.chat_template is None:
        return _end_of(tokeniser, tokenizer, Completion("x", "y", Conversation(()))) or ()
    # Two tool calls are tried first, because a token that also separates calls does not end an answer. A single call
    # is tried if the template refuses two.
    calls = (
        read_conversation([_USER, {"role": "assistant", "content": "", "tool_calls": _CALLS[:most]}], [_TOOL], "", "")
        for most in (2, 1)
    )
    ends = (_end_of(tokeniser, tokenizer, sample) for sample in calls)
    of_calls = next((end for end in ends if end is not None), ())
    of_text = _end_of(tokeniser, tokenizer, Conversation((_USER, _ANSWER))) or ()
    return tuple(dict.fromkeys((*of_text, *of_calls)))


def _end_of(tokeniser: SampleTokeniser, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> tuple[int, ...] | None:
    """End token of a sample's answer: its last supervised id. Empty if that is no special token or occurs more than
    once; None if the sample is refused or dropped.
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
    """Read generation_config.json in a model folder; empty if the file is missing. DataError if it is not a JSON
    object, or if its `eos_token_id` is not an id or list of ids.
    """
    file, hint = folder / GENERATION, "correct the file, or remove it"
    try:
        tree = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as broken:
        raise DataError(f"{file} is not JSON: {broken}", hint=hint) from None
    if not isinstance(tree, dict):
        raise DataError(f"{file} holds {kind_of_value(tree)}, not an object", hint=hint)
    ends = tree.get("eos_token_id")
    if ends is not None and not all(type(each) is int for each in (ends if isinstance(ends, list) else [ends])):
        raise DataError(f"{file}: eos_token_id is {ends!r:.60}, not a token id or a list of them", hint=hint)
    return tree


def end_ids(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, trained: Iterable[int] = ()
) -> list[int]:
    """Ids of the tokens that end an answer of the model in `folder`: those in `trained`, those in
    generation_config.json (or else in `config`), and the tokenizer's eos token.
    """
    given = read_generation(folder).get("eos_token_id")
    given = config.get_text_config().eos_token_id if given is None else given
    ids = (*trained, *(given if isinstance(given, list) else [given]), tokenizer.eos_token_id)
    return list(dict.fromkeys(int(number) for number in ids if number is not None))


def served_generation(folder: Path, config: PretrainedConfig, ends: Sequence[int]) -> dict[str, str]:
    """An export's generation_config.json as {file name: text}; empty if the model's file has the end tokens."""
    tree, config = read_generation(folder), config.get_text_config()
    given = tree.get("eos_token_id", config.eos_token_id)
    if not ends or set(given if isinstance(given, list) else [given]) == set(ends):
        return {}
    # Without `_from_model_config`, transformers does not treat generation_config.json as a copy of config.json.
    tree.pop("_from_model_config", None)
    ids = {} if tree else {key: getattr(config, key, None) for key in ("bos_token_id", "pad_token_id")}
    tree = {key: number for key, number in ids.items() if number is not None} | tree
    return {GENERATION: json.dumps({**tree, "eos_token_id": [*ends] if ends[1:] else ends[0]}, indent=2) + "\n"}


def prompt_lines(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Lines of a model card about prompts: how they are written, what begins a text, and what ends an answer."""
    given = tokenizer.chat_template
    plain, names = PlainFormat.of(given), f" ({', '.join(given)})" if isinstance(given, dict) else ""
    if plain is None:
        yield f"Prompts: the tokenizer's chat template{names}." if given else "Prompts: texts as they are."
    else:
        yield (
            "Prompts: completions of single prompts were trained. The chat template writes a user's TEXT as they were, "
            f"`{served_prompt(tokenizer, 'TEXT')!r}`. System texts and earlier turns were not trained."
        )
    if plain is not None and plain.form == "alpaca":
        yield f"Inputs: an input stands behind its instruction after `{_INPUT!r}`."
    ids = tokenizer("x")["input_ids"]
    if ids[:1] == [tokenizer.bos_token_id]:
        yield (
            f"Beginnings: the tokenizer begins a text with `{tokenizer.bos_token}`; a chat template writes its own, "
            "and what it writes is tokenised without special tokens. ONNX Runtime GenAI begins a text so after "
            '`tokenizer.update_options(add_special_tokens="true")`.'
        )
    else:
        yield "Beginnings: the tokenizer adds no token before a text."
    ends = read_generation(folder).get("eos_token_id", tokenizer.eos_token_id)
    texts = tokenizer.convert_ids_to_tokens(ends if isinstance(ends, list) else [ends])
    yield f"Ends: an answer ends at {', '.join(f'`{text}`' for text in texts)}."
    normalizer = tokenizer.backend_tokenizer.normalizer
    if normalizer is not None and "\u00e9" in normalizer.normalize_str("e\u0301"):
        yield (
            "Accents: transformers composes characters (NFC), and llama.cpp and ONNX Runtime GenAI do not: send them "
            "composed texts."
        )
