"""Counts the bytes that operations on fake tensors allocate."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class HeldBytes(TorchDispatchMode):
    """Counts the bytes that operations have allocated and not yet freed, and the peak of that number since a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = self.on_host = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run the operation and count what it allocates."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        known_storages = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(out):
            storage = each.untyped_storage()
            if storage._cdata not in known_storages and storage._cdata not in self._live:
                self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._live[key] = size
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held -= self._live.pop(key)

    def since_mark(self) -> int:
        """Peak of allocated bytes since the last call of this function."""
        peak, self.peak = self.peak, self.held
        return peak


def _tensors(tree: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
