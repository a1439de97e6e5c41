"""Which parameter's gradient was not finite first, at the price of one reduction per gradient."""

from collections.abc import Sequence

import torch
from torch import nn


class FiniteProbe:
    """Watches every gradient as autograd hands it over, before any reduction can spread a NaN to other ranks."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        trained = [(name, param) for name, param in named if param.requires_grad]
        self._names = [name for name, _ in trained]
        self._seen: dict[int, torch.Tensor] = {}
        for index, (_, param) in enumerate(trained):
            param.register_hook(lambda grad, index=index: self._look(index, grad))

    def reset(self) -> None:
        """Forget what was seen; call at the start of an optimizer step."""
        self._seen.clear()

    def is_bad(self) -> bool:
        """Whether any gradient since `reset` held a NaN or an infinity on this rank."""
        if not self._seen:
            return False
        return not bool(torch.isfinite(torch.stack(list(self._seen.values())).sum()))

    def first_bad(self) -> str | None:
        """Name of the parameter whose gradient was the first not to be finite on this rank, in the order of
        backward.
        """
        return next(
            (self._names[index] for index, value in self._seen.items() if not bool(torch.isfinite(value))), None
        )

    def _look(self, index: int, grad: torch.Tensor) -> None:
        # x * 0 is 0 for finite x and NaN otherwise; fp32, since a sum of fp16 values may overflow by itself.
        found = grad.detach().sum(dtype=torch.float32) * 0
        self._seen[index] = self._seen[index] + found if index in self._seen else found
