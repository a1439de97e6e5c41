"""Numbers as a report prints them."""

import math
from datetime import UTC, datetime

from ds_finetune.config.units import GIB, MIB, share_text

NONE = "-"
"""Stands for a number that is not known."""


def number_text(value: float | None, kind: str = "number") -> str:
    """A number of a kind of `blocks.Chart`, for people."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    texts = {
        "percent": share_text(value),
        "seconds": f"{value:.3g} s",
        "gib": f"{value:.2f} GiB",
        "ratio": f"{value:.2f}x",
    }
    return texts.get(kind) or _plain_text(value)


def _plain_text(value: float) -> str:
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    if size < 0.001:
        return f"{value:.3g}"
    return f"{value:.4f}" if size < 100 else f"{value:.1f}"


def size_text(num_bytes: int) -> str:
    """Bytes in MiB or GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.1f} MiB"


def duration_text(seconds: float) -> str:
    """A duration in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    days, hours, minutes = whole // 86_400, whole % 86_400 // 3600, whole % 3600 // 60
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min"


def time_text(seconds: float) -> str:
    """A moment given in seconds since 1970."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
