"""Replacements for kernels, ranks and host memory while a model computes on fake tensors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import PreTrainedModel
from transformers.integrations import moe

from ds_finetune.engine import rank_model
from ds_finetune.foreign.guard import replaced
from ds_finetune.model import activation_memory, experts
from ds_finetune.model.attention import by_document, compressed_layout, gated_delta
from ds_finetune.model.fused import install
from ds_finetune.model.kept_outputs import KeptOutputs
from ds_finetune.model.loss import cross_entropy, head_chunks
from ds_finetune.model.parallel.expert import ExpertParallelExperts
from ds_finetune.trainer.tracing.recorder import HeldBytes


class OutputsOnly:
    """Fused kernels (Liger's, which overwrite gate and up with their gradients, or torch.compile's) that compute
    nothing and allocate only their results.
    """

    def __init__(self, name: str) -> None:
        self.overwrites = name == "liger"

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """Uninitialised normalised rows and their scales."""
        return torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)

    def norm_backward(self, grad: torch.Tensor, saved: tuple[torch.Tensor, ...], _: bool, needs_weight: bool) -> Any:  # noqa: ANN401
        """Uninitialised gradients of rows and weight."""
        return torch.empty_like(grad), torch.empty_like(saved[1]) if needs_weight else None

    def rotate(self, tensors: tuple[torch.Tensor, ...], *_: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Uninitialised rotated queries and keys."""
        return tuple(torch.empty_like(each) for each in tensors)

    def gate(self, *parts: torch.Tensor) -> torch.Tensor:
        """Uninitialised input of the down projection."""
        return parts[0].new_empty(len(parts[0]), parts[0].shape[1] * len(parts) // 2)

    def gate_backward(self, _: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of gate and up: uninitialised, or with `overwrites` gate and up themselves."""
        return parts if self.overwrites else tuple(torch.empty_like(each) for each in parts)


class _GroupedProduct(torch.autograd.Function):
    """Product of rows and all experts' weights with the allocations of torch's kernel, computed as if all rows had the
    first expert.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """[rows, in], [experts, in, out] -> [rows, out]; the output is kept if that of torch's kernel is."""
        ctx.save_for_backward(rows, weight)
        mode = _get_current_dispatch_mode()

        def compute() -> torch.Tensor:
            return rows.to(weight.dtype) @ weight[0]

        return mode.keep(compute) if isinstance(mode, KeptOutputs) else compute()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # noqa: ANN401
        """Gradients of rows and weights."""
        rows, weight = ctx.saved_tensors
        d_rows = grad @ weight[0].T if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return d_rows, None
        d_weight = torch.empty_like(weight)
        torch.mm(rows.T, grad, out=d_weight[0])
        return d_rows, d_weight


def _grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    _: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_transposed: bool = False,
) -> torch.Tensor:
    out: torch.Tensor = _GroupedProduct.apply(rows, weight if is_transposed else weight.transpose(1, 2))
    return out if bias is None else out.add_(bias)


class _FourBitProduct(torch.autograd.Function):
    """Product with a four-bit weight, which is dequantised in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, linear: "_FourBitLinear") -> torch.Tensor:  # noqa: ANN401
        """[..., in] -> [..., out]."""
        ctx.linear = linear
        return hidden @ linear.dequantised().T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        """The gradient of the input."""
        return grad @ ctx.linear.dequantised(), None


class _FourBitLinear(nn.Module):
    """A linear module with a four-bit weight, which bitsandbytes cannot make on fake tensors."""

    def __init__(self, linear: Any) -> None:  # noqa: ANN401 - a linear module
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed = torch.empty(linear.weight.numel() // 2, 1, dtype=torch.uint8)
        self.weight: Any = nn.Parameter(packed, requires_grad=False)
        state: Any = self.weight
        state.quant_state = SimpleNamespace(shape=linear.weight.shape, dtype=linear.weight.dtype)
        self.bias = (
            None if linear.bias is None else nn.Parameter(torch.empty(len(linear.bias), dtype=linear.bias.dtype))
        )

    def dequantised(self) -> torch.Tensor:
        """The weight in the model's dtype."""
        return torch.empty(self.weight.quant_state.shape, dtype=self.weight.quant_state.dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out: torch.Tensor = _FourBitProduct.apply(hidden, self)
        return out if self.bias is None else out + self.bias


def _install_four_bit(lm: PreTrainedModel, names: Iterable[str], *, device: str) -> None:
    """`model.quantised.four_bit.install_four_bit` for modules of fake tensors."""
    for name in names:
        lm.set_submodule(name, _FourBitLinear(lm.get_submodule(name)))
    for module in lm.modules():
        for leaf, param in module.named_parameters(recurse=False):
            if param.is_meta:
                setattr(module, leaf, nn.Parameter(torch.empty_like(param, device=device)))


class _HostCopies:
    """torch's `save_on_cpu` without copies, which are only counted."""

    def __init__(self, recorder: HeldBytes) -> None:
        self._recorder = recorder

    def pack_hook(self, tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        """Record the tensor's shape and dtype instead of copying it."""
        self._recorder.on_host += tensor.nbytes
        return tensor.shape, tensor.dtype

    def unpack_hook(self, saved: tuple[torch.Size, torch.dtype]) -> torch.Tensor:
        """Allocate the tensor again."""
        return torch.empty(saved[0], dtype=saved[1])


def _few_blocks(split: Callable[..., Iterator[Any]], blocks: Any, products: torch.Tensor) -> Iterator[Any]:  # noqa: ANN401
    """First two blocks of the logits of a chunk; later blocks reuse their memory."""
    return islice(split(blocks, products), 2)


def silent_group(kind: Any, size: int) -> Any:  # noqa: ANN401 - a RankGroup
    """A process group of `size` ranks whose communication does nothing; None for one rank."""
    if size == 1:
        return None
    group: Any = dist.ProcessGroup(0, size)  # type: ignore[call-arg]
    backend = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), backend, FakeProcessGroup._create_internal(0, size))
    group._set_default_backend(backend)
    return kind(group, size, 0)


def _add_rounded(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """`head_chunks._add_product` on a CPU, including the fp32 copy of the product that torch makes in the sum."""
    total += (left @ right).to(total.dtype)


CACHED_LAYOUTS = (
    compressed_layout.tokens_of,
    compressed_layout.entries_of,
    compressed_layout.parts_of,
    by_document.document_batches,
    gated_delta._batches_on,
)
"""Functions that cache tensors, whose caches must not mix fake and real ones."""


@contextmanager
def stand_ins(device: str, recorder: HeldBytes) -> Iterator[None]:
    """Context in which fake tensors on a CPU allocate as on `device`; decisions that need values are replaced."""
    split = head_chunks.ChunkBlocks.split
    with ExitStack() as stack:
        for each in CACHED_LAYOUTS:
            each.cache_clear()
            stack.callback(each.cache_clear)
        changes: list[tuple[Any, str, Any]] = [
            (install, "kernels_of", OutputsOnly),
            (ExpertParallelExperts, "_count_rows", _assumed_counts),
            (experts, "_grouped_linear", _grouped_linear),
            (moe, "_grouped_linear", _grouped_linear),
            (activation_memory, "save_on_cpu", lambda **_: _HostCopies(recorder)),
            (rank_model, "install_four_bit", _install_four_bit),
            (head_chunks.ChunkBlocks, "split", lambda *given: _few_blocks(split, *given)),
            (cross_entropy, "_run_liger_kernel", lambda *_, **__: None),
            (rank_model, "tag_expert", lambda *_, **__: None),
        ]
        if device == "cpu":
            changes.append((head_chunks, "_add_product", _add_rounded))
        else:
            changes += [(head_chunks, "_BLOCK_NUMBERS", 2**62), (head_chunks, "_add_product", lambda *_: None)]
        for owner, name, change in changes:
            stack.enter_context(replaced(owner, name, change))
        yield


EXPERT_IMBALANCE = 1.25
"""Assumed tokens routed to the experts of the fullest rank, relative to the mean of all ranks, with `parallel.ep`."""


def _assumed_counts(module: ExpertParallelExperts, experts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
    """Rows by expert and rank, as from `ExpertParallelExperts._count_rows`: equal, but for the assumed imbalance."""
    size, rows = module.ep_group.size, len(experts)
    sent = [rows // size + (rank < rows % size) for rank in range(size)]
    arriving = experts.new_zeros(module.num_experts * size, dtype=torch.int32)
    return arriving, sent, [int(EXPERT_IMBALANCE * number) for number in sent]
