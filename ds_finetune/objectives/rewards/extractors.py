"""Extractors: functions that parse the final result from an answer, or return None if there is none."""

import decimal
import json
import re
import unicodedata
from collections.abc import Callable, Hashable, Mapping

from ds_finetune.objectives.rewards.answers import last_box

Extractor = Callable[[str], Hashable | None]

_DIGITS = (
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2}){1,6},\d{3}(?!\d)|\d{1,3}(?: \d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
)
_NUMBER = re.compile(
    r"(?P<sign>(?:(?<![\w)\]])[-+])?(?:\$[-+]?)?)"
    rf"(?<![\d^])(?<!\d\.)(?<!\^[-+])(?P<digits>(?:{_DIGITS})(?:[eE][-+]?\d+)?)"
    rf"(?: ?\* ?10\^(?P<scale>[-+]?\d+)|\^(?P<power>[-+]?\d+)|/(?P<below>{_DIGITS})| (?P<part>\d+/\d+)(?!\d))?"
)
_ARGUMENT = r"\s*(?:\{\s*([-+]?[\d.,]+)\s*\}|(\d))"
_FRACTION = re.compile(rf"(\d\s*)?\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}")
_OVER = re.compile(r"\{\s*([-+]?[\d.]+)\s*\\over\s*([-+]?[\d.]+)\s*\}")
_NO_NUMBER = re.compile(r"\\sqrt|\\pi\b|[\u221a\u03c0]")
"""Patterns of expressions whose digits are not their value, so that no number is read from them."""
_LIST = re.compile(r"\d\s*[;,]\s+[-+]?\d|\d!|\d\W*(?:\\\w+\{\s*)?(?:or|and)\b")
"""Pattern of several numbers in a LaTeX box, or of a factorial, from which no number is read."""
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_UNREAD_BEFORE = re.compile(
    r"\\sqrt(?:\[[^]]*\])?\{[^{}]*\Z|\u221a\(?\Z|(?:\}|\\pi|\u03c0)/\Z"
    rf"|\\[dtc]?frac\s*(?:{_GROUP}\s*)?\{{(?:[^{{}}]|{_GROUP})*\Z"
    # Text before a number that is not read: `1,5`, `3:30`, `1..5`, `12'34`, `x1`, `0x10`, `5(3)`, `10^{1/2}`, `log 5`
    r"|\d[,:'\u2019]\Z|\d\.\.\Z|[A-Za-z]\Z|\w_\Z|[\w)]\(\Z|\^[{(]\s*\Z"
    r"|(?<![A-Za-z])(?:log|ln|sin|cos|tan)(?:_\{?\w+\}?)?[ ({]*\Z"
    # Text before a number that is not read: `2+3`, `x-4`, `2024-01-31`, `10 - 5`, `5 x 4`, `1/2/2024`, `5\pm1`, `x > 2`
    r"|[\w)\]}][-+*/\u2010-\u2013]\Z|[\d)\]}] ?[-+*/\u2010-\u2013xX] ?\Z|(?:\u00b1|\\pm) ?\Z"
    r"|(?:(?:[^\S\n]|\d)[<>]=?|[\u2264\u2265\u2260]|\\(?:[gl]eq?|[gl]t|neq?))\s*\Z"
)
_UNREAD_AFTER = re.compile(
    r"\s*(?:\\sqrt|\\pi\b|[\u221a\u03c0])|\^(?!\{?\\circ)|[,.:'\u2019/]\d|\.\.\d"
    r"|[-\u2010-\u2013](?:\d|[a-z]\b)"
    # A number is not read if one of these follows: `2+x`, `5 * 3`, `5 x 4`, `5\pm1`, `3k`, `$2M`, `3x`, `5i`, `2 dozen`
    r"| ?\+ ?[\w\\(]| ?[*xX] ?\d|\*[\w\\(]| ?(?:\u00b1|\\pm)"
    r"|(?:[abeiknqrtuvwxyzBKMTX]|[bx][\dA-F]+|bn|mn|mil)(?![A-Za-z])"
    r"| ?(?:dozen|mil|bn)\b"
)
"""Patterns of text before and after a number, with which the number is not read: it is a part of a date, a time, a
name, a list or an expression that is not evaluated, or a unit such as `k` changes its value.
"""
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_LARGE = re.compile(rf"(?<=\d) ?({'|'.join(_POWERS)})\b", re.IGNORECASE)
_RAISED = re.compile("(?<=[0-9])[\u207b]?[\u00b2\u00b3\u00b9\u2070\u2074-\u2079]+")
_POINTS = re.compile(r"(?<![\d.,])(\d{1,3})(?:((?:\.\d{3})++),(\d++)|((?:\.\d{3}){2,}+))(?![.,]?\d)")
"""Pattern of numbers with points between thousands, as `1.234,5` and `1.000.000`."""
_VULGAR = re.compile("(?:(\\d)[^\\S\n]*)?([\u00bc-\u00be\u2150-\u215e])")
_SPELLINGS = (
    ("\u2212|\uff0d|\ufe63|(?<![^\\s=({])[\u2012\u2013](?=[\\d.$])", "-"),
    (r"(?<=[=({]) ?([-+]) (?=[\d.$\\])", r"\1"),
    (r"\{,\}", ","),
    (r"\\(?:left|right)(?=[(\[|)\]])", ""),
    (r"<(\$?[-+]?[\d.,]+)>", r"\1"),
    (r"\\!", ""),
    (r"\\[,;: ]|[\u00a0\u2009\u202f]", " "),
    (r"\\\$", "$"),
    (r"\\times|\\cdot|[\u00d7\u00b7]", "*"),
    (r"[\u20ac\u00a3\u00a5\u20b9]|\b(?:USD|EUR|GBP|INR|JPY|CNY|RMB|CAD|AUD|CHF|US(?=\$)|Rs)\.? ?(?=[\d$])", "$"),
    (r"(?<=\d) ?([cdkm]?m)[23\u00b2\u00b3]\b", r" \1"),
    (r"(?<=\d)['\u2019_](?=\d{3}(?!\d))", ","),
    (r"(?<=\d)(?:\*\*(?=[-+]?\d)| \*\* (?=\d))", "^"),
    (r"(?<=\d) ?[xX] ?(?=10\^)", "*"),
    (r"(?<=\d) ?[/\u2044] ?(?=\d)", "/"),
    (r"\^[{(]\s*([-+]?\d+)\s*[})]", r"^\1"),
    (r"\*\*|__", ""),
)
"""Regular expressions of other spellings of a number, each with a replacement in a form that `_NUMBER` matches."""
_EXACT = decimal.Context(prec=50, traps=[])

