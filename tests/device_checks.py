"""A device and a process group that are not there: collectives refuse tensors on the CPU, as NCCL does, and every other
rank has what this one has.

`on_device(world_size)` makes `device="cuda"` an imaginary device, whose tensors compute on the CPU and know where they
are, and stands in for every function of torch.distributed: one that is given a tensor on the CPU raises CpuTensor, one
that is not imitated here AssertionError. Nothing of a GPU, NCCL or DeepSpeed is needed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy:0")
"""What stands for the GPU: the one kind of device that torch 2.13 makes tensors of without a driver and runs backward
for on the CPU's thread.
"""


class CpuTensor(AssertionError):
    """A tensor on the CPU went into a collective, which NCCL refuses."""


class MixedDevices(AssertionError):
    """An operator was given tensors of both devices, which CUDA refuses."""


_TAKE_BOTH = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.set_.source_Tensor}
"""Operators between devices. CUDA takes numbers, tensors without a dimension, from the CPU in all operators."""


class OnDevice(torch.Tensor):
    """A tensor on the imaginary device; `held` has its numbers."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Self:  # noqa: ANN001 - a class
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Torch's own knows no subclasses."""
        return self.held.tolist()


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What an operator of torch gives, on the device that it is asked for, else on that of its tensors."""
    asked = kwargs.get("device")
    is_there = (
        any(isinstance(leaf, OnDevice) for leaf in tree_leaves((args, kwargs)))
        if asked is None
        else torch.device(asked).type == DEVICE.type
    )
    _check_same_device(func, tree_leaves((args, kwargs)))
    kwargs = kwargs if asked is None or torch.device(asked).type == "meta" else kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map(_held, (args, kwargs))
    if func is torch.ops.aten.histc.default:
        # Whole numbers are counted on GPUs alone (transformers 5.23, integrations/moe.py).
        args = (args[0].float(), *args[1:])
    out = func(*args, **kwargs)
    return tree_map(lambda leaf: OnDevice(leaf) if isinstance(leaf, torch.Tensor) and is_there else leaf, out)


def _check_same_device(func: Any, leaves: list[Any]) -> None:
    """MixedDevices where an operator of one device gets tensors of both."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    on_cpu = [leaf for leaf in tensors if not isinstance(leaf, OnDevice) and leaf.dim() and leaf.device.type == "cpu"]
    if on_cpu and len(on_cpu) < sum(leaf.dim() > 0 for leaf in tensors) and func not in _TAKE_BOTH:
        shapes = ", ".join(f"{leaf.dtype} {tuple(leaf.shape)}" for leaf in on_cpu)
        raise MixedDevices(f"{func} was given {shapes} on the CPU and tensors of the device")


def _held(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, OnDevice) else leaf


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Cuda(TorchFunctionMode):
    """`cuda` in any argument is the imaginary device; torch would look for a driver before any mode of operators is
    asked.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(leaf: Any) -> Any:
            is_cuda = (isinstance(leaf, str) and leaf.startswith("cuda")) or (
                isinstance(leaf, torch.device) and leaf.type == "cuda"
            )
            return DEVICE if is_cuda else leaf

        if func is torch.device:
            # A name alone; torch asks it for the module of a kind of device.
            return func(*args, **(kwargs or {}))
        args, kwargs = tuple(map(here, args)), {name: here(value) for name, value in (kwargs or {}).items()}
        if func is torch.tensor and kwargs.get("device") == DEVICE:
            # Made without an operator that a mode would see.
            return OnDevice(func(*args, **kwargs | {"device": "cpu"}))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ImaginaryGroup:
    """Ranks of which this process is number `place`, and which all have what it has."""

    size: int
    place: int = 0


class _Done:
    """What a collective returns that is not waited for."""

    def wait(self) -> None:
        pass


class _Collectives:
    """What torch.distributed does among such ranks, and how often which function was called."""

    def __init__(self, world: ImaginaryGroup) -> None:
        self.calls: list[str] = []
        self._world = world

    def _ranks(self, group: Any) -> ImaginaryGroup:
        return group if isinstance(group, ImaginaryGroup) else self._world

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(self._ranks(group).size)

    def all_gather(self, parts: list[torch.Tensor], part: torch.Tensor, group: Any = None) -> None:
        for each in parts:
            each.copy_(part)

    def gather(
        self, part: torch.Tensor, parts: list[torch.Tensor] | None = None, group: Any = None, group_dst: int = 0
    ) -> None:
        assert (parts is not None) == (self._ranks(group).place == group_dst)
        for each in parts or ():
            each.copy_(part)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        given: torch.Tensor,
        taken: list[int] | None = None,
        sent: list[int] | None = None,
        group: Any = None,
        *,
        async_op: bool = False,
    ) -> "_Done | None":
        """Of equal parts; of others the numbers do not matter, since ranks that hold other experts cannot have what
        this one has.
        """
        ranks = self._ranks(group)
        if taken is None or sent is None:
            out.copy_(torch.cat([given.chunk(ranks.size)[ranks.place]] * ranks.size))
        else:
            assert (sum(taken), sum(sent)) == (len(out), len(given)), (taken, sent)
            out.zero_()
        return _Done() if async_op else None

    def broadcast(self, tensor: torch.Tensor, group: Any = None, group_src: int = 0) -> None:
        pass

    def send(self, tensor: torch.Tensor, group: Any = None, group_dst: int = 0) -> None:
        pass

    def recv(self, tensor: torch.Tensor, group: Any = None, group_src: int = 0) -> None:
        tensor.zero_()

    def barrier(self) -> None:
        pass

    def all_gather_object(self, found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    def get_world_size(self, group: Any = None) -> int:
        return self._ranks(group).size

    def get_rank(self, group: Any = None) -> int:
        return self._ranks(group).place

    def get_backend(self, group: Any = None) -> str:
        return "nccl"


_TAKE_TENSORS = {"all_reduce", "all_gather", "gather", "all_to_all_single", "broadcast", "send", "recv"}
_OTHERS = (
    "all_to_all",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "scatter",
    "isend",
)
_OTHERS += (
    "irecv",
    "batch_isend_irecv",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "monitored_barrier",
)


@contextmanager
def on_device(world_size: int = 1, *, rank: int = 0) -> Iterator[list[str]]:
    """The imaginary device and its collectives; gives the names of those called, in order."""
    collectives = _Collectives(ImaginaryGroup(world_size, rank))

    def checked(name: str) -> Callable[..., Any]:
        function = getattr(collectives, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            collectives.calls.append(name)
            # Tensors alone: values of an object collective travel as bytes, which torch puts on the device itself.
            given = (
                [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                if name in _TAKE_TENSORS
                else []
            )
            wrong = [
                f"{leaf.dtype} {tuple(leaf.shape)}"
                for leaf in given
                if not isinstance(leaf, OnDevice) and not _is_held(leaf)
            ]
            if wrong:
                raise CpuTensor(f"{name} was given {', '.join(wrong)} on the CPU")
            return function(*args, **kwargs)

        return call

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"torch.distributed.{name} is not imitated in {__name__}")

        return call

    with ExitStack() as stack:
        for name in (name for name in vars(_Collectives) if not name.startswith("_")):
            stack.enter_context(patch.object(dist, name, checked(name)))
        for name in _OTHERS:
            stack.enter_context(patch.object(dist, name, refused(name)))
        stack.enter_context(_Operators())
        stack.enter_context(_Cuda())
        yield collectives.calls


def _is_held(leaf: torch.Tensor) -> bool:
    """A parameter or a view of autograd's over a tensor of the device says where it is."""
    return leaf.device.type == DEVICE.type
