"""Forward of routed experts: tokens are sorted by expert, multiplied in one grouped product, and summed by token.

Sorting and summing are gathers, and so are their gradients, because the inverse permutation is known. Autograd would
compute the gradient of `hidden[index]` by `index_put`, which sorts the index on a GPU. The sum over a token's k experts
is computed in fp32 and rounded once, while `index_put` rounds after each summand.

Routing weights multiply the input of the down projection, which is linear. So gradients of routing weights need no
expert outputs, and the multiplied rows have the experts' inner width, not the model's.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import _grouped_linear, grouped_mm_experts_forward

from ds_finetune.model.build.dtypes import PRECISION_DTYPES
from ds_finetune.model.kept_outputs import current_outputs, save_outputs
from ds_finetune.model.weights.names import is_table
from ds_finetune.plan.forward import product_of_experts

Project = Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]
"""Function (rows [rows, in] sorted by expert, end of each expert's rows, name of a weight) -> products [rows, out]."""


_options = {"has_triton": True}


def choose_product(*, has_triton: bool) -> None:
    """Allow or forbid this program's Triton kernel for grouped products in this process, in place of torch's."""
    _options["has_triton"] = has_triton
    _is_own_kernel.cache_clear()


@cache
def _is_own_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return False
    precision = next((name for name, of_name in PRECISION_DTYPES.items() if of_name == dtype), "")
    return product_of_experts(precision, torch.cuda.get_device_capability(device), **_options) == "triton"


def multiply(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, *, is_transposed: bool = False) -> Any:  # noqa: ANN401 - untyped
    """Multiply `rows` [rows, in], sorted by expert, with their experts' `weight` [experts, out, in]; with
    `is_transposed` [experts, in, out]. Returns [rows, out]. Expert i's rows end at `ends[i]`.
    """
    if not _is_own_kernel(weight.device, weight.dtype):
        return _grouped_linear(rows, weight, ends, is_transposed=is_transposed)
    from ds_finetune.model.grouped_kernel import grouped_product

    return grouped_product(rows.to(weight.dtype), weight if is_transposed else weight.transpose(1, 2), ends)


_saved_multiply = save_outputs(multiply)


def rows_up_to(experts: torch.Tensor, number: int) -> torch.Tensor:
    """Index after each expert's last row, int32 [number], from the sorted experts of rows, int64 [rows].

    Unlike `torch.bincount`, this does not make the host wait for the GPU.
    """
    return torch.searchsorted(experts, torch.arange(number, device=experts.device), right=True, out_int32=True)


class _Gather(torch.autograd.Function):
    """Computes `source[index]` and sums each `k` consecutive rows. Backward computes `grad[back]` and sums each
    `k_back` consecutive rows.

    With `is_last` the autograd node holds `back` as an attribute. Recomputation stops at the layer's last saved tensor,
    so a saved `back` would make it compute the down projection too.
    """

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, index: torch.Tensor, back: torch.Tensor, *others: int) -> torch.Tensor:  # noqa: ANN401
        k, ctx.k_back, is_last = others
        ctx.back = back if is_last else None
        ctx.save_for_backward(*(() if is_last else (back,)))
        return _sums(source.index_select(0, index), k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        back = ctx.saved_tensors[0] if ctx.back is None else ctx.back
        return _sums(grad.index_select(0, back), ctx.k_back), *[None] * 5


def _sums(rows: torch.Tensor, k: int) -> torch.Tensor:
    return rows if k == 1 else rows.unflatten(0, (-1, k)).sum(1)


class _Weigh(torch.autograd.Function):
    """Multiplies rows by fp32 routing weights. The kernel rounds the products, so 16-bit rows need no fp32 copy."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(rows, weights)
        return torch.mul(rows, weights, out=torch.empty_like(rows))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        rows, weights = ctx.saved_tensors
        d_weights = grad.to(weights.dtype).mul_(rows).sum(-1, keepdim=True)
        return torch.mul(grad, weights, out=torch.empty_like(grad)), d_weights


class SortedRows(NamedTuple):
    """Order in which routed experts read rows: one row for each token and expert chosen for it, sorted by expert."""

    experts: torch.Tensor
    """Expert of each sorted row, int64 [tokens x k]."""
    choices: torch.Tensor
    """For each sorted row, its index in the flattened chosen experts [tokens, k], int64 [tokens x k]."""
    choice_rows: torch.Tensor
    """For each of the flattened chosen experts [tokens, k], the index of its sorted row, int64 [tokens x k]."""
    tokens: torch.Tensor
    """Token of each sorted row, int32 [tokens x k]."""
    k: int

    @classmethod
    def of(cls, top_k_index: torch.Tensor) -> "SortedRows":
        """Sort (token, chosen expert) pairs by expert. `top_k_index` [tokens, k] has the chosen experts."""
        experts, choices = top_k_index.reshape(-1).sort(stable=True)
        choice_rows = torch.empty_like(choices)
        choice_rows[choices] = torch.arange(len(choices), device=choices.device)
        k = top_k_index.shape[1]
        tokens = torch.floor_divide(choices, k, out=torch.empty_like(choices, dtype=torch.int32))
        return cls(experts, choices, choice_rows, tokens, k)

    def rows_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Copy hidden states [tokens, width] to sorted rows, one for each chosen expert, [tokens x k, width]."""
        return _Gather.apply(hidden, self.tokens, self.choice_rows, 1, self.k, False)  # type: ignore[no-any-return]

    def weights_of(self, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Bring routing weights [tokens, k] into the order of the sorted rows, [tokens x k, 1]."""
        return _Gather.apply(top_k_weights.reshape(-1, 1), self.choices, self.choice_rows, 1, 1, False)  # type: ignore[no-any-return]

    def sums_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum the sorted rows [tokens x k, width] of each token. Returns [tokens, width]."""
        return _Gather.apply(rows, self.choice_rows, self.tokens, self.k, 1, True)  # type: ignore[no-any-return]


def project(module: Any, rows: torch.Tensor, ends: torch.Tensor, leaf: str) -> torch.Tensor:  # noqa: ANN401 - a module of any family
    """Multiply `rows` [rows, in], sorted by expert, with the weights `leaf` of the experts in `module`. Expert i's rows
    end at `ends[i]`. Selective recomputation saves the first projection's output; no gradient needs the second one's.
    """
    product = _saved_multiply if leaf == "gate_up_proj" else multiply
    return product(rows, getattr(module, leaf), ends, is_transposed=module.is_transposed)  # type: ignore[no-any-return]


def biases_of(weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """Each row's sum of experts' biases [experts, out], weighted by `weights` [rows, experts]; [rows, out]."""
    return weights @ biases


def run_experts(
    module: Any,  # noqa: ANN401 - a module of any family
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    product: Project | None = None,
) -> torch.Tensor:
    """Run routed experts on tokens [tokens, width], with chosen experts [tokens, k] and their routing weights. Returns
    [tokens, width]. `product` multiplies rows with the weights of `module`; adapters pass a function of their own.
    """
    if not module.has_gate or module.has_post_expert_norm or module._is_expert_parallel:
        return grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    product = product or partial(project, module)
    chosen = SortedRows.of(top_k_index)
    if (compute := getattr(module, "compute_before", None)) is not None:
        compute()
    ends, weights = rows_up_to(chosen.experts, module.num_experts), chosen.weights_of(top_k_weights)
    rows = product(chosen.rows_of(hidden), ends, "gate_up_proj")
    if module.has_bias:
        of_row = (chosen.experts[:, None] == torch.arange(module.num_experts, device=rows.device)).to(rows.dtype)
        # A variable would keep the biases of all rows in memory until the function returns.
        if current_outputs() is None:
            rows.add_(biases_of(of_row, module.gate_up_proj_bias))
        else:
            rows = rows + biases_of(of_row, module.gate_up_proj_bias)
    inner = module._apply_gate(rows)
    weighted = inner * weights if weights.dtype == inner.dtype else _Weigh.apply(inner, weights)
    # Computing `added` saves tensors for backward. Recomputation stops after the last saved tensor, so `added` precedes
    # the down projection.
    added = None
    if module.has_bias:
        added = biases_of(chosen.sums_of((of_row * weights).to(inner.dtype)), module.down_proj_bias)
    out = chosen.sums_of(product(weighted, ends, "down_proj"))
    return out if added is None else out + added


def spread_ids(lm: nn.Module, experts: int) -> None:
    """Fill a model's tables from token ids to experts, in place, so that tokens are spread over all `experts`. With the
    zeros of a randomly initialised model each token would choose expert 0 k times.
    """
    for name, table in lm.named_buffers():
        if is_table(name):
            ids, columns = (torch.arange(size, device=table.device) for size in table.shape)
            table.copy_((ids[:, None] + columns) % experts)


def restore_full_tables(lm: nn.Module, vocabulary: int) -> None:
    """Enlarge tables from token ids to experts, in place, from this rank's vocabulary shard to all token ids."""
    for name, table in list(lm.named_buffers()):
        if is_table(name):
            module, _, leaf = name.rpartition(".")
            router: Any = lm.get_submodule(module)
            setattr(router, leaf, nn.Buffer(table.new_zeros(vocabulary, table.shape[1]), persistent=True))
            spread_ids(router, router.num_experts)
