"""Saves and restores the states of a process's random number generators, as plain values."""

import base64
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """States of torch's (CPU and the GPU that this process computes on), numpy's and Python's global generators."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "numpy": [kind, base64.b64encode(np.asarray(keys).tobytes()).decode(), position, has_gauss, cached],
        "python": [version, list(numbers), gauss],
    }


def restore_random_state(tree: dict[str, Any]) -> None:
    """Set the generators to the states that `random_state` returned."""
    torch.set_rng_state(_tensor(tree["torch"]))
    if tree["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(_tensor(tree["cuda"]))
    kind, keys, position, has_gauss, cached = tree["numpy"]
    np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, cached))
    version, numbers, gauss = tree["python"]
    random.setstate((version, tuple(numbers), gauss))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
