"""Units of memory and disk, and sizes as users write them."""

import re

from ds_finetune.errors import ConfigError

MIB, GIB = 2**20, 2**30
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": MIB, "GIB": GIB}


def parse_bytes(text: str, *, name: str) -> int:
    """A number of bytes from `5GB`, `500MB` or `2GiB`; ConfigError for any other text, under the option's `name`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", text, re.IGNORECASE)
    if not match:
        raise ConfigError(f"{name} is `{text}`", hint="write e.g. 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
