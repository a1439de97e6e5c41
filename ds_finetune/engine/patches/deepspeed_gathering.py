"""Additions to DeepSpeed's ZeRO-3: forwards with gathered weights or with a copy of earlier weights, and a check that
weights are gathered after the optimizer step.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ds_finetune.engine.patches.deepspeed_init import forget_second_copies
from ds_finetune.engine.state.parameter_tags import local_shape
from ds_finetune.errors import ConfigError
from ds_finetune.foreign.guard import Foreign, replaced
from ds_finetune.plan.plan import Plan

_HOOKS = Foreign("deepspeed", "runtime/zero/parameter_offload.py:181-182, 362-525")
_PARTS = Foreign("deepspeed", "runtime/zero/partition_parameters.py:1323-1327, 1604-1610, 1778-1814")
_PERSISTENT = Foreign(
    "deepspeed", "runtime/zero/parameter_offload.py:317-335, stage3.py:2840, partition_parameters.py:2128, 2186"
)


def check_order_of_gathers(optimizer: Any, trained: nn.Module, plan: Plan) -> None:  # noqa: ANN401 - DeepSpeed's
    """Raise ConfigError if DeepSpeed might gather weights before the optimizer step has written them. DeepSpeed gathers
    persistent weights (smaller than two thresholds) at the end of a step, and then synchronises the device. With
    `overlap_comm` all other gathers run on a separate stream, so without persistent weights these gathers may read
    values from before the step.
    """
    is_ordered = plan.zero_stage < 3 or plan.device == "cpu" or plan.mesh.dp * plan.mesh.sp == 1
    zero = plan.zero
    if is_ordered or zero.get("overlap_comm", True) is False:
        return
    offload = _PERSISTENT.attribute(optimizer, "parameter_offload")
    if _PERSISTENT.attribute(offload, "persistent_parameters"):
        return
    limits = [
        f"stage3_{key}_persistence_threshold {_PERSISTENT.attribute(offload, attribute):,}"
        for key, attribute in (("param", "param_numel_persistence_threshold"), ("model", "model_persistence_threshold"))
    ]
    smallest, name = min((math.prod(local_shape(param)), name) for name, param in trained.named_parameters())
    raise ConfigError(
        f"ZeRO-3 with overlap_comm, {' and '.join(limits)}: the smallest weight, {name.removeprefix('lm.')}, has "
        f"{smallest:,} elements, so no weight is persistent, and DeepSpeed 0.19.8 may gather weights from before the "
        "last optimizer step",
        hint=f"raise both thresholds to {smallest} or more, leave them out, or set overlap_comm: false",
    )


@contextmanager
def full_weights(optimizer: Any, lm: nn.Module) -> Iterator[None]:  # noqa: ANN401 - DeepSpeed's of stage 3
    """Context in which each rank has the full weights of `lm`, and forwards without gradients run as without ZeRO.
    Collective at both ends. DeepSpeed's hooks are disabled, because they would partition a parameter after each module
    that uses it, and a forward in another order than in training would invalidate the recorded order of modules.
    """
    import deepspeed
    from deepspeed.runtime.zero import parameter_offload

    offload = _HOOKS.attribute(optimizer, "parameter_offload")
    handles = [*_HOOKS.attribute(offload, "forward_hooks"), *_HOOKS.attribute(offload, "backward_hooks")]
    numbers = {handle.id for handle in handles}
    status = _HOOKS.attribute(parameter_offload, "ZeroParamStatus").NOT_AVAILABLE
    # Small parameters are always gathered. If this context partitioned them, training would have to gather them again.
    partitioned = [param for param in lm.parameters() if getattr(param, "ds_status", None) is status]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)), ExitStack() as stack:
        for module in lm.modules():
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, name)
                remaining = OrderedDict((number, hook) for number, hook in hooks.items() if number not in numbers)
                stack.enter_context(replaced(module, name, remaining))
        yield


class KeptWeights:
    """Copy of the model's parameters and buffers on the host, with which the model can run again later in training.
    Under ZeRO-3 each rank copies its own partitions.
    """

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - the module that DeepSpeed wraps
        self._lm: nn.Module = module.lm
        # DeepSpeed stores a rank's partition of a parameter in the attribute ds_tensor.
        params = [getattr(param, "ds_tensor", param) for param in module.lm.parameters()]
        self._tensors: list[torch.Tensor] = [*params, *module.lm.buffers(), *module.in_fp32.values.values()]
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Context in which the model computes with the copied weights, on its device; collective under ZeRO-3."""
        current = [tensor.data for tensor in self._tensors]
        self._set([value.to(now.device) for value, now in zip(self._values, current, strict=True)])
        try:
            yield
        finally:
            self._set(current)

    def _set(self, values: Sequence[torch.Tensor]) -> None:
        """Overwrite the model's weights. Parameters that ZeRO-3 keeps gathered are gathered again afterwards."""
        from deepspeed.runtime.zero import partition_parameters

        status = _PARTS.attribute(partition_parameters, "ZeroParamStatus").AVAILABLE
        gathered: list[Any] = [param for param in self._lm.parameters() if getattr(param, "ds_status", None) is status]
        for param in gathered:
            param.partition()
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.data = value
        forget_second_copies(self._lm)
        for first in gathered[:1]:
            first.all_gather(gathered)
