"""Forward and backward of whole models on fake tensors, whose memory torch's own tracker counts."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed._tools import mod_tracker
from torch.distributed._tools.mem_tracker import MemTracker

from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.plan import Plan
from ds_finetune.trainer.tracing.short_model import ShortModel


def tracked_peak(plan: Plan, model: ModelPlan) -> int:
    """Bytes of activations at most with all layers of `model`, on a rank of `plan`."""
    with ShortModel(plan, model, is_full=True) as whole, _without_names():
        tracker, others = MemTracker(), () if whole.teacher is None else _tensors(whole.teacher)
        tracker.track_external(*_tensors(whole.trained), *others)
        before = _total(tracker, "current")
        with tracker:
            whole.trained(whole.rows, whole.numbers).loss.backward()
        return _total(tracker, "peak") - before


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    params = list(module.parameters())
    return [*params, *module.buffers(), *(param.grad for param in params if param.grad is not None)]


def _total(tracker: MemTracker, when: str) -> int:
    (device,) = tracker.get_tracker_snapshot(when).values()
    return int(device["Total"])


_FOLLOWED = "_track_module_params_and_buffers"
_follow: Any = getattr(MemTracker, _FOLLOWED)


@contextmanager
def _without_names() -> Iterator[None]:
    """Without the hooks by which the tracker names modules and gradients: the sum of all bytes does not need them, and
    tiles, which run without gradients, refuse them.
    """

    def follow(tracker: MemTracker, module: torch.nn.Module, **_: bool) -> Any:
        return _follow(tracker, module, install_grad_hooks=False)

    def hook(tensors: Sequence[torch.Tensor], *others: Any, **named: Any) -> Any:
        try:
            return register_multi_grad_hook(tensors, *others, **named)
        except AssertionError:
            return None

    with ExitStack() as stack:
        stack.enter_context(patch.object(mod_tracker, "register_multi_grad_hook", hook))
        stack.enter_context(patch.object(MemTracker, _FOLLOWED, follow))
        yield
