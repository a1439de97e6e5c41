"""Checks whether the Hugging Face hub can be reached, within seconds and once per process."""

import importlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from huggingface_hub import constants, get_session

from ds_finetune.foreign.guard import Foreign, replaced

_REQUEST_SECONDS = 5.0
_PROBE_SECONDS = 8.0
"""Time limit of the check whether the hub answers. A request's own timeout would not limit the host name lookup."""


def hub_problem() -> str:
    """Why the Hugging Face hub cannot be used: HF_HUB_OFFLINE is set, or it does not answer. Empty if it can be used.

    Without this check an unreachable hub costs much time: huggingface_hub 2.4 has no timeout on its client
    (utils/_http.py:341-350), and datasets 5.2 repeats a request for 23 seconds or longer.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return without_password(_probe(constants.ENDPOINT))


def without_password(error: object) -> str:
    """The text of `error` with `***` for user names and passwords in URLs, such as the URL of HF_ENDPOINT."""
    return re.sub(r"(?<=://)[^/\s]*@", "***@", str(error))


@lru_cache(maxsize=4)
def _probe(endpoint: str) -> str:
    """Why the URL `endpoint` cannot be reached; empty if it answers, with any HTTP status."""
    problem = [f"{endpoint} did not answer within {_PROBE_SECONDS:g} seconds"]

    def probe() -> None:
        session = get_session()
        # huggingface_hub uses httpx or its successor, depending on the version, so the module is found by name.
        library = importlib.import_module(type(session).__module__.partition(".")[0])
        try:
            session.head(endpoint, timeout=_REQUEST_SECONDS)
        except library.HTTPError as broken:
            problem[0] = f"{endpoint} cannot be reached: {broken or type(broken).__name__}"
        else:
            problem[0] = ""

    thread = threading.Thread(target=probe, daemon=True, name="hub probe")
    thread.start()
    thread.join(_PROBE_SECONDS)
    return problem[0]


_OFFLINE = Foreign("datasets", "config.py (HF_HUB_OFFLINE), load.py")


@contextmanager
def offline() -> Iterator[None]:
    """Context in which the package datasets reads only its cache. It has no argument for this."""
    from datasets import config

    _OFFLINE.attribute(config, "HF_HUB_OFFLINE")
    with replaced(config, "HF_HUB_OFFLINE", True):
        yield
