"""torch's meta device: functions that are computed there by Python code, which imports torch's compiler and sympy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from ds_finetune.patches.foreign import replaced


@contextmanager
def ranges_on_cpu() -> Iterator[None]:
    """While this is open `torch.arange` makes tensors on the CPU where it is not told a device.

    For models built on the meta device, whose rotary frequencies are powers of a range: torch 2.13 has Python code for
    both there (_refs/__init__.py:5335), whose imports take half a second of CPU.
    """
    arange: Callable[..., Any] = torch.arange

    @wraps(arange)
    def arange_on_cpu(*bounds: Any, **options: Any) -> Any:  # noqa: ANN401 - what torch's takes and returns
        return arange(*bounds, **{"device": "cpu", **options})

    with replaced(torch, "arange", arange_on_cpu):
        yield


def drop_values(model: nn.Module) -> None:
    """Replace buffers by buffers on the meta device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
