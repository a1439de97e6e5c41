"""Fused operations as functions of autograd: a norm keeps its input and a number for each row, a rotary embedding
cosines and sines, SwiGLU gate and up. Everything else is computed again within the kernel of backward.
"""

from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
import torch._dynamo
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from ds_finetune.model.fused import formulas

_MOST_KERNELS = 64
"""Kernels that torch.compile may make of one formula."""


class Kernels(Protocol):
    """What computes the operations; `formulas` says what each computes."""

    norm: Any
    norm_backward: Any
    rotate: Any
    rotate_backward: Any
    gate: Any
    gate_backward: Any
    joined_gate: Any
    joined_gate_backward: Any


@cache
def kernels_of(name: str) -> Kernels:
    """The kernels of `model.kernels`, `liger` or `compile`. Liger is imported only where it is used."""
    if name == "liger":
        return import_module("ds_finetune.foreign.liger_operations")  # type: ignore[return-value]
    assert name == "compile", name
    names = Kernels.__annotations__
    # Sizes are symbols from the start: packed rows and the tokens of experts differ from forward to forward. None and
    # one, and rows with gaps between them, have kernels of their own; past the limit torch would end the run.
    torch._dynamo.config.recompile_limit = max(_MOST_KERNELS, torch._dynamo.config.recompile_limit)
    compiled = {each: torch.compile(getattr(formulas, each), fullgraph=True, dynamic=True) for each in names}
    return SimpleNamespace(**compiled)  # type: ignore[return-value]


class Turning(NamedTuple):
    """How a rotary embedding turns columns: so many of them, which are neighbours (`in_pairs`) or half that apart."""

    width: int
    in_pairs: bool


def norm(kernels: Kernels, hidden: torch.Tensor, weight: torch.Tensor, eps: float, *, rounds_last: bool) -> Any:  # noqa: ANN401
    """RMSNorm of the last dimension of `hidden`."""
    return _Norm.apply(kernels, hidden, weight, eps, rounds_last)


def rotate(  # noqa: PLR0913 - what is turned, and how
    kernels: Kernels, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Turning
) -> Any:  # noqa: ANN401
    """Queries and keys [rows, heads, tokens, columns], turned."""
    return _Rotation.apply(kernels, query, key, cos, sin, turn)


def gate(kernels: Kernels, gate: torch.Tensor, up: torch.Tensor) -> Any:  # noqa: ANN401
    """silu(gate) x up."""
    return _Gate.apply(kernels, gate, up)


def joined_gate(kernels: Kernels, gate_up: torch.Tensor) -> Any:  # noqa: ANN401
    """As `gate`, of both side by side."""
    return _JoinedGate.apply(kernels, gate_up)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[..., width] -> [rows, width], with neighbouring columns next to each other in memory."""
    rows = _plain(tensor.reshape(-1, tensor.shape[-1]))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is in memory. torch.compile makes one kernel for tensors with gradients and another for those
    without, and one for each way in which a tensor is a view of another.
    """
    return tensor.data


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - autograd passes inputs by position
        ctx: Any,  # noqa: ANN401
        kernels: Kernels,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounds_last: bool,
    ) -> torch.Tensor:
        out, scale = kernels.norm(_rows(hidden), _plain(weight), eps, rounds_last)
        ctx.save_for_backward(hidden, weight, scale)
        ctx.kernels, ctx.rounds_last = kernels, rounds_last
        return out.view(hidden.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        hidden, weight, scale = ctx.saved_tensors
        given = _rows(grad), _rows(hidden), _plain(weight), scale, ctx.rounds_last, ctx.needs_input_grad[2]
        d_hidden, d_weight = ctx.kernels.norm_backward(*given)
        return None, d_hidden.view(hidden.shape), d_weight, None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - as above
        ctx: Any,  # noqa: ANN401
        kernels: Kernels,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        turn: Turning,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels, ctx.turn = kernels, turn
        return kernels.rotate(*map(_plain, (query, key, cos, sin)), *turn)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_query: torch.Tensor, d_key: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        tensors = map(_plain, (d_query, d_key, *ctx.saved_tensors))
        return None, *ctx.kernels.rotate_backward(*tensors, *ctx.turn), None, None, None


class _Gate(torch.autograd.Function):
    """Kernels may overwrite gate and up with their gradients, so that another backward of one forward is an error."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        out = kernels.gate(_rows(gate).contiguous(), _rows(up).contiguous())
        return out.view(gate.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        gate, up = ctx.saved_tensors
        given = (_rows(each).contiguous() for each in (grad, gate, up))
        d_gate, d_up = ctx.kernels.gate_backward(*given)
        increment_version((gate, up))
        return None, d_gate.view(gate.shape), d_up.view(gate.shape)


class _JoinedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate_up: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return kernels.joined_gate(_rows(gate_up).contiguous()).unflatten(0, gate_up.shape[:-1])  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        (gate_up,) = ctx.saved_tensors
        d_both = ctx.kernels.joined_gate_backward(_rows(grad).contiguous(), _rows(gate_up).contiguous())
        increment_version(gate_up)
        return None, d_both.view(gate_up.shape)
