"""Writes a tokenizer to a GGUF file as llama.cpp reads it: tokens, types, scores or merges, special ids, chat template.

llama.cpp's server does not start if its template engine does not support the chat template.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import gguf
from gguf import TokenType as Type
from jinja2 import Environment, TemplateSyntaxError, nodes
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.data.prompt_format import PlainFormat, end_ids
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ExportError
from ds_finetune.export.consumer_tokens import compare_tokens, is_sentencepiece, probe_chats

_PROBE = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636‍\U0001f32b️ (multiple emojis "
    "concatenated) ✅ \U0001f999\U0001f999 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 "
    "កាន់តែពិសេសអាច\U0001f601 ?我想在apple工作1314151天～ ------======= нещо на Български "  # noqa: RUF001
    "''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D "
    "you like some tea? We'Ve a'lL"
)
"""Text by whose token ids llama.cpp's converter recognises a tokenizer (conversion/base.py, get_vocab_base_pre)."""
_SPLITTERS = {
    "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",
    "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d": "smaug-bpe",
    "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754": "deepseek-llm",
    "347715f544604f9118bb75ed199f68779f423cabb20db6de6f31b908d04d7821": "deepseek-coder",
    "877081d19cf6996e2c4ff0e1236341e9b7bde288f5311a56a937f0afbbb3aeb5": "deepseek-v3",
    "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",
    "81212dc7cdb7e0c1074ca62c5aeab0d43c9f52b8a737be7b12a777c953027890": "kimi-k2",
    "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",
    "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c": "qwen2",
    "ccc2ef013c104be7bae2965776d611e1d7a8a2a9c547dd93a682c9a9fc80352e": "gpt-4o",
    "a1336059768a55c99a734006ffb02203cd450fed003e9a71886c88acf24fdbc2": "glm4",
    "9ca2dd618e8afaf09731a7cf6e2105b373ba6a1821559f258b272fe83e6eb902": "glm4",
    "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e": "tekken",
    "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",
    "9d032fcbd5501f4a38150912590928bfb36091efb5df11b8e2124b0390e3fb1e": "falcon3",
    "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454": "gpt-2",
}
"""Names of llama.cpp's rules for splitting text into words, by the sha256 of the ids that a tokenizer gives for
`_PROBE`. The table has the tokenizers of the supported model families, from llama.cpp's converter.
"""


