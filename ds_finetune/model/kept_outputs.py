"""Outputs that a recomputed layer saves in forward: the experts chosen by its router and, with selective
recomputation, the outputs of some operations.

Recomputation need not be bit-identical to forward: NCCL on NVLink switches may sum in another order each time, which
changes hidden states by a rounding, and the experts of some tokens. Backward would then combine rows, outputs and
exchanges of forward with other choices. So experts are chosen once. Their weights, which have a gradient, are taken
from the recomputed scores of the chosen experts.

Attention and the products of routed experts take most time per byte of output, and the exchange of rows between ranks
makes ranks wait for each other. So the outputs of these operations are saved.

torch's contexts for selective checkpointing (torch 2.13, utils/checkpoint.py:1470,
create_selective_checkpoint_contexts) require that recomputation runs the same operations as forward, in the same order.
Under ZeRO-3 it does not: hooks gather weights, and whether a gather is needed depends on what was fetched before. So
operations are intercepted only where this program calls them by name.
"""

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

P = ParamSpec("P")
T = TypeVar("T")

SAVED_OPERATIONS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "aten::_grouped_mm",
        "transformers::grouped_mm_fallback",
        "ds_finetune::grouped_product",
    }
)
"""Operations whose outputs selective recomputation saves. Attention made of several operations, which torch uses where
no kernel fits, is not among them, because its backward needs the outputs of all these operations.
"""


class KeptOutputs(TorchDispatchMode):
    """Saved outputs of one forward of one layer. As a torch dispatch mode it records operations in forward; in
    recomputation it returns the saved outputs, in the same order, without running the operations.
    """

    def __init__(self, outputs: deque[Any], *, is_recomputing: bool, is_selective: bool) -> None:
        super().__init__()
        self._outputs, self._is_recomputing, self.is_selective = outputs, is_recomputing, is_selective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Called by torch for each operation while the mode is active."""

        def compute() -> Any:  # noqa: ANN401
            return func(*args, **(kwargs or {}))

        return self.keep(compute) if func.name() in SAVED_OPERATIONS else compute()

    def keep(self, compute: Callable[[], T]) -> T:
        """Return the result of `compute` and save it in forward; in recomputation return the saved result. It has no
        autograd history.
        """
        if self._is_recomputing:
            return tree_map_only(_Kept, _Kept.unchanged, self._outputs.popleft())  # type: ignore[no-any-return]
        result = compute()
        self._outputs.append(tree_map_only(torch.Tensor, _Kept, result))
        return result


class _KeptChoices(TorchDispatchMode):
    """Makes `topk` choose only in forward. In recomputation it gathers the values at the choices that forward saved."""

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__()
        self._kept = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Called by torch for each operation while the mode is active."""
        options = kwargs or {}
        if func is not torch.ops.aten.topk.default:
            return func(*args, **options)
        scores, dim = args[0], args[2] if len(args) > 2 else options.get("dim", -1)
        small = torch.int16 if scores.shape[dim] <= 2**15 else torch.int32
        # Dispatch modes run below autograd, which sends the values' gradient to the scores at `chosen`.
        chosen = self._kept.keep(lambda: func(*args, **options)[1].to(small)).long()
        return scores.gather(dim, chosen), chosen


class _Kept:
    """A saved tensor with its version, which counts its in-place changes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Autograd attaches a history to the tensor itself, which would keep this object alive, so a detached tensor is
        # saved. Dispatch modes run below autograd, where both share a version only if this key is not excluded (torch
        # 2.13, utils/checkpoint.py, `_maybe_detach`).
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor, self._version = tensor.detach(), tensor._version

    def unchanged(self) -> torch.Tensor:
        assert self._tensor._version == self._version, "a kept output was changed in place"
        return self._tensor


class _Current(threading.local):
    """The saved outputs of the current layer, one per thread since backward has threads of its own."""

    kept: KeptOutputs | None = None


_current = _Current()


class _InLayer(AbstractContextManager[None]):
    def __init__(self, outputs: KeptOutputs) -> None:
        self._kept = outputs

    def __enter__(self) -> None:
        self._before, _current.kept = _current.kept, self._kept

    def __exit__(self, *_: object) -> None:
        _current.kept = self._before


def layer_contexts(*, is_selective: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for the forward and the recomputation of a layer, as `context_fn` of torch's `checkpoint`."""
    outputs: deque[Any] = deque()
    forward, again = (
        KeptOutputs(outputs, is_recomputing=is_again, is_selective=is_selective) for is_again in (False, True)
    )
    return _InLayer(forward), _InLayer(again)


def current_outputs() -> KeptOutputs | None:
    """The saved outputs of the current layer if it is recomputed selectively. None in other layers and where gradients
    are off, as in a tile of an MLP, which is recomputed in full.
    """
    outputs = _current.kept
    return outputs if outputs is not None and outputs.is_selective and torch.is_grad_enabled() else None


def keep_choices(module: nn.Module) -> None:
    """Make `topk` choose experts only in forward, not in recomputation. `module` is a router, or a parent of one."""
    forward = module.forward

    @wraps(forward)
    def forward_or_repeat(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        outputs = _current.kept
        with nullcontext() if outputs is None else _KeptChoices(outputs):
            return forward(*args, **kwargs)

    module.forward = forward_or_repeat


def save_outputs(compute: Callable[P, T]) -> Callable[P, T]:
    """Wrap `compute` so that its operations in `SAVED_OPERATIONS` save their outputs in selectively recomputed layers.

    Attention with dropout is recomputed; otherwise later dropouts of the layer would use the random numbers that
    attention used in forward.
    """

    @wraps(compute)
    def compute_or_keep(*args: P.args, **kwargs: P.kwargs) -> T:
        mode = current_outputs()
        if mode is None or kwargs.get("dropout") or kwargs.get("dropout_p"):
            return compute(*args, **kwargs)
        with mode:
            return compute(*args, **kwargs)

    return compute_or_keep
