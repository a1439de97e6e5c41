"""Counts how often a GPU would make the host wait, on a machine that has none.

An imagined accelerator stands for the GPU: DeepSpeed and the engine are told that their device is `cpu:0`, and which
tensors would be in its memory is followed from the calls that make and copy them. What waits on CUDA (torch 2.13) is
counted: numbers that Python reads, results whose size depends on values, and copies that are not asynchronous from
pinned memory.

DeepSpeed's streams and events are imagined too: each wait of the host for one of them counts.

Not seen: what a kernel does on CUDA alone (fallbacks of grouped products without `torch._grouped_mm`, FusedAdam),
ZeRO-3's limits on gathers and reductions under way, allocations, and NCCL.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _allowed_determinism_checks_to_fns

DEVICE = torch.device("cpu", 0)
"""The imagined accelerator; `cpu` without a number is the host."""
_ATEN = torch.ops.aten
_WAITING = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "bincount",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
}
"""Operators that wait whatever they are given."""
_MAKERS = {
    getattr(torch, name)
    for name in ("arange", "as_tensor", "empty", "eye", "from_numpy", "full", "linspace", "ones", "rand", "randn")
} | {getattr(torch, name) for name in ("randint", "randperm", "scalar_tensor", "tensor", "zeros")}
"""Functions whose result is on the host unless a device is given."""
_OWN = (str(Path(__file__)), f"{Path(torch.__file__).parent}/", "/contextlib.py")
"""Files whose frames do not say who asked."""


class HostWaits:
    """What the host waited for since `reset`, and where each tensor is."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._host: dict[int, torch.UntypedStorage] = {}
        self._pinned: set[int] = set()

    def reset(self) -> None:
        """Forget what was counted."""
        self.found.clear()

    def put_on_host(self, value: Any) -> None:
        """Say that the tensors of a nested value were made on the host."""
        if is_dataclass(value):
            value = [getattr(value, each.name) for each in fields(value)]
        if isinstance(value, torch.Tensor):
            self.mark(value)
        elif isinstance(value, (tuple, list)):
            for each in value:
                self.put_on_host(each)

    def mark(self, tensor: torch.Tensor, *, is_pinned: bool = False) -> torch.Tensor:
        """Say that a tensor is on the host."""
        storage = tensor.untyped_storage()
        # Kept, so that no other storage gets its address.
        self._host[storage._cdata] = storage
        if is_pinned:
            self._pinned.add(storage._cdata)
        return tensor

    def move_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Say that a tensor is on the accelerator."""
        self._host.pop(tensor.untyped_storage()._cdata, None)
        return tensor

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the memory of the host; others are on the accelerator."""
        return tensor.untyped_storage()._cdata in self._host

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is in pinned memory, one piece of it."""
        return tensor.untyped_storage()._cdata in self._pinned and tensor.is_contiguous()

    def count(self, kind: str) -> None:
        """Count a wait where the code that asked for it is."""
        self.found[f"{kind} at {_place()}"] += 1

    def count_copy(self, source: torch.Tensor, *, to_host: bool, non_blocking: bool, is_pinned: bool = True) -> None:
        """Count a copy between memories if the host waits for it; `is_pinned` is whether one to the host goes to pinned
        memory, as torch's own copies without a destination do.
        """
        if self.is_on_host(source) == to_host:
            return
        if not non_blocking or not (is_pinned if to_host else self.is_pinned(source)):
            self.count("copy to the host" if to_host else "copy to the device")


def _place() -> str:
    """File and line of the innermost frame that is neither torch's nor this file's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_OWN) or frame.f_code.co_filename.endswith(_OWN)
    ):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-3:])}:{frame.f_lineno}"


