"""DeepSpeed's ZeRO-3: forwards that gather nothing while all weights are whole, and gathers on a single rank."""

import importlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any

from torch import nn

from ds_finetune.engine.patches.deepspeed_init import forget_second_copies
from ds_finetune.foreign.guard import Foreign, replaced

_HOOKS = Foreign("deepspeed", "runtime/zero/parameter_offload.py:181-182, 362-525")
_PARTS = Foreign("deepspeed", "runtime/zero/partition_parameters.py:1323-1327, 1604-1610, 1778-1814")
_SINGLE = Foreign("deepspeed", "runtime/zero/partition_parameters.py:61-120")
_SINGLE_HANDLES = {"NoGatherHandle": "param", "NoGatherCoalescedHandle": "params"}
"""Gathers of parameters that one rank holds whole, and the private attribute of each with its parameters."""


@contextmanager
def whole_weights(optimizer: Any, lm: nn.Module) -> Iterator[None]:  # noqa: ANN401 - DeepSpeed's of stage 3
    """While this is open, each rank has the weights of `lm` whole, and forwards without gradients run as without ZeRO.

    Collective at both ends. DeepSpeed's hooks would partition a parameter after each module that uses it, and a forward
    in another order than that of training would make it record its order anew.
    """
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload

    offload = _HOOKS.attribute(optimizer, "parameter_offload")
    handles = [*_HOOKS.attribute(offload, "forward_hooks"), *_HOOKS.attribute(offload, "backward_hooks")]
    status = _HOOKS.attribute(parameter_offload, "ZeroParamStatus").NOT_AVAILABLE
    # Small parameters stay whole once they are gathered; partitioning them here would be one gather more in training.
    partitioned = [param for param in lm.parameters() if getattr(param, "ds_status", None) is status]
    with (
        deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)),
        _without_hooks(lm, {handle.id for handle in handles}),
    ):
        yield


@contextmanager
def repartitioned(lm: nn.Module) -> Iterator[None]:
    """While this is open, the parts of parameters that ZeRO-3 keeps on each rank may be changed: afterwards those that
    were whole are gathered from their parts again, as small ones are after each step. Collective.
    """
    from deepspeed.runtime.zero import partition_parameters

    status = _PARTS.attribute(partition_parameters, "ZeroParamStatus").AVAILABLE
    whole: list[Any] = [param for param in lm.parameters() if getattr(param, "ds_status", None) is status]
    for param in whole:
        param.partition()
    yield
    forget_second_copies(lm)
    for first in whole[:1]:
        first.all_gather(whole)


@contextmanager
def _without_hooks(lm: nn.Module, numbers: Collection[int]) -> Iterator[None]:
    """While this is open, the modules of `lm` do not have the hooks of these numbers; their order stays."""
    with ExitStack() as stack:
        for module in lm.modules():
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, name)
                kept = OrderedDict((number, hook) for number, hook in hooks.items() if number not in numbers)
                stack.enter_context(replaced(module, name, kept))
        yield


@contextmanager
def single_gathers_without_waits() -> Iterator[None]:
    """While this is open the host does not wait in gathers of parameters that one rank holds whole.

    DeepSpeed synchronizes the stream of gathers in each, and with it all copies from the host that it has begun ahead.
    It is not needed: the stream that computes waits for that stream on the device (partitioned_param_coordinator.py:
    415), as with gathers from other ranks. Parameters on NVMe keep the wait, since their buffer on the host is used
    again as soon as they are released.
    """
    module = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
    statuses = _SINGLE.attribute(module, "ZeroParamStatus")
    with ExitStack() as stack:
        for name, attribute in _SINGLE_HANDLES.items():
            kind = _SINGLE.attribute(module, name)
            for text in ("current_stream().synchronize()", f"self.__{attribute}", "self.__complete = True"):
                _SINGLE.source(kind, text)
            wait = partialmethod(_wait_single, kind.wait, f"_{name}__", attribute, statuses.AVAILABLE)
            stack.enter_context(replaced(kind, "wait", wait))
        yield


def _wait_single(
    handle: object, wait: Callable[..., None], prefix: str, attribute: str, available: object, **kwargs: object
) -> None:
    given = getattr(handle, prefix + attribute)
    params = given if isinstance(given, list) else [given]
    if any(param.ds_tensor.final_location == "nvme" for param in params):
        wait(handle, **kwargs)
    elif not getattr(handle, f"{prefix}complete"):
        for param in params:
            param.ds_status = available
        setattr(handle, f"{prefix}complete", True)
