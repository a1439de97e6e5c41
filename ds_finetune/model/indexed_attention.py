"""DeepSeek sparse attention (DeepSeek-V3.2) on documents of at most `index_topk` tokens, where it attends to all of
them.

An indexer scores the earlier tokens for each query, and the query attends to the `index_topk` best. In short documents
these are all tokens, so the indexer is left out: its scores [heads, tokens, tokens] are never computed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.families.table import family_of
from ds_finetune.patches.transformers_attention import attention_function, replace_forward, rotate_pairs


class WholeDocument(nn.Module):
    """Mixed into a family's attention: that of transformers 5.23 (deepseek_v32/modeling_deepseek_v32.py:410-480)
    without the indexer, which needs a mask. Attention by document has none.
    """

    config: PretrainedConfig
    layer_idx: int
    attention_dropout: float
    scaling: float
    o_proj: nn.Linear
    expand_kv: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        past_key_values: Any = None,  # noqa: ANN401 - transformers' Cache
        **others: Any,  # noqa: ANN401 - what attention implementations take
    ) -> tuple[torch.Tensor | None, ...]:
        """Hidden states [batch, tokens, width] before and after; None in place of attention weights."""
        query, latent, rotary_key = _project(self, hidden_states, position_embeddings)
        if past_key_values is not None:
            latent, rotary_key = past_key_values.update(latent, rotary_key, self.layer_idx)
        key, value = self.expand_kv(latent, rotary_key)
        out, _ = attention_function(self.config._attn_implementation)(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **others,
        )
        return self.o_proj(out.flatten(2)), None


class WholeDocumentAndChoice(WholeDocument):
    """The same where attention also returns the chosen tokens for the next layer: None here."""

    def forward(self, *args: Any, prev_topk_indices: None = None, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """As `WholeDocument`, with None in place of the chosen tokens."""
        assert prev_topk_indices is None
        return *super().forward(*args, **kwargs), None


def _project(
    attention: Any,  # noqa: ANN401 - latent attention of transformers
    hidden: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [batch, heads, tokens, width], latents [batch, 1, tokens, rank] and rotated keys [batch, 1, tokens,
    rotary width] of hidden states [batch, tokens, width].
    """
    nope, rope = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    low_rank = attention.q_a_layernorm(attention.q_a_proj(hidden))
    query = attention.q_b_proj(low_rank).unflatten(-1, (-1, nope + rope)).transpose(1, 2)
    plain, rotated = query.split([nope, rope], dim=-1)
    latent, rotary_key = attention.kv_a_proj_with_mqa(hidden).split([attention.kv_lora_rank, rope], dim=-1)
    rotated, rotary_key = rotate_pairs()(rotated, rotary_key[:, None], *position_embeddings)
    return torch.cat([plain, rotated], dim=-1), attention.kv_a_layernorm(latent)[:, None], rotary_key


def attend_to_whole_documents(lm: PreTrainedModel) -> None:
    """Leave out the indexers of a model, in place; models without indexers stay as they are."""
    indexer = family_of(lm.config.model_type).indexer
    if indexer is None:
        return
    for name, module in lm.named_modules():
        if name.endswith(".self_attn"):
            replace_forward(module, WholeDocumentAndChoice if indexer.is_shared else WholeDocument)


def longest_document(hf_config: PretrainedConfig) -> int | None:
    """Maximum number of tokens of a document that attends as the model is published: `index_topk` of its
    configuration; None where any number does.
    """
    return None if family_of(hf_config.model_type).indexer is None else int(hf_config.index_topk)
