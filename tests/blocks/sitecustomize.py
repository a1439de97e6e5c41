"""Sums products of matrices as a CPU would that is not here: in blocks whose size depends on the shapes.

With this folder on PYTHONPATH each process replaces four of torch's functions for CPUs as soon as torch is imported.
"""

import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _TorchFinder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_replace(module: ModuleType) -> None:
                load(module)
                _replace_products(module)

            spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


def _replace_products(torch: Any) -> None:
    """Replace mm, bmm, addmm and baddbmm. Integers, and sums of at most 16 products, are left to torch."""
    aten, own = torch.ops.aten, torch.library.Library("aten", "IMPL")

    def wide(tensor: Any) -> Any:
        """A tensor in the dtype of partial sums, as the tiles of AMX keep them."""
        return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor

    def plain(a: Any, b: Any) -> Any:
        product = aten.mm if a.dim() == 2 else aten.bmm
        return product.out(a, b, out=a.new_empty((*a.shape[:-1], b.shape[-1])))

    def product(a: Any, b: Any) -> Any:
        if not a.is_floating_point() or a.shape[-1] <= 16 or not a.numel() or not b.numel():
            return plain(a, b)
        block = 16 + 8 * ((a.shape[-2] * 7 + b.shape[-1] * 3) % 5)
        total = sum(plain(wide(x), wide(y)) for x, y in zip(a.split(block, -1), b.split(block, -2), strict=True))
        return total.to(a.dtype)  # type: ignore[union-attr]

    def added(base: Any, a: Any, b: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        total = product(wide(a), wide(b)) * alpha
        return (total if beta == 0 else total + wide(base) * beta).to(a.dtype)

    with warnings.catch_warnings(action="ignore"):  # Torch warns that its own functions are replaced.
        for name, function in (("mm", product), ("bmm", product), ("addmm", added), ("baddbmm", added)):
            own.impl(name, function, "CPU")
    torch.products_in_blocks = own  # The library's functions are removed with it.


sys.meta_path.insert(0, _TorchFinder())
