"""Units of memory and disk, and sizes as users write them."""

import re

from ds_finetune.errors import ConfigError

MIB, GIB, TIB = 2**20, 2**30, 2**40
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": MIB, "GIB": GIB, "TIB": TIB}


def parse_bytes(text: str, *, name: str) -> int:
    """A number of bytes from `5GB`, `500MB` or `2GiB`; ConfigError for any other text, under the option's `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{name} `{text}` is no number with a unit", hint="write e.g. 500MB, 5GB or 2TB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
