"""Counts what operations on fake tensors allocate and compute."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ATTENTION = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention", "_varlen_attn")
_BACKWARD = 2.5
"""Operations of attention's backward in those of its forward: kernels compute the scores again."""


class OperationCounts(TorchDispatchMode):
    """Counts the bytes that operations allocate and that are still held, the most since a mark, and FLOPs: two for each
    multiply-add, and in attention those of the pairs of tokens of a document, later ones left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = self.on_host = 0
        self.flops = self.attention_flops = 0.0
        self.is_backward = False
        self.depth = 0
        """Modules whose forward runs within backward."""
        self._live: dict[int, int] = {}
        self.pairs = 0.0
        """Pairs of tokens of the same document, of which the first is no later one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run the operation and count what it allocates."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(out):
            storage = each.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._live:
                self._add(storage)
        # What backward computes within modules or with gradients turned on is computed again.
        if not (self.depth or (self.is_backward and torch.is_grad_enabled())):
            self._count_flops(func._overloadpacket, args, kwargs, out)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live[key] = size
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held -= self._live.pop(key)

    def _count_flops(self, operation: Any, args: Any, kwargs: Any, out: Any) -> None:  # noqa: ANN401
        name = operation.__name__
        if any(part in name for part in _ATTENTION):
            is_backward = "backward" in name
            query, key, value = args[is_backward : 3 + is_backward]
            width = query.shape[-1] + value.shape[-1]
            pairs = self.pairs if "varlen" in name else query.shape[0] * query.shape[2] * key.shape[2] / 2
            self.attention_flops += 2 * pairs * query.shape[1] * width * (_BACKWARD if is_backward else 1)
        elif operation in flop_registry:
            self.flops += flop_registry[operation](*args, **kwargs, out_val=out)

    def add_product(self, _: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Count a product [m, k] x [k, n] that is added where it is computed."""
        self.flops += 2 * left.numel() * right.shape[1]

    def since_mark(self) -> int:
        """The most bytes held since the last call."""
        peak, self.peak = self.peak, self.held
        return peak


def _tensors(tree: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
