"""Replaces kernels, communication and copies to host memory while a model computes on fake tensors. Counts the bytes
and FLOPs of the model's operations.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel
from transformers.integrations import moe

from ds_finetune.engine import rank_model
from ds_finetune.foreign.guard import replaced
from ds_finetune.foreign.transformers_attention import attention_replaced
from ds_finetune.model import activation_memory, experts
from ds_finetune.model.attention import by_document, compressed_layout, gated_delta
from ds_finetune.model.fused import install
from ds_finetune.model.kept_outputs import KeptOutputs
from ds_finetune.model.loss import cross_entropy, head_chunks
from ds_finetune.model.parallel.expert import ExpertParallelExperts
from ds_finetune.plan.model_shape import attended_pairs


class Recorder(TorchDispatchMode):
    """Counts the bytes that operations have allocated and not yet freed, the peak of that number since a mark, and the
    FLOPs of matrix products and convolutions by torch's formulas.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = self.on_host = self.flops = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run the operation, and count its FLOPs and what it allocates."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (flops_of := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += flops_of(*args, **kwargs, out_val=out)
        known_storages = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(out):
            storage = each.untyped_storage()
            key = storage._cdata
            if key not in known_storages and key not in self._live:
                self._live[key] = storage.nbytes()
                self.held += self._live[key]
                self.peak = max(self.peak, self.held)
                weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key: int) -> None:
        self.held -= self._live.pop(key)

    def since_mark(self) -> int:
        """Peak of allocated bytes since the last call of this function."""
        peak, self.peak = self.peak, self.held
        return peak


