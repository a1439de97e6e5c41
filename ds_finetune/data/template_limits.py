"""Limits of time and memory for rendering a chat template, which may come with a model of unknown origin."""

import resource
import signal
import threading
import time
from functools import lru_cache
from pathlib import Path
from types import FrameType

from ds_finetune.config.units import GIB
from ds_finetune.errors import ConfigError

RENDER_SECONDS, _RENDER_BYTES = 10.0, GIB
"""CPU time and memory that one rendering may take."""
_STATM = Path("/proc/self/statm")


class _TimeIsUpError(BaseException):
    """Not an Exception: jinja2 3.1.6 ignores those while it computes constant expressions (nodes.py:511)."""


class TemplateLimits:
    """Limits of time and memory inside a `with`, in which a template is rendered; ConfigError beyond them.

    The time is limited in the main thread only, where Python handles signals, and the memory only where there is a
    /proc. No signal interrupts a single operation on a huge number, so that a template with `**` is refused.
    """

    def __init__(self, source: str) -> None:
        if _has_power(source):
            raise _refusal("uses `**`, which can compute without an end")
        self._address_space = resource.getrlimit(resource.RLIMIT_AS)
        self._has_handler = _is_main_thread()
        if self._has_handler:
            signal.signal(signal.SIGVTALRM, _raise_time_is_up)

    def __enter__(self) -> None:
        soft, hard = self._address_space
        if most := _address_space_limit(int(time.monotonic())):
            resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(soft, most), hard))
        if self._has_handler and _is_main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_SECONDS)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._has_handler and _is_main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, self._address_space)
        if kind is _TimeIsUpError:
            raise _refusal(f"computes for more than {RENDER_SECONDS:g} s on one dialogue") from None
        if kind is MemoryError:
            raise _refusal(f"takes more than {_RENDER_BYTES // GIB} GiB of memory on one dialogue") from None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@lru_cache(maxsize=1)
def _address_space_limit(_: int) -> int | None:
    """The address space of this process and `_RENDER_BYTES`; looked up once a second."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[0]) * resource.getpagesize() + _RENDER_BYTES


def _raise_time_is_up(_: int, __: FrameType | None) -> None:
    raise _TimeIsUpError


@lru_cache(maxsize=16)
def _has_power(source: str) -> bool:
    from jinja2 import Environment, TemplateError

    try:
        return any(kind == "operator" and text == "**" for _, kind, text in Environment(autoescape=True).lex(source))
    except TemplateError:
        # Rendering reports it.
        return False


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"the chat template {reason}", hint="give another one as data.template")
