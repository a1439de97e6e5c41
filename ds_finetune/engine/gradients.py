"""The gradients of a step: their global norm, clipping without DeepSpeed, and detection of NaN and infinity."""

import itertools
import math
import re
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ds_finetune.engine.groups.collectives import all_gather_object
from ds_finetune.engine.groups.process_groups import Groups
from ds_finetune.engine.state.parameter_tags import is_copy, is_expert, loss_of
from ds_finetune.plan.mesh import Mesh


def clip_gradients(
    params: Sequence[nn.Parameter], max_norm: float, groups: Groups, *, losses: Iterable[str], device: torch.device
) -> list[float]:
    """Clip the gradients of `params` to a global norm of `max_norm` (0: no limit). Returns norms before clipping;
    collective. The first norm is that of parameters that the objective trains. Then follows one norm for each of the
    auxiliary `losses`, of the parameters that only this loss trains. Each norm clips its own parameters. If any norm is
    not finite, nothing is scaled.
    """
    parts = [[param for param in params if loss_of(param) == loss] for loss in (None, *losses)]
    norms = torch.stack([global_gradient_norm(part, groups, device) for part in parts])
    values = norms.tolist()
    if max_norm and all(map(math.isfinite, values)):
        for part, norm in zip(parts, norms.unbind(), strict=True):
            torch.nn.utils.clip_grads_with_norm_(part, max_norm, norm)
    return values


def global_gradient_norm(params: Sequence[nn.Parameter], groups: Groups, device: torch.device) -> torch.Tensor:
    """Global norm of the gradients, after their reduction over data parallel ranks: fp32 scalar on `device`;
    collective. Each rank has a shard of the gradients, and each element counts once: squares are summed over the tensor
    parallel group for sharded parameters, over the expert parallel group for experts, and over pipeline stages for all.
    """
    square = torch.zeros((), device=device)
    for has_shards, has_experts in itertools.product((False, True), repeat=2):
        grads = [
            param.grad
            for param in params
            if param.grad is not None
            and not is_copy(param)
            and (param.model_parallel, is_expert(param)) == (has_shards, has_experts)  # type: ignore[attr-defined]
        ]
        # Without gradients, torch would return the norm on the host instead of `device`.
        part = torch.nn.utils.get_total_norm(grads).to(device) ** 2 if grads else torch.zeros((), device=device)
        for group, is_distributed in ((groups.tensor, has_shards), (groups.experts, has_experts), (groups.stage, True)):
            if group is not None and is_distributed:
                dist.all_reduce(part, group=group.group)
        square += part
    return square.sqrt()


_LAYER = re.compile(r"\.layers\.(\d+)\.")


class FiniteProbe:
    """Detects non-finite gradients by autograd hooks, before a reduction can spread a NaN to other ranks."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, param) for name, param in named if param.requires_grad]
        self._names = [name for name, _ in trained]
        self._seen: dict[int, torch.Tensor] = {}
        for index, (_, param) in enumerate(trained):
            param.register_hook(lambda grad, index=index: self._check(index, grad))

    def reset(self) -> None:
        """Forget the gradients of earlier steps. The engine calls this at the start of an optimizer step."""
        self._seen.clear()

    def is_bad(self) -> torch.Tensor:
        """Whether any gradient on this rank since `reset` had a NaN or infinity: a scalar on the gradients' device."""
        if not self._seen:
            return torch.zeros((), dtype=torch.bool)
        return ~torch.isfinite(torch.stack(list(self._seen.values())).sum())

    def culprit(self, mesh: Mesh) -> str:
        """Text that names the parameter with the first non-finite gradient, and a rank that has it; collective."""
        names = all_gather_object(
            next((self._names[index] for index, value in self._seen.items() if not bool(torch.isfinite(value))), None)
        )
        ranks = list(range(len(names)))
        if mesh.pp > 1:
            # In a pipeline, a non-finite gradient spreads from later layers to earlier ones: later layers come first.
            ranks.sort(key=lambda rank: -_depth(names[rank] or "", is_last=mesh.coordinate("pp", rank) == mesh.pp - 1))
        culprits = [f"{names[rank]} on rank {rank}" for rank in ranks if names[rank]]
        return culprits[0] if culprits else "no single gradient; the reduction overflowed"

    def _check(self, index: int, grad: torch.Tensor) -> None:
        # Whether a gradient is finite is seen from its sum x: x * 0 is 0 if x is finite, else NaN. fp16 is summed in
        # fp32, because a sum in fp16 may overflow. For bf16 torch itself accumulates in fp32.
        wide = torch.float32 if grad.dtype == torch.float16 else None
        zero_or_nan = (grad.detach().sum(dtype=wide) * 0).float()
        self._seen[index] = self._seen[index] + zero_or_nan if index in self._seen else zero_or_nan


def _depth(name: str, *, is_last: bool) -> float:
    """Position of a parameter in the model, for sorting: its layer number, -1 for the embedding, and infinity for the
    final norm and the head, which are on the last pipeline stage.
    """
    layer = _LAYER.search(name)
    return int(layer[1]) if layer else math.inf if is_last else -1