def _tensors(tree: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


class OutputsOnly:
    """Replacement of fused kernels (Liger's, which overwrite gate and up with their gradients, or torch.compile's). It
    computes nothing and only allocates the kernels' results.
    """

    def __init__(self, name: str) -> None:
        self.overwrites = name == "liger"

    def norm(self, rows: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        """Allocate normalised rows and their scales, without computing them."""
        return torch.empty_like(rows), rows.new_empty(len(rows), dtype=torch.float32)

    def norm_backward(self, grad: torch.Tensor, saved: tuple[torch.Tensor, ...], _: bool, needs_weight: bool) -> Any:  # noqa: ANN401
        """Allocate the gradients of the rows and of the norm's weight, without computing them."""
        return torch.empty_like(grad), torch.empty_like(saved[1]) if needs_weight else None

    def rotate(self, tensors: tuple[torch.Tensor, ...], *_: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Allocate rotated queries and keys, without computing them."""
        return tuple(torch.empty_like(each) for each in tensors)

    def gate(self, *parts: torch.Tensor) -> torch.Tensor:
        """Allocate the input of the down projection, without computing it."""
        return parts[0].new_empty(len(parts[0]), parts[0].shape[1] * len(parts) // 2)

    def gate_backward(self, _: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Allocate the gradients of gate and up, without computing them. With `overwrites` the gradients use the memory
        of gate and up.
        """
        return parts if self.overwrites else tuple(torch.empty_like(each) for each in parts)


class _GroupedProduct(torch.autograd.Function):
    """Replacement of torch's grouped product of rows and all experts' weights. It allocates as torch's kernel does, but
    multiplies all rows with the first expert.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """Multiply rows [rows, in] with weights [experts, in, out] to [rows, out]. The output is kept for backward if
        torch's kernel keeps it.
        """
        ctx.save_for_backward(rows, weight)
        mode = _get_current_dispatch_mode()

        def compute() -> torch.Tensor:
            return rows.to(weight.dtype) @ weight[0]

        return mode.keep(compute) if isinstance(mode, KeptOutputs) else compute()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # noqa: ANN401
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
    """Product of rows with a four-bit weight. Forward dequantises the weight, and backward dequantises it again."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, linear: "_FourBitLinear") -> torch.Tensor:  # noqa: ANN401
        ctx.linear = linear
        return hidden @ linear.dequantised().T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
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
        return torch.empty(self.weight.quant_state.shape, dtype=self.weight.quant_state.dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _FourBitProduct.apply(hidden, self)
        return out if self.bias is None else out + self.bias


def _install_four_bit(lm: PreTrainedModel, names: Iterable[str], *, device: str) -> None:
    """Replacement of `model.quantised.four_bit.install_four_bit` for modules of fake tensors."""
    for name in names:
        lm.set_submodule(name, _FourBitLinear(lm.get_submodule(name)))
    for module in lm.modules():
        for leaf, param in module.named_parameters(recurse=False):
            if param.is_meta:
                setattr(module, leaf, nn.Parameter(torch.empty_like(param, device=device)))


def silent_group(kind: Any, size: int) -> Any:  # noqa: ANN401 - a RankGroup
    """Process group of `size` ranks whose collectives do nothing; None for one rank."""
    if size == 1:
        return None
    group: Any = dist.ProcessGroup(0, size)  # type: ignore[call-arg]
    backend = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), backend, FakeProcessGroup._create_internal(0, size))
    group._set_default_backend(backend)
    return kind(group, size, 0)


CACHED_LAYOUTS = (
    compressed_layout.tokens_of,
    compressed_layout.entries_of,
    compressed_layout.blocks_of,
    by_document.document_batches,
    gated_delta._batches_on,
)
"""Functions whose caches hold tensors. The caches are cleared before and after tracing, so that fake and real tensors
do not mix.
"""


@contextmanager
def counted_attention(recorder: Recorder) -> Iterator[None]:
    """Context in which transformers' attention implementations compute nothing, and only count the FLOPs of forward and
    backward. Only pairs of tokens that attend to each other count; documents, windows and indexers limit them. Adding
    the experts' biases counts no FLOPs.
    """

    def attend(  # noqa: PLR0913 - transformers' interface
        module: Any,  # noqa: ANN401
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        documents: tuple[tuple[int, ...], ...] | None = None,
        sliding_window: int | None = by_document.OWN_WINDOW,
        chosen: object = None,
        **__: object,
    ) -> tuple[torch.Tensor, None]:
        lengths = np.array(documents or [[query.shape[2]]] * len(query), dtype=np.float64)
        is_own = sliding_window == by_document.OWN_WINDOW
        window = getattr(module, "sliding_window", None) if is_own else sliding_window
        limits = filter(None, (window, chosen and module.config.index_topk))
        pairs = float(attended_pairs(lengths, min(limits, default=None)).sum())
        # Without a causal mask a token also attends to later ones. Backward takes twice the FLOPs of the forward.
        pairs *= (1 if getattr(module, "is_causal", True) else 2) * (3 if query.requires_grad else 1)
        recorder.flops += round(2 * pairs * query.shape[1] * (query.shape[3] + value.shape[3]))
        out = query.new_empty(len(query), query.shape[2], query.shape[1], value.shape[3])
        return out + (query.sum() + key.sum() + value.sum()), None

    def add_biases(weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        return weights.new_empty(len(weights), biases.shape[1]) + (weights.sum() + biases.sum())

    with attention_replaced(attend), replaced(experts, "biases_of", add_biases):
        yield


@contextmanager
def stand_ins(device: str, recorder: Recorder) -> Iterator[None]:
    """Context in which fake tensors on a CPU allocate as real ones on `device`. Functions that need the values of
    tensors are replaced.
    """
    split = head_chunks.ChunkBlocks.split
    with ExitStack() as stack:
        for each in CACHED_LAYOUTS:
            each.cache_clear()
            stack.callback(each.cache_clear)

        def pack(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
            # No tensor is copied to the host; only the bytes are counted.
            recorder.on_host += tensor.nbytes
            return tensor.shape, tensor.dtype

        host_copies = SimpleNamespace(pack_hook=pack, unpack_hook=lambda saved: torch.empty(saved[0], dtype=saved[1]))
        changes: list[tuple[Any, str, Any]] = [
            (install, "kernels_of", OutputsOnly),
            (ExpertParallelExperts, "_count_rows", _assumed_counts),
            (experts, "_grouped_linear", _grouped_linear),
            (moe, "_grouped_linear", _grouped_linear),
            (activation_memory, "save_on_cpu", lambda **_: host_copies),
            (rank_model, "install_four_bit", _install_four_bit),
            # Only two blocks of a chunk's logits are computed, because later blocks reuse their memory.
            (head_chunks.ChunkBlocks, "split", lambda *given: islice(split(*given), 2)),
            (cross_entropy, "_run_liger_kernel", lambda *_, **__: None),
            (rank_model, "tag_expert", lambda *_, **__: None),
        ]

        def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
            if device == "cpu":
                # While torch adds a product to `total`, it holds an fp32 copy of the product, which is allocated here.
                total += (left @ right).to(total.dtype)
            else:
                recorder.flops += 2 * left.numel() * right.shape[1]

        changes.append((head_chunks, "_add_product", add_product))
        if device != "cpu":
            changes.append((head_chunks, "_BLOCK_NUMBERS", 2**62))
        for owner, name, change in changes:
            stack.enter_context(replaced(owner, name, change))
        yield


EXPERT_IMBALANCE = 1.25
"""Assumed number of tokens that arrive at the rank with most tokens under `parallel.ep`, relative to the mean of all
ranks.
"""


def _assumed_counts(module: ExpertParallelExperts, experts: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
    """Replacement of `ExpertParallelExperts._count_rows`, which needs the values of tensors. It assumes equal numbers
    of rows per expert, and that a rank receives `EXPERT_IMBALANCE` times the rows it sends.
    """
    size, rows = module.ep_group.size, len(experts)
    sent = [rows // size + (rank < rows % size) for rank in range(size)]
    arriving = experts.new_zeros(module.num_experts * size, dtype=torch.int32)
    return arriving, sent, [int(EXPERT_IMBALANCE * number) for number in sent]
