"""Records the order of streams on an imagined accelerator, and finds accesses to memory that nothing orders.

The CPU computes in the order of the program, so numbers are right here whatever the streams are told. What is recorded:
which stream each operator would run on, what it reads and writes, which stream waits for which, and where memory is
freed. Two accesses to the same bytes, one of them a write, must be ordered by a wait; memory that is freed may be
written at once by the stream that allocated it, unless `record_stream` keeps it for another one, as torch's allocator
does for CUDA (2.13, c10/cuda/CUDACachingAllocator.cpp).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]


@dataclass(frozen=True)
class _Access:
    stream: str
    moment: int
    start: int
    end: int
    is_write: bool
    operator: str

    def is_before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.moment


@dataclass
class _Memory:
    """A piece of memory: who allocated it, how it was used, and for which streams the allocator keeps it."""

    stream: str
    alive: StorageWeakRef
    accesses: list[_Access] = field(default_factory=list)
    kept_for: set[str] = field(default_factory=set)


class _Stream:
    def __init__(self, order: "StreamOrder", name: str) -> None:
        self._order, self.name, self.clock = order, name, Clock()

    def wait_stream(self, other: "_Stream") -> None:
        """Let later work of this stream wait for everything that another one has been given."""
        self._order.join(self.clock, other.clock)

    def wait_event(self, event: "_Event") -> None:
        """Let later work of this stream wait for a moment of another one."""
        self._order.join(self.clock, event.clock)

    def synchronize(self) -> None:
        """Let the host wait, and with it everything that it will give to any stream."""
        self._order.join(self._order.host, self.clock)


class _Event:
    def __init__(self, order: "StreamOrder") -> None:
        self._order, self.clock = order, Clock()

    def record(self, stream: _Stream | None = None) -> None:
        """Take the present moment of a stream."""
        self.clock = Clock((stream or self._order.current).clock)

    def synchronize(self) -> None:
        """Let the host wait for the moment."""
        self._order.join(self._order.host, self.clock)


class StreamOrder(TorchDispatchMode):
    """What was given to which stream, and the accesses that nothing orders, each a line of `races`."""

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.ran: set[tuple[str, str]] = set()
        """Streams and operators that were recorded."""
        self.host = Clock()
        self.streams = [_Stream(self, "default")]
        self.current = self.streams[0]
        self._memory: dict[int, _Memory] = {}
        self._freed: dict[str, list[_Access]] = {}

    def new_stream(self) -> _Stream:
        """Another stream of the accelerator."""
        self.streams.append(_Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: _Stream) -> Iterator[None]:
        """Give what is computed inside to this stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def join(self, clock: Clock, other: Clock) -> None:
        """Let a clock know all moments of another one."""
        self.check_freed()
        for name, moment in other.items():
            clock[name] = max(clock.get(name, 0), moment)

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        for stream in self.streams:
            stream.synchronize()

    def keep(self, tensor: torch.Tensor, stream: _Stream) -> None:
        """`Tensor.record_stream`."""
        self._of(tensor).kept_for.add(stream.name)

    def check_freed(self) -> None:
        """Take the memory that was freed since the last operator: the next one of its stream that allocates may get it,
        and write to it while others still use it.
        """
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                del self._memory[key]
                others = (each for each in memory.accesses if each.stream not in (memory.stream, *memory.kept_for))
                self._freed.setdefault(memory.stream, []).extend(others)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.check_freed()
        out = func(*args, **(kwargs or {}))
        stream, given = self.current, [(args, kwargs or {})]
        self.join(stream.clock, self.host)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        written = {id(each) for each in self._written(func, args, kwargs or {})}
        read = [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
        storages = {each.untyped_storage()._cdata for each in read}
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        made = [each for each in made if each.untyped_storage()._cdata not in storages]
        if not made and not written:
            return out
        self.ran.add((stream.name, str(func)))
        for each in read:
            self._access(each, str(func), is_write=id(each) in written)
        for each in made:
            self._access(each, str(func), is_write=True)
        for access in self._freed.pop(stream.name, ()) if made else ():
            if not access.is_before(stream.clock):
                self.races.append(f"freed on {stream.name} before {access.operator} on {access.stream}")
        return out

    def _written(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        found = []
        for number, argument in enumerate(func._schema.arguments):
            # The schemas of collectives do not say what they write.
            if func.namespace == "c10d" or (argument.alias_info is not None and argument.alias_info.is_write):
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
        return found

    def _of(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        made = _Memory(self.current.name, StorageWeakRef(storage))
        return self._memory.setdefault(storage._cdata, made)

    def _access(self, tensor: torch.Tensor, operator: str, *, is_write: bool) -> None:
        stream, memory = self.current, self._of(tensor)
        size = tensor.element_size()
        start = tensor.storage_offset() * size
        length = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        access = _Access(
            stream.name,
            stream.clock[stream.name],
            start,
            start + length * size * bool(tensor.numel()),
            is_write,
            operator,
        )
        for before in memory.accesses:
            is_shared = (is_write or before.is_write) and before.start < access.end and access.start < before.end
            if is_shared and before.stream != stream.name and not before.is_before(stream.clock):
                self.races.append(f"{operator} on {stream.name} beside {before.operator} on {before.stream}")
        memory.accesses.append(access)


@contextmanager
def imagined_streams() -> Iterator[StreamOrder]:
    """While this is open, DeepSpeed's accelerator has streams, and what is computed is recorded."""
    from deepspeed.accelerator import get_accelerator

    accelerator, order = get_accelerator(), StreamOrder()
    kind = type(accelerator)
    members: dict[str, Any] = dict.fromkeys(("is_synchronized_device", "resolves_data_dependency"), lambda _: False)
    members |= {
        "Stream": property(lambda _: order.new_stream),
        "Event": property(lambda _: partial(_Event, order)),
        "stream": lambda _, stream: order.on(stream),
        "current_stream": lambda _, index=None: order.current,
        "default_stream": lambda _, index=None: order.streams[0],
        "synchronize": lambda _, index=None: order.synchronize(),
        "pin_memory": lambda _, tensor, make_copy=True, match_shape=True: tensor,
    }
    accelerator.__class__ = type("ImaginedAccelerator", (kind,), members)
    try:
        with patch.object(torch.Tensor, "record_stream", lambda tensor, stream: order.keep(tensor, stream)), order:
            yield order
    finally:
        accelerator.__class__ = kind
