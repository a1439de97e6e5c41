"""torch's contexts of devices: which functions they reach, and functions that are Python code on the meta device, which
imports torch's compiler and sympy.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from ds_finetune.patches.foreign import Foreign, replaced

_CONSTRUCTORS = Foreign("torch", "utils/_device.py:10-58, 120")


def learn_device_functions() -> None:
    """Let torch remember which functions `torch.device(...)` as a context gives its device to.

    It looks them up by name at their first call in such a context, once in a process (torch 2.13). Where one is
    replaced at that moment, tensors that it makes are on the CPU in every later context.
    """
    from torch.utils import _device

    _CONSTRUCTORS.attribute(_device, "_device_constructors")()


@contextmanager
def ranges_on_cpu() -> Iterator[None]:
    """While this is open `torch.arange` makes tensors on the CPU where it is not told a device.

    For models built on the meta device, whose rotary frequencies are powers of a range: torch 2.13 has Python code for
    both there (_refs/__init__.py:5335), whose imports take half a second of CPU.
    """
    learn_device_functions()
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
