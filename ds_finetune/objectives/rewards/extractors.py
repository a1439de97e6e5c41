"""Extractors: functions that return the answer in a text, or None if there is none."""

import json
import re
from collections.abc import Callable, Hashable, Mapping

Extractor = Callable[[str], Hashable | None]

_GSM8K = re.compile(r"####\s*([-+]?)\$?\s*([-+]?)([\d,]*\.?\d+)")
_CHOICE_STATED = re.compile(r"(?i:answer)\s*(?i:is)?\s*:?\s*[*(\[]*([A-Z])\b")
_CHOICE_FIRST = re.compile(r"[*(\[]*([A-Z])(?:[)\].:*,\s]|$)")


def gsm8k(text: str) -> str | None:
    """The number after the last `####`, the form of answers in GSM8K (Cobbe et al., arXiv 2110.14168).

    `$`, commas and zeros at the end of decimals are removed.
    """
    matches = _GSM8K.findall(text)
    if not matches:
        return None
    sign_before, sign_after, digits = matches[-1]
    integer, _, fraction = digits.replace(",", "").partition(".")
    sign = "-" if "-" in (sign_before, sign_after) else ""
    return sign + (integer.lstrip("0") or "0") + (f".{fraction.rstrip('0')}" if fraction.rstrip("0") else "")


def choice(text: str) -> str | None:
    """The letter of a multiple-choice answer.

    It follows the last `answer`, `answer is` or `answer:`; without one, the text begins with it.
    """
    stated = _CHOICE_STATED.findall(text)
    first = _CHOICE_FIRST.match(text.strip())
    return stated[-1] if stated else first[1] if first else None


def json_value(text: str) -> str | None:
    """The first JSON object or array of the text, with sorted keys and normalised white space."""
    decoder = json.JSONDecoder()
    for begin in (match.start() for match in re.finditer(r"[{\[]", text)):
        try:
            value, _ = decoder.raw_decode(text, begin)
        except json.JSONDecodeError:
            continue
        return json.dumps(value, sort_keys=True)
    return None


def plain_text(text: str) -> str:
    """The text, with each run of white space replaced by one space."""
    return " ".join(text.split())


EXTRACTORS: Mapping[str, Extractor] = {"gsm8k": gsm8k, "choice": choice, "json": json_value, "text": plain_text}
"""Extractors by the name that `--extract` takes."""
