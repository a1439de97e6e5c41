"""The model as answers are sampled from it: forwards with a cache that give the logits of next tokens."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ds_finetune.engine.groups.collectives import all_reduce_max
from ds_finetune.engine.sampling.row_cache import RowCache, prompt_cache
from ds_finetune.families.table import family_of
from ds_finetune.model.attention.by_document import BY_DOCUMENT
from ds_finetune.model.attention.latents import attending_to_latents
from ds_finetune.model.build.skeleton import head_of
from ds_finetune.model.parallel.tensor import TensorParallelGroup


class AnswerModel:
    """A model in evaluation mode, without gradients. With `is_collective` its forwards wait for all other ranks, so all
    ranks run as many: one whose rows have ended calls `join_others`.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        device: torch.device,
        *,
        tp_group: TensorParallelGroup | None = None,
        is_collective: bool = False,
    ) -> None:
        self.device = device
        self._lm = lm
        self._tp_group = tp_group
        self._is_collective = is_collective

    @property
    def takes_mixed_lengths(self) -> bool:
        """Whether the rows of a batch may have prompts of different lengths: attention must know which columns of the
        cache belong to a row, and so must the choice of an indexer.
        """
        config = self._lm.config
        return config._attn_implementation == BY_DOCUMENT and family_of(config.model_type).indexer is None

    def read_prompts(self, ids: torch.Tensor) -> tuple[Cache, torch.Tensor]:
        """From prompts of one length, int64 [prompts, tokens]: their cache, and logits fp32 [prompts, vocabulary]."""
        cache, positions = prompt_cache(), torch.arange(ids.shape[1], device=ids.device)
        return cache, self._logits(ids, positions.expand_as(ids), past_key_values=cache)

    def reading_tokens(self) -> AbstractContextManager[None]:
        """What is open while tokens are added to rows."""
        # Where forwards wait for others, ZeRO-3 may gather the weights again for each.
        return attending_to_latents(self._lm, keeps_weights=not self._is_collective)

    def read_tokens(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: RowCache, is_key: torch.Tensor | None
    ) -> torch.Tensor:
        """Add a token to each row of the cache, int64 [rows]; logits of the next one, fp32 [rows, vocabulary].

        `is_key`, bool [rows, 1, 1, columns], tells which columns belong to a row where prompts have different lengths.
        """
        cache.begin_column()
        given = {} if is_key is None else {"is_key": is_key}
        logits = self._logits(ids[:, None], positions[:, None], past_key_values=cache, **given)
        cache.end_column()
        return logits

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:  # noqa: ANN401
        if self._is_collective:
            all_reduce_max(1.0)
        with torch.no_grad():
            out = self._lm.base_model(input_ids=ids, position_ids=positions, use_cache=True, **others)
            logits: torch.Tensor = head_of(self._lm)(out.last_hidden_state[:, -1:])
        return logits[:, 0].float()

    def agreed(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids that the first tensor parallel rank has drawn, from logits that may differ by a rounding."""
        return ids if self._tp_group is None else self._tp_group.broadcast_from_first(ids)

    def join_others(self) -> None:
        """Run forwards of one token, whose results nobody reads, until the rows of all ranks have ended."""
        while self._is_collective and all_reduce_max(0.0)[0] > 0:
            self._idle()

    def _idle(self) -> None:
        ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            out = self._lm.base_model(input_ids=ids, position_ids=ids, use_cache=False)
            head_of(self._lm)(out.last_hidden_state)
