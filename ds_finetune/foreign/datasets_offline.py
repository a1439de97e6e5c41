"""datasets: reads data sets from its cache without asking the hub."""

from collections.abc import Iterator
from contextlib import contextmanager

from ds_finetune.foreign.guard import Foreign, replaced

_OFFLINE = Foreign("datasets", "config.py (HF_HUB_OFFLINE), load.py")


@contextmanager
def offline() -> Iterator[None]:
    """While this is open, datasets uses only its cache and does not ask the hub; it has no argument for that."""
    from datasets import config

    _OFFLINE.attribute(config, "HF_HUB_OFFLINE")
    with replaced(config, "HF_HUB_OFFLINE", True):
        yield