_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_MARKS = re.compile(r"\*\*|__|[$`\"\u201c\u201d]|\\[()\[\]]|</?answer>|(?<!\w)'(?=\w\W)|(?<=\W\w)'(?!\w)")
_EAST = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
"""Character ranges of Chinese, Japanese and Korean, in which a choice letter needs no space beside it."""
_LETTER = (
    # `A` and `I` are words instead of choice letters if an ordinary word follows, as in `A bird`.
    rf"[(\[{{*]*(?<![^\W_{_EAST}])(?:([A-Z])(?![^\W_{_EAST}]|_\w|['\u2019+#/=-])"
    r"(?!(?<=[AI])\s+(?!(?:is|because|since|as|and|or|but|not)\b)\w)(?!\s+(?:or|and)\s+\(?[A-Z]\b(?!\s+(?:is|are)\b))"
    r"(?!\)?\s*[,&]\s*\(?[A-Z]\)?\s*(?:[.,&\n]|$|or\b|and\b(?!\s+\(?[A-Z]\)?\s+(?:is|are)\b)))"
    r"|([a-z])(?=\)|[.,;]?\s*(?:\n|$)))"
)
_STATED = re.compile(
    r"(?i:\b(?:answer|(?:right|correct|best)\s+(?:option|choice|one)"
    r"|antwort|r[\xe9e]ponse|respuesta|risposta|resposta)\b"
    r"|\u7b54(?:\u6848|\u3048)|\uc815\ub2f5|\u6b63\u89e3|\u6b63\u786e\u9009\u9879|\u043e\u0442\u0432\u0435\u0442"
    r"|\u6545\u9009|\b(?:choice|option|selected|correct|solution|result)\b(?=\s*:))"
    r"(?:[^.:=\n]{0,60}?(?i:\b(?:is|be|ist|est|es)\b|[:=\u662f\u4e3a\u9009\u306f]|\uc740))?"
    rf"\s*[:\u2013-]?\s*(?i:(?:option|choice|therefore|thus)\s+)*{_LETTER}"
)
_FIRST = re.compile(
    rf"(?i:I(?:'d)? (?:choose|pick|select|go with)\s+)?(?i:(?:option|choice)\s+)?{_LETTER}"
    r"(?!\)?\s+(?:is|are)(?:n't|\s+(?:not|incorrect|wrong|false))\b)"
)
_LONE_LINE = re.compile(r"\W*([A-Za-z])\W*")


def last_number(text: str) -> decimal.Decimal | None:
    r"""The last number in the last `\\boxed{...}`, or in the text if it has none; None without a finite number.

    `$` and thousands separators are ignored. Powers (`10^6`, `2 \\times 10^5`), fractions and mixed numbers (`3 1/2`,
    `\\frac12`) are evaluated. None if the last digits are a part of something else, such as of `1,5`, `3:30`, `$3k`, a
    date, a range, a name or another expression.
    """
    return _read_number(text, which=-1)


