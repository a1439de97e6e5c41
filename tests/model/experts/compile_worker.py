"""Compile the kernels of `model/grouped_kernel.py` for GPUs that are not here; prints the shared memory of each."""

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_finetune.model import grouped_kernel

TILES = {"COLUMNS": grouped_kernel._COLUMNS, "DEPTH": grouped_kernel._DEPTH}
KERNELS = (
    (grouped_kernel._product_kernel, TILES | {"PADDED": 64, "ROWS": grouped_kernel._ROWS, "depth_step": 1}),
    (grouped_kernel._gradient_kernel, TILES | {"TALL": grouped_kernel._ROWS, "column_step": 1}),
)


def _shared_bytes(kernel: Any, sizes: dict[str, int], capability: int, dtype: str) -> int:
    names = kernel.arg_names
    pointers = {"rows": dtype, "weight": dtype, "out": dtype, "grad": dtype, "ends": "*i32"}
    signature = {name: "constexpr" if name in sizes else pointers.get(name, "i32") for name in names}
    # As the launcher finds for addresses, widths and strides that are multiples of 16.
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in sizes}
    constants = {(names.index(name),): size for name, size in sizes.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return int(triton.compile(source, target=GPUTarget("cuda", capability, 32)).metadata.shared)


if __name__ == "__main__":
    for capability in (80, 89):
        for dtype in ("*bf16", "*fp32"):
            for kernel, sizes in KERNELS:
                print("shared", _shared_bytes(kernel, sizes, capability, dtype))  # noqa: T201