def splitting(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Name of llama.cpp's rules that split text as `tokenizer` does; None for SentencePiece's BPE with byte fallback,
    which needs no rules. ExportError if llama.cpp has no rules for the tokenizer.
    """
    if is_sentencepiece(tokenizer):
        return None
    ids = [tokenizer(_PROBE, add_special_tokens=special)["input_ids"] for special in (True, False)]
    # Some ids in `_SPLITTERS` begin with BOS. An export may lack BOS, because transformers 5.23 loses `add_bos_token`.
    ids.append([tokenizer.bos_token_id, *ids[-1]])
    sums = [sha256(str(each).encode()).hexdigest() for each in ids]
    for each in sums:
        if each in _SPLITTERS:
            return _SPLITTERS[each]
    model = type(tokenizer.backend_tokenizer.model).__name__
    kinds = f"{model} after {type(tokenizer.backend_tokenizer.pre_tokenizer).__name__}"
    raise ExportError(
        f"no rules of llama.cpp are known to split text as the tokenizer `{tokenizer.name_or_path}` does ({kinds}; "
        f"sha256 of its token ids for llama.cpp's probe text: {sums[0]})",
        hint="use --format safetensors. GGUF supports SentencePiece's BPE with byte fallback, and the rules "
        + ", ".join(dict.fromkeys(_SPLITTERS.values())),
    )


def add_tokenizer(
    writer: gguf.GGUFWriter, folder: Path, config: PretrainedConfig, source: Path
) -> tuple[PreTrainedTokenizerBase, list[str]]:
    """Write the tokenizer of `folder`, the export of `source`, to the GGUF `writer`. Returns the tokenizer with the
    GGUF's chat template, and notes for the user. `config` is the model's configuration. Messages name `source`.

    DataError if the folder has no tokenizer. ExportError if the tokenizer has more tokens than the model, or if
    `choose_space_prefix` refuses it.
    """
    tokenizer, vocab_size = load_tokenizer(str(folder)), int(config.vocab_size)
    tokenizer.name_or_path = str(source)
    adds_space, note = choose_space_prefix(tokenizer)
    rules, tree = splitting(tokenizer), json.loads(tokenizer.backend_tokenizer.to_str())
    template = tokenizer.chat_template
    if (plain := PlainFormat.of(template)) is not None:
        # llama.cpp itself adds a space after BOS, so the chat template must not.
        tokenizer.chat_template = plain.template(has_bos="{{ bos_token" in template)
    core, added = tree["model"], {token["id"]: token for token in tree["added_tokens"]}
    texts = {number: text for text, number in core["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    if max(texts) >= vocab_size:
        raise ExportError(
            f"the tokenizer of `{source}` has a token id {max(texts)}, and the model has only {vocab_size} tokens",
            hint="replace the tokenizer files by those that belong to the model",
        )
    writer.add_tokenizer_model("gpt2" if rules else "llama")
    writer.add_tokenizer_pre(rules or "default")
    if rules:
        # llama.cpp's list has a space between the two texts of a merge, so a space within a text is written as Ġ.
        writer.add_token_merges([" ".join(part.replace(" ", "Ġ") for part in pair) for pair in core["merges"]])
    else:
        # llama.cpp merges the pair with the best score first, so a token's score is minus the rank of its first merge.
        ranks = {"".join(pair): rank for rank, pair in reversed([*enumerate(core["merges"])])}
        writer.add_token_scores([-float(ranks.get(texts.get(number, ""), 10_000)) for number in range(vocab_size)])
        writer.add_add_space_prefix(adds_space)
    types = [_type_of(texts.get(number), added.get(number), core) for number in range(vocab_size)]
    tokens = (texts.get(number, f"[PAD{number}]") for number in range(vocab_size))
    pairs = zip(tokens, types, strict=True)
    writer.add_token_list([text.replace("▁", " ") if kind == Type.USER_DEFINED else text for text, kind in pairs])
    writer.add_token_types(types)
    _add_special(writer, tokenizer, end_ids(folder, config, tokenizer))
    return tokenizer, [note] if note else []


def choose_space_prefix(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, str]:
    """Choose whether llama.cpp must add a space before a text and after each control token to tokenise most chats and
    texts as transformers does. Also returns a note on texts that still differ.

    ExportError if llama.cpp does not support the chat template or the tokenizer's rules for splitting text, or if it
    tokenises every chat differently. Without a chat template, texts are compared instead of chats.
    """
    check_template(tokenizer)
    splitting(tokenizer)
    chats = [] if PlainFormat.of(tokenizer.chat_template) else probe_chats(tokenizer)
    default = tokenizer.tokenize("a")[0].startswith("▁")
    values = (default, not default) if is_sentencepiece(tokenizer) else (default,)
    choices = {adds: compare_tokens(tokenizer, chats, "llama.cpp", adds_space=adds) for adds in values}
    best = max(choices, key=lambda adds: (choices[adds].chats, choices[adds].texts))
    agreement = choices[best]
    if not (agreement.chats if chats else agreement.texts):
        raise ExportError(
            f"the tokenizer cannot be exported: {agreement.note}",
            hint="export with --format safetensors, which keeps tokenizer.json",
        )
    return best, agreement.note


def _type_of(text: str | None, added: Mapping[str, Any] | None, core: Mapping[str, Any]) -> Type:
    if text is None:
        return Type.UNUSED
    if text == core["unk_token"]:
        return Type.UNKNOWN
    if added is not None:
        # llama.cpp's converter also treats texts such as <|end|> as control tokens (does_token_look_special).
        is_control = added["special"] or re.match(r"^<[|｜].*[|｜]>$", text)  # noqa: RUF001
        return Type.CONTROL if is_control else Type.USER_DEFINED
    return Type.BYTE if core["byte_fallback"] and re.match(r"^<0x[0-9A-F]{2}>$", text) else Type.NORMAL


def _add_special(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    """Write the ids of special tokens, flags for BOS and EOS that the tokenizer adds to texts, and the chat template.
    llama.cpp ends an answer at the tokens `eos`, `eot` and `eom`, and at tokens with certain texts, e.g. `<|eot_id|>`.
    """
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    others = [number for number in ends if number != tokenizer.eos_token_id]
    for name, number in {**ids, **dict(zip(("eot", "eom"), others, strict=False))}.items():
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    encoded = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(encoded[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(encoded[-1] == tokenizer.eos_token_id)
    template = tokenizer.chat_template
    if template:
        named = isinstance(template, dict) and [{"name": name, "template": text} for name, text in template.items()]
        writer.add_chat_template(named or template)


_FILTERS = (
    "attr batch center e escape filesizeformat forceescape groupby pprint random round striptags sum truncate "
    "urlencode urlize wordcount wordwrap xmlattr"
)
_TESTS = "escaped filter le"
_FUNCTIONS = "cycler joiner lipsum"
_STATEMENTS: Mapping[type[nodes.Node], str] = {
    **{nodes.Block: "block", nodes.Extends: "extends", nodes.Include: "include", nodes.Import: "import"},
    **{nodes.FromImport: "from", nodes.With: "with", nodes.ScopedEvalContextModifier: "autoescape"},
    **{nodes.Pow: "**", nodes.FloorDiv: "//"},
}
"""Jinja 3.1 statements and operators with which the server of xllamacpp 2026.10 refuses to start, by node type."""
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
"""Matches the `generation` statements around answers in a chat template of transformers. llama.cpp ignores them."""


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ExportError if llama.cpp cannot render a chat template of the tokenizer."""
    templates = tokenizer.chat_template or {}
    for name, text in (templates if isinstance(templates, Mapping) else {"default": templates}).items():
        unsupported = ", ".join(dict.fromkeys(_unsupported(text)))
        if unsupported:
            raise ExportError(
                f"the chat template `{name}` has {unsupported}, which llama.cpp does not support",
                hint=f"rewrite the chat template without {unsupported}",
            )


def _unsupported(text: str) -> Iterator[str]:
    plain = _GENERATION.sub(lambda mark: f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}", text)
    try:
        tree = Environment(autoescape=True, extensions=["jinja2.ext.loopcontrols"]).parse(plain)
    except TemplateSyntaxError as error:
        yield f"a mistake in line {error.lineno} ({error.message})"
        return
    yield from (f"the filter `{node.name}`" for node in tree.find_all(nodes.Filter) if node.name in _FILTERS.split())
    yield from (f"the test `{node.name}`" for node in tree.find_all(nodes.Test) if node.name in _TESTS.split())
    yield from (f"`{node.name}`" for node in tree.find_all(nodes.Name) if node.name in _FUNCTIONS.split())
    yield from (f"`{_STATEMENTS[type(node)]}`" for node in tree.find_all(tuple(_STATEMENTS)))