def _read_number(text: str, *, which: int) -> decimal.Decimal | None:
    boxed = last_box(text)
    # Text in LaTeX's \boxed is read as if an equals sign preceded it, so that `- 5` is a number and not a list item.
    text = text if boxed is None else f"={boxed.lstrip()}"
    if boxed is not None and (_NO_NUMBER.search(boxed) or _LIST.search(boxed)):
        return None
    text = _RAISED.sub(lambda raised: "^" + unicodedata.normalize("NFKC", raised[0]).replace("\u2212", "-"), text)
    for written, plain in _SPELLINGS:
        text = re.sub(written, plain, text)
    text = _POINTS.sub(lambda n: f"{n[1]}{(n[2] or n[4]).replace('.', '')}{'.' * bool(n[3])}{n[3] or ''}", text)
    text = _LARGE.sub(lambda large: f"*10^{_POWERS[large[1].lower()]}", text)
    text = _FRACTION.sub(_plain_fraction, _OVER.sub(r"\\frac{\1}{\2}", text))
    text = _VULGAR.sub(lambda f: f"{f[1] or ''}{' ' * bool(f[1])}{unicodedata.normalize('NFKC', f[2])}", text)
    text = text.replace("\u2044", "/")
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    begin, end = numbers[which].span()
    if _UNREAD_BEFORE.search(text, max(0, begin - 100), begin) or _UNREAD_AFTER.match(text, end):
        return None
    number = _value(numbers[which])
    return number if number.is_finite() else None


def _plain_fraction(fraction: re.Match[str]) -> str:
    r"""A LaTeX fraction as plain text: `3\frac12` becomes `3 1/2`; a minus of the denominator moves to the front."""
    whole, above, below = fraction[1] or "", fraction[2] or fraction[3], fraction[4] or fraction[5]
    is_negative = above.startswith("-") != below.startswith("-")
    return f"{whole}{' ' * bool(whole)}{'-' * is_negative}{above.lstrip('+-')}/{below.lstrip('+-')}"


def _value(number: re.Match[str]) -> decimal.Decimal:
    def exact(digits: str) -> decimal.Decimal:
        return _EXACT.create_decimal(digits.replace(",", "").replace(" ", ""))

    value = exact(number["digits"])
    if number["scale"]:
        value = _EXACT.multiply(value, _EXACT.power(10, exact(number["scale"])))
    elif number["power"]:
        value = _EXACT.power(value, exact(number["power"]))
    elif number["below"]:
        value = _EXACT.divide(value, exact(number["below"]))
    elif number["part"]:
        above, below = number["part"].split("/")
        value = _EXACT.add(value, _EXACT.divide(exact(above), exact(below)))
    return _EXACT.minus(value) if "-" in number["sign"] else value


def gsm8k(text: str) -> str | None:
    """The number of an answer in GSM8K's form (Cobbe et al., arXiv 2110.14168): the first number after the last
    `####`, or after `=` on that line.

    It is parsed as by `last_number`, and written without leading or trailing zeros.
    """
    _, mark, result = text.rpartition("####")
    line = result.strip().partition("\n")[0]
    number = _read_number(line.partition("(")[0].rpartition("=")[2], which=0) if mark else None
    return None if number is None else f"{number.normalize(_EXACT) + 0:f}"


def choice(text: str) -> str | None:
    r"""The letter of a multiple-choice answer, as a capital; None if the text has none.

    It is read from the last `\\boxed{...}` if there is one. Else it is the letter after the last `answer` or `correct
    option` (`Answer: B`, `the answer I choose is (b)`). Without these words, it is the only letter on the last line, or
    the letter with which the text begins.
    """
    text = _MARKS.sub("", _STYLE.sub(r"\1", unicodedata.normalize("NFKC", last_box(text) or text))).strip()
    stated = [first or second for first, second in _STATED.findall(text)]
    if stated:
        return str(stated[-1]).upper()
    match = _LONE_LINE.fullmatch(text.rpartition("\n")[2]) or _FIRST.match(text)
    return None if match is None else next(filter(None, match.groups())).upper()


def json_value(text: str) -> str | None:
    """The first JSON object or array of the text, written with sorted keys and normalised white space."""
    decoder = json.JSONDecoder()
    for begin in (match.start() for match in re.finditer(r"[{\[]", text)):
        try:
            value, _ = decoder.raw_decode(text, begin)
            return json.dumps(value, sort_keys=True)
        except json.JSONDecodeError:
            continue
        except (ValueError, RecursionError):
            # Python refuses an integer of more than 4,300 digits and JSON that is nested too deeply.
            return None
    return None


def plain_text(text: str) -> str:
    """Replace each run of white space in the text by one space."""
    return " ".join(text.split())


EXTRACTORS: Mapping[str, Extractor] = {"gsm8k": gsm8k, "choice": choice, "json": json_value, "text": plain_text}
"""Extractors by their names for `ds-finetune eval --extract`."""
