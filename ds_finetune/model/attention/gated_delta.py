"""Gated delta nets (Yang et al., arXiv 2412.06464) for packed rows: the state is zero at the start of each document."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_finetune.foreign.transformers_elementwise import delta_functions, with_functions
from ds_finetune.model.attention.by_document import BY_DOCUMENT, document_batches
from ds_finetune.model.attention.kernels import Documents

_Batches = tuple[tuple[tuple[int, int], ...], torch.Tensor, torch.Tensor]


def install_gated_delta(lm: PreTrainedModel) -> None:
    """Make the gated delta nets of `lm` work within documents, in place, if `lm` uses attention by document.

    Documents of similar length are batched. Padding at their ends has no effect, because the nets are causal.
    """
    for module in lm.modules() if lm.config._attn_implementation == BY_DOCUMENT else ():
        kind: Any = type(module)
        if plain := delta_functions(kind):
            functions = {name: partial(_BY_DOCUMENT[name], function) for name, function in plain.items()}
            module.__class__ = type(kind.__name__, (kind,), {"forward": with_functions(kind.forward, functions)})


def _convolve(  # noqa: PLR0913 - transformers' interface
    convolve: Callable[..., torch.Tensor],
    mixed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str,
    documents: tuple[Documents, ...] | None = None,
    **_: Any,  # noqa: ANN401 - arguments of attention
) -> torch.Tensor:
    """Causal convolution of `mixed` [rows, channels, tokens] within `documents`; if these are None, within rows."""
    if documents is None:
        return convolve(mixed, weight, bias, activation=activation)

    def run(part: torch.Tensor) -> torch.Tensor:
        return convolve(part.transpose(1, 2), weight, bias, activation=activation).transpose(1, 2)

    return _by_document(run, (mixed.transpose(1, 2),), documents).transpose(1, 2)


def _apply_rule(
    rule: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    *parts: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    documents: tuple[Documents, ...] | None = None,
    **others: Any,  # noqa: ANN401 - arguments of attention, and of a cache
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply the gated delta rule within documents to queries, keys and values [rows, tokens, heads, width]. Without
    `documents` each row is one document, and the last state is returned for a cache.
    """
    plain = partial(rule, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
    if documents is None:
        return plain(*parts, g=g, beta=beta, **others)
    assert not others["output_final_state"], "a cache would need the state of each document"

    def run(*batch: torch.Tensor) -> torch.Tensor:
        *projected, decay, rate = batch
        return plain(*projected, g=decay, beta=rate)[0]

    return _by_document(run, (*parts, g, beta), documents), None


_BY_DOCUMENT: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _apply_rule,
}
"""The functions that replace transformers' functions of these names in layers with gated delta nets."""


def _by_document(
    run: Callable[..., torch.Tensor], parts: tuple[torch.Tensor, ...], documents: tuple[Documents, ...]
) -> torch.Tensor:
    shapes, order, positions = _batches_on(parts[0].device, documents)
    sizes = [number * tokens for number, tokens in shapes]
    batches = zip(*(part.flatten(0, 1).index_select(0, order).split(sizes) for part in parts), strict=True)
    outs = [
        run(*(part.unflatten(0, shape) for part in batch)).flatten(0, 1)
        for shape, batch in zip(shapes, batches, strict=True)
    ]
    return torch.cat(outs).index_select(0, positions).unflatten(0, parts[0].shape[:2])


@lru_cache(maxsize=4)
def _batches_on(device: torch.device, documents: tuple[Documents, ...]) -> _Batches:
    """Group documents into batches (number of documents, padded tokens). Also returns two index tensors: for each
    batched token its index in the flattened rows, and for each token of these rows its index in the batches.
    """
    shapes, order, _, positions = document_batches(documents, None)
    return tuple((number, tokens) for number, tokens, _ in shapes), order.to(device), positions.to(device)
