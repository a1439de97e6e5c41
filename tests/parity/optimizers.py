"""Each optimizer by its published rule, in plain PyTorch."""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import nn

LR, BETAS, EPS = 1e-3, (0.9, 0.95), 1e-8


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum (Chen et al., arXiv 2302.06675, algorithm 2), decoupled decay."""

    def __init__(self, groups: Iterable[Any]) -> None:
        super().__init__(groups, {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("m", torch.zeros_like(p))
                direction = (BETAS[0] * moment + (1 - BETAS[0]) * p.grad).sign()
                p.sub_(LR * (direction + group["weight_decay"] * p))
                moment.mul_(BETAS[1]).add_(p.grad, alpha=1 - BETAS[1])


class Muon(torch.optim.Optimizer):
    """Nesterov momentum orthogonalised by five Newton-Schulz steps (Jordan 2024), decoupled decay; each expert on its
    own.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        super().__init__(groups, {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("m", torch.zeros_like(p))
                moment.lerp_(p.grad, 0.05)
                update = _orthogonal(p.grad.lerp(moment, 0.95)) * max(1, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - LR * group["weight_decay"]).sub_(LR * update)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class _Both:
    """Two optimizers stepped as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts

    def step(self) -> None:
        for part in self._parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self._parts:
            part.zero_grad()


def plain_optimizer(name: str, model: nn.Module, weight_decay: float) -> Any:
    """The reference of `name` over `model`; matrices are decayed, vectors are not."""
    made: dict[str, Callable[[Any], Any]] = {
        "AdamW": lambda groups: torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS),
        "Adam": lambda groups: torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS),
        "Lion": Lion,
        "SGD": lambda groups: torch.optim.SGD(groups, lr=LR),
        "RAdam": lambda groups: torch.optim.RAdam(groups, lr=LR, betas=BETAS, eps=EPS, decoupled_weight_decay=True),
        "Adamax": lambda groups: torch.optim.Adamax(groups, lr=LR, betas=BETAS, eps=EPS),
        "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=LR, eps=EPS),
        "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=LR),
        "AdamW8bit": lambda groups: import_module("bitsandbytes").optim.AdamW8bit(groups, lr=LR, betas=BETAS, eps=EPS),
        "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=LR, eps=EPS),
    }
    if name != "Muon":
        return made[name](_groups(list(model.parameters()), weight_decay))
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return _Both(Muon(_groups(matrices, weight_decay)), made["AdamW"](_groups(rest, weight_decay)))


def _groups(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    matrices, vectors = ([p for p in params if (p.ndim > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
