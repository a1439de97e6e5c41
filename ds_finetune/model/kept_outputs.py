"""Saves outputs of layers under activation checkpointing: the experts that a router chose and, with selective
recomputation, the outputs of some operations.

Experts are chosen once, in the forward, because recomputation may differ by rounding: NCCL on NVLink switches may sum
in another order. Some tokens would then get other experts, and backward would mix rows and outputs of different
choices. Routing weights, which have a gradient, are recomputed from the scores of the chosen experts.

Selective recomputation saves attention and the experts' products, which take most time per byte of output, and the
exchange of rows between ranks, which makes ranks wait.

torch's contexts for selective checkpointing (torch 2.13, utils/checkpoint.py:1470,
create_selective_checkpoint_contexts) need the same operations in the same order in recomputation. Under ZeRO-3
operations differ, because its hooks gather weights only if they are not gathered yet. So operations are intercepted
only in functions that this program wraps.
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
"""Operations whose outputs selective recomputation saves. Attention without a fused kernel is not listed, because its
backward needs the outputs of each of its operations.
"""


class KeptOutputs(TorchDispatchMode):
    """Saved outputs of one forward of a layer. As a torch dispatch mode it records outputs of operations in the
    forward, and in recomputation returns them in the same order without running the operations.
    """

    def __init__(self, outputs: deque[Any], *, is_recomputing: bool, is_selective: bool) -> None:
        super().__init__()
        self._outputs, self._is_recomputing, self.is_selective = outputs, is_recomputing, is_selective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Save the outputs of an operation that torch is about to run, or return saved outputs."""

        def compute() -> Any:  # noqa: ANN401
            return func(*args, **(kwargs or {}))

        return self.keep(compute) if func.name() in SAVED_OPERATIONS else compute()

    def keep(self, compute: Callable[[], T]) -> T:
        """Save and return the result of `compute` in the forward; in recomputation return it without a gradient."""
        if self._is_recomputing:
            return tree_map_only(_Kept, _Kept.unchanged, self._outputs.popleft())  # type: ignore[no-any-return]
        result = compute()
        self._outputs.append(tree_map_only(torch.Tensor, _Kept, result))
        return result


class _SavedTopK(TorchDispatchMode):
    """Torch dispatch mode: `topk` chooses experts in the forward; recomputation gathers scores of saved choices."""

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__()
        self._kept = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        options = kwargs or {}
        if func is not torch.ops.aten.topk.default:
            return func(*args, **options)
        scores, dim = args[0], args[2] if len(args) > 2 else options.get("dim", -1)
        small = torch.int16 if scores.shape[dim] <= 2**15 else torch.int32
        # Autograd sees `topk` itself, outside of this mode, so the gradient of the returned values reaches the scores.
        chosen = self._kept.keep(lambda: func(*args, **options)[1].to(small)).long()
        return scores.gather(dim, chosen), chosen


class _Kept:
    """A saved tensor, and its version number when it was saved. Another version means an in-place change."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # The tensor itself will get an autograd history, which would keep this object alive, so a detached tensor is
        # saved. Both tensors have the same version counter only if this dispatch key is not excluded (torch 2.13,
        # utils/checkpoint.py, `_maybe_detach`).
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._tensor, self._version = tensor.detach(), tensor._version

    def unchanged(self) -> torch.Tensor:
        assert self._tensor._version == self._version, "a kept output was changed in place"
        return self._tensor


class _Current(threading.local):
    """Saved outputs of the running layer. Each thread has its own, because backward recomputes layers in threads."""

    kept: KeptOutputs | None = None


_current = _Current()


class _InLayer(AbstractContextManager[None]):
    """Context of a running layer, which sets its saved outputs. A layer that is recomputed twice enters it twice."""

    def __init__(self, outputs: KeptOutputs) -> None:
        self._kept = outputs

    def __enter__(self) -> None:
        self._before, _current.kept = _current.kept, self._kept

    def __exit__(self, *_: object) -> None:
        _current.kept = self._before


def layer_contexts(*, is_selective: bool) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts for a layer's forward and its recomputation, for torch's `checkpoint` (`context_fn`)."""
    outputs: deque[Any] = deque()
    forward, again = (
        KeptOutputs(outputs, is_recomputing=is_again, is_selective=is_selective) for is_again in (False, True)
    )
    return _InLayer(forward), _InLayer(again)


def current_outputs() -> KeptOutputs | None:
    """Saved outputs of the running layer. None without selective recomputation or gradients, as in tiles of an MLP."""
    outputs = _current.kept
    return outputs if outputs is not None and outputs.is_selective and torch.is_grad_enabled() else None


def keep_choices(module: nn.Module) -> None:
    """Make `topk` choose experts in the forward only, not in recomputation. `module` is a router or its parent."""
    forward = module.forward

    @wraps(forward)
    def forward_or_repeat(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        outputs = _current.kept
        with nullcontext() if outputs is None else _SavedTopK(outputs):
            return forward(*args, **kwargs)

    module.forward = forward_or_repeat


def save_outputs(compute: Callable[P, T]) -> Callable[P, T]:
    """Wrap `compute` so that selective recomputation saves the outputs of its `SAVED_OPERATIONS`.

    Attention with dropout is recomputed. If it were skipped, later dropouts would use its random numbers.
    """

    @wraps(compute)
    def compute_or_keep(*args: P.args, **kwargs: P.kwargs) -> T:
        mode = current_outputs()
        if mode is None or kwargs.get("dropout") or kwargs.get("dropout_p"):
            return compute(*args, **kwargs)
        with mode:
            return compute(*args, **kwargs)

    return compute_or_keep
