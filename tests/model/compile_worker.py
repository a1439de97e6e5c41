"""Compile all Triton kernels that this program launches, its own and Liger's, for GPUs that are not here.

Each is launched as in training, with tensors in host memory, and does not run. Prints a line for each: its name, its
target, whether it has a cubin, its bytes of shared memory and threads of a block.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ds_finetune.foreign import liger_operations
from ds_finetune.model.fused.formulas import Rotation
from ds_finetune.model.grouped_kernel import grouped_product
from ds_finetune.model.loss.cross_entropy import HeadInputs, NeededGradients, liger_cross_entropy

TOKENS, HIDDEN, EXPERTS, INNER, VOCABULARY = 4, 2048, 8, 1408, 32768
GPUS = {75: torch.float16, 80: torch.bfloat16, 89: torch.bfloat16, 90: torch.bfloat16}
_launch = JITFunction.run


def _compile(kernel: Any, *args: Any, **options: Any) -> Any:
    compiled = _launch(kernel, *args, **options | {"warmup": True})
    assert f".target sm_{compiled.metadata.target.arch}" in compiled.asm["ptx"]
    found = compiled.metadata
    line = kernel.__name__, found.target.arch, bool(compiled.asm["cubin"]), found.shared, 32 * found.num_warps
    sys.stdout.write(" ".join(map(str, ("kernel", *line))) + "\n")
    return compiled


def _launch_all(dtype: torch.dtype) -> None:
    rows, weight = torch.zeros(TOKENS, HIDDEN, dtype=dtype), torch.ones(HIDDEN, dtype=dtype)
    of_experts = torch.zeros(EXPERTS, INNER, HIDDEN, dtype=dtype).transpose(1, 2).requires_grad_()
    ends = torch.full((EXPERTS,), TOKENS, dtype=torch.int32)
    grouped_product(rows.clone().requires_grad_(), of_experts, ends).sum().backward()
    for rounds_last in (False, True):
        _, scale = liger_operations.norm(rows, weight, 1e-6, rounds_last)
        for needs_weight in (False, True):
            liger_operations.norm_backward(rows, (rows, weight, scale), rounds_last, needs_weight)
    heads, angles = torch.zeros(1, 16, TOKENS, 128, dtype=dtype), torch.zeros(1, TOKENS, 128, dtype=dtype)
    for is_backward in (False, True):
        rotation = Rotation(128, in_pairs=False, is_back=False)
        liger_operations.rotate((heads, heads[:, :4]), (angles, angles), rotation, is_backward)
    for parts in ((rows, rows.clone()), (rows.clone(),)):
        liger_operations.gate_backward(liger_operations.gate(*parts), *parts)
    weight = torch.zeros(VOCABULARY, HIDDEN, dtype=dtype)
    head = HeadInputs(rows, weight, None, torch.zeros(TOKENS, dtype=torch.int64))
    for needed in (NeededGradients(True, True, False), NeededGradients(False, False, False)):
        liger_cross_entropy(head, needed, chunk=TOKENS)


if __name__ == "__main__":
    JITFunction.run = _compile
    for capability, its_dtype in GPUS.items():
        # Triton remembers what it has compiled by the number of the device.
        device = SimpleNamespace(
            get_current_device=lambda number=capability: number,
            get_current_stream=lambda _: 0,
            get_current_target=lambda number=capability: GPUTarget("cuda", number, 32),
        )
        driver.set_active(device)
        _launch_all(its_dtype)
