"""What counts as the answer in a text, by name; None where a text holds none."""

import json
import re
from collections.abc import Callable, Hashable, Mapping

Extractor = Callable[[str], Hashable | None]

_GSM8K = re.compile(r"####\s*([-+]?)\$?\s*([-+]?)([\d,]*\.?\d+)")
_CHOICE_SAID = re.compile(r"(?i:answer)\s*(?i:is)?\s*:?\s*[*(\[]*([A-Z])\b")
_CHOICE_FIRST = re.compile(r"[*(\[]*([A-Z])(?:[)\].:*,\s]|$)")


def gsm8k(text: str) -> str | None:
    """The number behind the last `####`, as GSM8K writes answers (Cobbe et al., arXiv 2110.14168); `$`, commas and a
    decimal zero do not count.
    """
    found = _GSM8K.findall(text)
    if not found:
        return None
    before, behind, digits = found[-1]
    whole, _, fraction = digits.replace(",", "").partition(".")
    sign = "-" if "-" in (before, behind) else ""
    return sign + (whole.lstrip("0") or "0") + (f".{fraction.rstrip('0')}" if fraction.rstrip("0") else "")


def choice(text: str) -> str | None:
    """A capital letter: the one behind the last `answer`, `answer is` or `answer:`, else the one the text begins
    with.
    """
    said = _CHOICE_SAID.findall(text)
    first = _CHOICE_FIRST.match(text.strip())
    return said[-1] if said else first[1] if first else None


def json_value(text: str) -> str | None:
    """The first JSON object or array of the text in one spelling (keys sorted), so that order of keys and spaces do not
    count.
    """
    decoder = json.JSONDecoder()
    for begin in (match.start() for match in re.finditer(r"[{\[]", text)):
        try:
            value, _ = decoder.raw_decode(text, begin)
        except json.JSONDecodeError:
            continue
        return json.dumps(value, sort_keys=True)
    return None


def plain_text(text: str) -> str:
    """The text, each stretch of white space as one space."""
    return " ".join(text.split())


EXTRACTORS: Mapping[str, Extractor] = {"gsm8k": gsm8k, "choice": choice, "json": json_value, "text": plain_text}
"""Extractors by the name that `--extract` takes."""
