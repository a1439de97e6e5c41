"""Decoding with multi-head latent attention on cached latents (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).

The latents' up-projection is applied to the query and to the weighted sum of latents. So a decoding step does not
expand all cached latents to keys and values.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ds_finetune.families.table import family_of
from ds_finetune.foreign.guard import replaced
from ds_finetune.foreign.transformers_attention import register_attention

_BY_LATENTS = "ds_finetune_by_latents"


def _split_projection(attention: Any, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
    """Split the up-projection of latents into a part for keys [rank, heads, width] and one for values. It is computed
    as the module's output for an identity matrix, because the module may have adapters, 4-bit weights or ZeRO-3 shards.
    """
    matrix = attention.kv_b_proj(torch.eye(attention.kv_lora_rank, dtype=dtype, device=device))
    widths = [attention.qk_nope_head_dim, attention.v_head_dim]
    parts: tuple[torch.Tensor, ...] = matrix.unflatten(-1, (-1, sum(widths))).split(widths, dim=-1)
    return parts


@contextmanager
def attending_to_latents(lm: PreTrainedModel, *, keeps_weights: bool) -> Iterator[None]:
    """Context in which a forward of `lm` with a cache takes one token per row and attends to cached latents. Models
    without multi-head latent attention are unchanged.

    `keeps_weights` promises that weights do not change in this context, so that each up-projection is split only once.
    """
    family = family_of(lm.config.model_type)
    has_latents = not (family.is_generic or family.indexer)
    layers = [each for each in lm.modules() if has_latents and hasattr(each, "expand_kv")]
    if not layers:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(replaced(lm.config, "_attn_implementation_internal", _BY_LATENTS))
        for layer in layers:
            stack.enter_context(replaced(layer, "expand_kv", lambda latent, rotary: (latent, rotary)))
            split = partial(_split_projection, layer)
            stack.enter_context(replaced(layer, "split_projection", cache(split) if keeps_weights else split))
        yield


def _attend_to_latents(  # noqa: PLR0913 - transformers' interface
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    is_key: torch.Tensor | None = None,
    **_: Any,  # noqa: ANN401 - what other implementations take
) -> tuple[torch.Tensor, None]:
    """Attention of query [rows, heads, 1, width] to latents [rows, 1, tokens, rank] (`key`) and rotary keys [rows, 1,
    tokens, rotary width] (`value`). `is_key` masks the tokens to attend to. Returns [rows, 1, heads, value width].
    """
    assert attention_mask is None
    latents, rotary = key[:, 0], value[:, 0]
    split_projection: Any = module.split_projection
    to_key, to_value = split_projection(query.dtype, query.device)
    plain, rotated = query[:, :, 0].split([to_key.shape[2], rotary.shape[2]], dim=-1)
    projected = torch.einsum("bhw,rhw->bhr", plain, to_key)
    scores = (projected @ latents.mT + rotated @ rotary.mT) * scaling
    if is_key is not None:
        scores = scores.masked_fill(~is_key[:, 0], float("-inf"))
    probabilities = scores.softmax(dim=-1, dtype=torch.float32).to(latents.dtype)
    return torch.einsum("bhr,rhv->bhv", probabilities @ latents, to_value)[:, None], None


register_attention(_BY_LATENTS, _attend_to_latents)
