"""Tensors of a GPU that is not there: shapes, dtypes and strides without numbers, forward and backward.

Inside `fake_cuda()` tensors made on `cuda` are fake ones, and tell this program's code and transformers' that they are
on `cuda:0`: their branches for GPUs run, torch's checks of the kernels of GPUs do too (shapes, dtypes, multiples of 16
bytes), and an operator on tensors of both devices raises. torch's autograd has no place for a device without a driver,
so it is told of the one kind of device that runs backward on the CPU's thread.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ds_finetune.foreign.torch_nn import fake_tensors
from ds_finetune.trainer.tracing.kernels import CACHED_LAYOUTS

DEVICE = torch.device("cuda:0")
_FOR_AUTOGRAD = torch.device("lazy:0")
_DEVICE_OF = torch.ops.prim.device.default
_dispatch: Any = FakeTensor.__torch_dispatch__


def _told(func: Any, found: Any) -> Any:
    """What torch's C++ hears of a tensor's device."""
    return _FOR_AUTOGRAD if func is _DEVICE_OF and found == DEVICE else found


def _dispatch_of_tensor(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return _told(func, _dispatch.__func__(cls, func, types, args, kwargs or {}))


def _addmm_of_dtype(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor
) -> torch.Tensor:
    """The checks of `torch.addmm` for a product of 16-bit matrices that is added to an fp32 total. Fake tensors of torch
    before 2.13 fail there, since they take the dtype of the result for a factor.
    """
    product = torch.mm(left, right)
    assert product.dtype in (torch.bfloat16, torch.float16)
    assert total.dtype == out.dtype == out_dtype == torch.float32
    assert total.shape == out.shape == product.shape
    return out


class _Mode(FakeTensorMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(leaf: Any) -> Any:
            return DEVICE if isinstance(leaf, torch.device) and leaf == _FOR_AUTOGRAD else leaf

        args, kwargs = tree_map(here, (args, kwargs or {}))
        if func is torch.ops.aten.addmm.dtype_out:
            return _addmm_of_dtype(*args, **kwargs)
        return _told(func, super().__torch_dispatch__(func, types, args, kwargs))


class _WithoutPinning(TorchFunctionMode):
    """Pinned memory needs a driver; here it is plain memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """A fake GPU of this compute capability."""
    is_cuda = property(lambda tensor: tensor.fake_device.type == "cuda")
    with (
        patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        patch.object(FakeTensor, "is_cuda", is_cuda, create=True),
        patch.object(FakeTensor, "__torch_dispatch__", classmethod(_dispatch_of_tensor)),
        fake_tensors(_Mode()),
        _WithoutPinning(),
        ExitStack() as stack,
    ):
        for each in CACHED_LAYOUTS:
            each.cache_clear()
            stack.callback(each.cache_clear)
        yield
