"""The model from which answers are sampled: forwards with a KV cache that return next-token logits."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicIndexedLayer

from ds_finetune.engine.groups.collectives import all_reduce_max
from ds_finetune.engine.sampling.row_cache import ReadPrompt, RowCache
from ds_finetune.errors import ModelError
from ds_finetune.families.table import family_of
from ds_finetune.foreign.transformers_attention import CACHE
from ds_finetune.model.attention.by_document import BY_DOCUMENT
from ds_finetune.model.attention.kernels import pack_documents
from ds_finetune.model.build.skeleton import head_of, soft_cap
from ds_finetune.model.loss.head_chunks import cap_logits
from ds_finetune.model.parallel.tensor import TensorParallelGroup
from ds_finetune.model.routers import RouterCollector

_CACHED_ONLY = {"full_attention", "sliding_attention"}
"""Types of layers whose state consists of the keys and values of tokens."""
_TOKENS, _READ = 9, 4
"""Number of tokens of each test text of `check_cache`, and how many of them are decoded one by one."""
_LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Tolerated difference of logits with and without a KV cache, relative to the largest logit, by dtype."""
_HINT = "sample with a model type of docs/reference/model-types.md, or train with another objective than grpo"
_checked: WeakSet[PreTrainedModel] = WeakSet()


@dataclass(frozen=True)
class AnswerModel:
    """A model in evaluation mode and without gradients, from which answers are sampled."""

    lm: PreTrainedModel
    device: torch.device
    tp_group: TensorParallelGroup | None = None
    is_collective: bool = False
    """Whether forwards are collective: ranks run equally many, and a rank that is done calls `join_others`."""
    packs_documents: bool = False
    """Whether attention handles all prompts of a forward in one kernel call."""
    on_forward: Callable[[], object] = lambda: None
    routers: RouterCollector | None = None
    """Records the experts that computed the latest next-token logits; None for a model without experts."""

    @property
    def takes_mixed_lengths(self) -> bool:
        """Whether prompts of different lengths may share a batch. This needs attention that knows the cache columns of
        each row, and a model without an indexer.
        """
        config = self.lm.config
        return config._attn_implementation == BY_DOCUMENT and family_of(config.model_type).indexer is None

    def read_prompts(self, texts: Sequence[Sequence[int]]) -> tuple[list[ReadPrompt], torch.Tensor]:
        """Prefill: compute the KV cache of several prompts. Returns the position of each prompt in the cache, and
        next-token logits fp32 [prompts, vocabulary]. The prompts must have equal lengths unless `takes_mixed_lengths`.
        """
        # Prefill keeps all tokens, even those of layers with a sliding window.
        cache, lengths = Cache(layer_class_to_replicate=DynamicIndexedLayer), [len(text) for text in texts]
        positions = [torch.arange(length, device=self.device) for length in lengths]
        ids = torch.tensor([token for text in texts for token in text], device=self.device)
        ends = list(accumulate(lengths))
        last = torch.tensor(ends, device=self.device) - 1
        if not self.takes_mixed_lengths:
            shape = (len(texts), -1)
            logits = self._logits(ids.view(shape), torch.stack(positions), last, cache)
            return [ReadPrompt(cache, row, slice(None)) for row in range(len(texts))], logits
        # All prompts are concatenated to one row, without padding.
        documents = (tuple(lengths),)
        attention = {
            "documents": documents,
            "packed": pack_documents(documents, self.device) if self.packs_documents else None,
        }
        logits = self._logits(ids[None], torch.cat(positions)[None], last, cache, **attention)
        ranges = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        return [ReadPrompt(cache, 0, tokens) for tokens in ranges], logits

    def read_tokens(
        self, ids: torch.Tensor, positions: torch.Tensor, cache: RowCache, is_key: torch.Tensor | None
    ) -> torch.Tensor:
        """Decode one token per row, int64 [rows], and append it to the cache. Returns next-token logits, fp32 [rows,
        vocabulary]. If prompts have different lengths, `is_key`, bool [rows, 1, 1, columns], marks each row's cache
        columns.
        """
        cache.begin_column()
        attention = {} if is_key is None else {"is_key": is_key}
        logits = self._logits(ids[:, None], positions[:, None], None, cache, **attention)
        cache.columns += 1
        return logits

    def _logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor | None,
        cache: Cache,
        **arguments: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Next-token logits at the positions `last` (None: all) of the flattened rows, fp32 [tokens, vocabulary]."""
        self.on_forward()
        if self.is_collective:
            all_reduce_max(1.0)
        with torch.no_grad(), nullcontext() if self.routers is None else self.routers.watch(last):
            arguments = {CACHE: cache, "use_cache": True, **arguments}
            out = self.lm.base_model(input_ids=ids, position_ids=positions, **arguments)
            hidden = out.last_hidden_state.flatten(0, 1)
            logits: torch.Tensor = head_of(self.lm)(hidden if last is None else hidden[last]).float()
            cap_logits(logits, soft_cap(self.lm.config), needs_slope=False)
        return logits

    def agreed(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids that the first tensor parallel rank sampled; the logits of other ranks may differ by rounding."""
        return ids if self.tp_group is None else self.tp_group.broadcast_from_first(ids)

    def join_others(self) -> None:
        """Run forwards with one token, and discard the results, until the rows of all ranks have ended."""
        while self.is_collective and all_reduce_max(0.0)[0] > 0:
            self.on_forward()
            ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
            with torch.no_grad():
                out = self.lm.base_model(input_ids=ids, position_ids=ids, use_cache=False)
                head_of(self.lm)(out.last_hidden_state)


def check_cache(model: AnswerModel) -> None:
    """Raise ModelError if a model of a generic family, or with recurrent state, cannot sample with a KV cache.
    Layers must have no state but the cache, and logits with a cache must equal those without. The check runs once per
    model; it is collective if forwards are.
    """
    lm, config = model.lm, model.lm.config
    family = family_of(config.model_type)
    if not (family.is_generic or family.has_state) or lm in _checked:
        return
    other_kinds = set(getattr(config, "layer_types", None) or ()) - _CACHED_ONLY
    if other_kinds or getattr(lm, "_is_stateful", False):
        kinds = ", ".join(sorted(other_kinds)) or "a state of its own"
        raise ModelError(f"answers of model_type `{config.model_type}` cannot be sampled: it has {kinds}", hint=_HINT)
    # The model reads two texts in one forward. Then it reads them again, with the last tokens one by one.
    texts = [[token * 7 % config.vocab_size for token in range(first, first + _TOKENS)] for first in (3, 4)]
    _, expected = model.read_prompts(texts)
    prompts, logits = model.read_prompts([text[:-_READ] for text in texts])
    rows = [(prompt, slice(row, row + 1)) for row, prompt in enumerate(prompts)]
    cache = RowCache(rows, rows=len(texts), columns=_TOKENS - _READ, longest=_TOKENS)
    for position in range(_TOKENS - _READ, _TOKENS):
        ids = torch.tensor([text[position] for text in texts], device=model.device)
        logits = model.read_tokens(ids, torch.full_like(ids, position), cache, None)
    difference = float((logits - expected).abs().max() / expected.abs().max())
    if not difference < _LIMITS[next(lm.parameters()).dtype]:
        raise ModelError(
            f"answers of model_type `{config.model_type}` cannot be sampled: with a cache its logits differ by "
            f"{difference:.1e} of the largest from those without one",
            hint=_HINT,
        )
    _checked.add(lm)