class _Calls(TorchFunctionMode):
    """Follows what Python asks of torch: devices, copies between them, and lists."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits
        self._special: dict[Any, Callable[..., Any]] = {
            torch.Tensor.backward: self._backward,
            torch.Tensor.to: self._to,
            torch.Tensor.cpu: self._cpu,
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.is_pinned: lambda tensor, *_: waits.is_pinned(tensor),
            torch.Tensor.tolist: self._read,
            torch.Tensor.numpy: self._read,
            torch.Tensor.device.__get__: self._device,  # type: ignore[attr-defined]
        }

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        special = self._special.get(func)
        if special is not None:
            return special(*args, **kwargs) if special != self._read else special(func, *args, **kwargs)
        out = func(*args, **kwargs)
        if func in _MAKERS:
            device = kwargs.get("device")
            if device is None or torch.device(device) != DEVICE:
                self._waits.mark(out)
            elif func in (torch.tensor, torch.as_tensor):
                self._waits.count("tensor made on the device")
                self._waits.move_to_device(out)
        return out

    def _backward(self, tensor: torch.Tensor, gradient: torch.Tensor | None = None, **kwargs: Any) -> None:
        assert gradient is None
        assert not kwargs.get("create_graph")
        # This mode is off while it handles a call, and would be so in all of `torch.autograd.backward`.
        with self:
            _engine_run_backward(
                (tensor,),
                (torch.ones_like(tensor),),
                bool(kwargs.get("retain_graph")),
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def _device(self, tensor: torch.Tensor, *_: Any) -> torch.device:
        with torch._C.DisableTorchFunction():
            if tensor.device.type != "cpu":
                return tensor.device
        return torch.device("cpu") if self._waits.is_on_host(tensor) else DEVICE

    def _read(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._waits.is_on_host(tensor):
            self._waits.count("numbers read")
        return func(tensor, *args, **kwargs)

    def _pin(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        assert self._waits.is_on_host(tensor)
        return self._waits.mark(tensor.clone(memory_format=torch.contiguous_format), is_pinned=True)

    def _cpu(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        return self._to(tensor, torch.device("cpu"))

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`Tensor.to`, as a copy where it is one on a machine with a GPU, and without a device else."""
        given = dict(kwargs)
        kept, device = [], kwargs.pop("device", None)
        for value in args:
            if isinstance(value, torch.Tensor):
                device = self._device(value)
                kept.append(value.dtype)
            elif isinstance(value, (str, torch.device)):
                device = value
            else:
                kept.append(value)
        if "meta" in (self._device(tensor).type, torch.device(device or "cpu").type):
            return tensor.to(*args, **given)
        # `to(device, dtype, non_blocking)` and `to(dtype, non_blocking)`
        dtypes = [value for value in kept if isinstance(value, torch.dtype)]
        flags = [value for value in kept if isinstance(value, bool)]
        non_blocking = bool(flags[0]) if flags else bool(kwargs.pop("non_blocking", False))
        kwargs.pop("non_blocking", None)
        if dtypes:
            kwargs["dtype"] = dtypes[0]
        # torch's clipping asks C++ for the device of gradients, which knows of none that is imagined.
        is_own = sys._getframe(2).f_code.co_filename.endswith("torch/nn/utils/clip_grad.py")
        to_host = self._waits.is_on_host(tensor) if device is None or is_own else torch.device(device) != DEVICE
        if to_host == self._waits.is_on_host(tensor):
            return tensor.to(**kwargs) if kwargs else tensor
        self._waits.count_copy(tensor, to_host=to_host, non_blocking=non_blocking)
        kwargs["copy"] = True
        with torch._C.DisableTorchFunction():
            out = tensor.to(tensor.dtype if "dtype" not in kwargs else kwargs.pop("dtype"), **kwargs)
        if to_host:
            return self._waits.mark(out)
        return self._waits.move_to_device(out)


