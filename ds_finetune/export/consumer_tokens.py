"""Checks whether llama.cpp and ONNX Runtime GenAI tokenise texts and chats as transformers does.

Both have tokenizers of their own. Whatever tokenizer.json says, they either always add a space before a text and after
each control token, or never. They do not compose characters (NFC), nor strip the white space beside an added token.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ds_finetune.data.chat_template import ChatTemplate, RenderingError
from ds_finetune.data.prompt_format import PlainFormat
from ds_finetune.data.tokenizer_files import PROBES

_FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
_SHOWN_CHARACTERS, _SHOWN_TOKENS = 40, 6


@dataclass(frozen=True)
class Agreement:
    """How many chats and plain texts another program tokenises as transformers does."""

    chats: int
    texts: int
    note: str
    """Note for the user on texts that the other program tokenises differently; empty if there are none."""


def is_sentencepiece(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer is SentencePiece's BPE with tokens for single bytes."""
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    return core["type"] == "BPE" and bool(core["byte_fallback"])


def compare_tokens(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[str], program: str, *, adds_space: bool
) -> Agreement:
    """Count how many `chats` and how many sample texts PROBES another `program` tokenises as transformers does. `chats`
    are rendered texts. With `adds_space`, the program adds a space before a text and after control tokens.
    """
    own, texts = tokenizer.backend_tokenizer, list(PROBES.values())
    other = _as_elsewhere(tokenizer, adds_space=adds_space)
    differences: dict[str, tuple[list[str], list[str]]] = {}
    for text in (*chats, *texts):
        expected, actual = (core.encode(text, add_special_tokens=False).tokens for core in (own, other))
        if expected != actual:
            differences[text] = expected, actual
    kinds = {"chats": chats, "plain texts": texts}
    wrong = {kind: sum(text in differences for text in each) for kind, each in kinds.items()}
    note = ""
    if differences:
        counts = " and ".join(f"{n} of {len(kinds[kind])} {kind}" for kind, n in wrong.items() if n)
        text, (expected, actual) = next(iter(differences.items()))
        start = next((n for n, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b), 0)
        shown = slice(start, start + _SHOWN_TOKENS)
        note = f"{program} makes other tokens than transformers of {counts}"
        if all(PROBES["accents"] in text for text in differences):
            note += ": it does not compose characters (e + U+0301 as é), so send it composed texts (NFC)"
        else:
            note += f": {actual[shown]} instead of {expected[shown]} from token {start} on of "
            note += repr(text[:_SHOWN_CHARACTERS])
    return Agreement(len(chats) - wrong["chats"], len(texts) - wrong["plain texts"], note)


def genai_note(tokenizer: PreTrainedTokenizerBase) -> str:
    """Note for the user if ONNX Runtime GenAI cannot read the tokenizer, or tokenises differently; else empty."""
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = [tree[name] or {} for name in ("normalizer", "pre_tokenizer")]
    all_steps = [part.get("normalizers", part.get("pretokenizers", [part])) for part in parts]
    steps = [step.get("type", "") for of_part in all_steps for step in of_part]
    if tree["model"]["type"] != "BPE" or steps.count("Split") > 1:
        # GenAI 0.18 fails on Unigram tokenizers, and on several `Split` steps, as DeepSeek-LLM's tokenizer has.
        return "ONNX Runtime GenAI does not read this kind of tokenizer: give it token ids of transformers"
    adds_space = is_sentencepiece(tokenizer) and not {"Prepend", "Metaspace"}.isdisjoint(steps)
    return compare_tokens(tokenizer, probe_chats(tokenizer), "ONNX Runtime GenAI", adds_space=adds_space).note


def probe_chats(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Render one dialogue for each sample text of PROBES with the chat template; empty if the template renders none."""
    given = tokenizer.chat_template
    source = given.get("default") if isinstance(given, dict) else given
    if not source:
        return []
    template, roles = ChatTemplate(tokenizer, source), ("user", "assistant", "user")
    # A chat template for completions renders a single prompt, and no dialogue.
    for number in (1,) if PlainFormat.of(source) else (3, 1):
        try:
            return [
                template.render([{"role": role, "content": text} for role in roles[:number]], None, opens=True)
                for text in PROBES.values()
            ]
        except RenderingError:
            continue
    return []


def _as_elsewhere(tokenizer: PreTrainedTokenizerBase, *, adds_space: bool) -> Tokenizer:
    """A copy of the tokenizer that normalises and splits texts as llama.cpp and ONNX Runtime GenAI do."""
    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    tree |= {"added_tokens": [token | _FLAGS for token in tree["added_tokens"]], "normalizer": None}
    if is_sentencepiece(tokenizer):
        space = [{"type": "Prepend", "prepend": "▁"}] if adds_space else []
        steps = [*space, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
        tree |= {"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": None}
    for step in (tree["pre_tokenizer"] or {}).get("pretokenizers", [tree["pre_tokenizer"] or {}]):
        if "add_prefix_space" in step:
            step["add_prefix_space"] = False
    return Tokenizer.from_str(json.dumps(tree))
