"""Whether the Hugging Face hub can be reached, found out once and within seconds."""

import importlib
import threading
from functools import lru_cache

from huggingface_hub import constants, get_session

_REQUEST_SECONDS = 5.0
_PROBE_SECONDS = 8.0
"""Longest probe; looking up a host name obeys no timeout of the request."""


def hub_problem() -> str:
    """Why the hub cannot be asked now (HF_HUB_OFFLINE is set, or it does not answer); empty where it can.

    huggingface_hub 2.4 has no timeout on its client (utils/_http.py:341-350) and datasets 5.2 repeats a request for 23
    seconds where the host name is unknown, longer where nothing answers.
    """
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return _silence_of(constants.ENDPOINT)


@lru_cache(maxsize=4)
def _silence_of(endpoint: str) -> str:
    """What went wrong in asking `endpoint`, empty where it answers with any status."""
    outcome = [f"{endpoint} did not answer within {_PROBE_SECONDS:g} seconds"]

    def ask() -> None:
        session = get_session()
        # The client is httpx's or its successor's, by the version of huggingface_hub.
        library = importlib.import_module(type(session).__module__.partition(".")[0])
        try:
            session.head(endpoint, timeout=_REQUEST_SECONDS)
        except library.HTTPError as broken:
            outcome[0] = f"{endpoint} cannot be reached: {broken or type(broken).__name__}"
        else:
            outcome[0] = ""

    thread = threading.Thread(target=ask, daemon=True, name="hub probe")
    thread.start()
    thread.join(_PROBE_SECONDS)
    return outcome[0]