class _Operators(TorchDispatchMode):
    """Follows what torch computes: where results are, and which operators wait."""

    def __init__(self, waits: HostWaits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        # What numpy or Python gives comes by `lift_fresh`.
        is_host = func == _ATEN.lift_fresh.default or (bool(given) and all(map(self._waits.is_on_host, given)))
        if not is_host and given:
            self._count(func, args, kwargs)
        out = func(*args, **kwargs)
        if is_host:
            for each in tree_leaves(out):
                if isinstance(each, torch.Tensor):
                    self._waits.mark(each)
        return out

    def _count(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        name, waits = func.overloadpacket.__name__, self._waits
        if name in _WAITING or (func == _ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            waits.count(name)
        elif name in ("masked_fill", "masked_fill_") and isinstance(args[2], torch.Tensor):
            # CUDA's kernel reads the value (aten/src/ATen/native/cuda/Indexing.cu).
            if not waits.is_on_host(args[2]):
                waits.count(name)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            indices = [each for each in args[1] if isinstance(each, torch.Tensor)]
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                waits.count(f"{name} by a mask")
            if any(waits.is_on_host(each) and each.ndim for each in indices):
                waits.count(f"{name} by positions on the host")
        elif name == "copy_":
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            waits.count_copy(
                args[1],
                to_host=waits.is_on_host(args[0]),
                non_blocking=bool(non_blocking),
                is_pinned=waits.is_pinned(args[0]),
            )


class _Stream:
    """A stream of the imagined accelerator; all of them are one."""

    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits

    def synchronize(self) -> None:
        """Let the host wait for everything before."""
        self._waits.count("stream synchronized")

    def wait_event(self, event: "_Event") -> None:
        """Let later work of the stream wait for an event; the host goes on."""

    def wait_stream(self, stream: "_Stream") -> None:
        """Let later work of the stream wait for another one; the host goes on."""


class _Event(_Stream):
    """A moment of a stream."""

    def record(self, stream: _Stream | None = None) -> None:
        """Take the present moment of a stream."""

    def query(self) -> bool:
        """Whether the moment has passed."""
        return True


@contextmanager
def imagined_accelerator() -> Iterator[HostWaits]:
    """While this is open, an engine that is started and run computes on the imagined accelerator."""
    from deepspeed.accelerator import get_accelerator

    accelerator, waits = get_accelerator(), HostWaits()
    kind = type(accelerator)
    # As CUDA's (DeepSpeed 0.19.8, accelerator/cuda_accelerator.py).
    dtypes = {"ByteTensor": torch.uint8, "FloatTensor": torch.float, "IntTensor": torch.int, "LongTensor": torch.long}
    members: dict[str, Any] = {
        name: property(lambda _, dtype=dtype: partial(torch.tensor, dtype=dtype, device=DEVICE))
        for name, dtype in dtypes.items()
    }
    members["device_name"] = lambda _, index=None: str(DEVICE)
    members["current_device_name"] = lambda _: str(DEVICE)
    members["synchronize"] = lambda _, index=None: waits.count("synchronize")
    members["on_accelerator"] = lambda _, tensor: not waits.is_on_host(tensor)
    members["pin_memory"] = lambda _, tensor, make_copy=True, match_shape=True: tensor.pin_memory()
    stream = _Stream(waits)
    members |= {"Event": property(lambda _: partial(_Event, waits)), "Stream": property(lambda _: lambda: stream)}
    members |= dict.fromkeys(("current_stream", "default_stream"), lambda _, index=None: stream)
    members |= dict.fromkeys(("is_synchronized_device", "resolves_data_dependency"), lambda _: False)
    members |= dict.fromkeys(("use_host_timers", "handles_memory_backpressure"), lambda _: True)
    accelerator.__class__ = type("ImaginedAccelerator", (kind,), members)
    try:
        # Checkpointing compares the devices of tensors; some it sees while the mode handles a call, and is off.
        without_devices = {"default": lambda tensor: (tensor.shape, tensor.dtype)}
        with (
            patch.dict(_allowed_determinism_checks_to_fns, without_devices),
            # It takes torch's streams alone.
            patch.object(torch.Tensor, "record_stream", lambda *_: None),
            _Calls(waits),
            _Operators(waits),
        ):
            yield waits
    finally:
        accelerator.__class__ = kind
