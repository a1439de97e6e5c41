"""Formats and parses sizes in bytes, percentages and lists of numbers."""

import re
from collections.abc import Sequence
from itertools import groupby

from ds_finetune.errors import ConfigError

MIB, GIB, TIB = 2**20, 2**30, 2**40
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": MIB, "GIB": GIB, "TIB": TIB}


def share_text(fraction: float, digits: int = 1) -> str:
    """Format a fraction as a percentage. Only 0 and 1 become 0% and 100%; values near them `<0.1%` and `>99.9%`."""
    least = 10.0 ** -(digits + 2)
    if 0 < fraction < least / 2:
        return f"<{least:.{digits}%}"
    if 1 - least / 2 <= fraction < 1:
        return f">{1 - least:.{digits}%}"
    return f"{fraction:.{digits}%}"


def parse_bytes(text: str, *, name: str) -> int:
    """Convert a size such as `5GB` or `2GiB` to bytes; ConfigError, which names option `name`, for other texts."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", str(text), re.IGNORECASE)
    if not match:
        raise ConfigError(f"{name} `{text}` is not a size with a unit", hint="write e.g. 500MB, 5GB or 2TB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def bytes_text(count: int) -> str:
    """Format bytes as `1.50 GiB`, or in a smaller unit where that would print 0.00 GiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if 10 * count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


def spans_text(numbers: Sequence[int], separator: str = ",") -> str:
    """Format ascending numbers 0, 1, 2, 5 as `0-2,5`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
