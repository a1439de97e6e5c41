"""KV cache of a batch of answers. Memory is reserved, prompts are repeated for each answer, and rows can be dropped."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicIndexedLayer

_GROWTH = 1.5
"""Factor by which the reserved columns of a KV cache grow. Each growth copies the cache."""


class ReadPrompt(NamedTuple):
    """Where a prompt is in the KV cache of a prefill: its row, and its range of tokens."""

    cache: Cache
    row: int
    tokens: slice


def token_bytes(prompt: ReadPrompt) -> int:
    """Bytes that the KV cache of all layers needs for each token of a row."""
    parts = [part for layer in prompt.cache.layers for part in _parts(layer) if part is not None]
    return sum(part.nbytes // (len(part) * part.shape[-2]) for part in parts)


def _parts(layer: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - a layer of a cache
    """Keys and values [rows, heads, tokens, width] of a layer, and keys of its indexer [rows, tokens, width]. Tensors
    that the layer, or this pipeline stage, lacks are None.
    """
    return layer.keys, layer.values, layer.indexer_keys


class _RowLayer(DynamicIndexedLayer):
    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self._cache = cache
        self.parts: list[torch.Tensor | None] = [None, None, None]

    def update(  # type: ignore[override]
        self, key_states: torch.Tensor, value_states: torch.Tensor, *, kwargs: object = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of each row's new token, [rows, heads, 1, width]. Returns those of all tokens so
        far. `kwargs` is ignored; transformers passes it since 5.24 for continuous batching.
        """
        return self._write(0, key_states), self._write(1, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        return self._write(2, indexer_key_states)

    def _write(self, index: int, token: torch.Tensor) -> torch.Tensor:
        part, column = self.parts[index], self._cache.columns
        assert part is not None, index
        assert token.shape[-2] == 1, token.shape
        part[..., column : column + 1, :] = token
        return part[..., : column + 1, :]

    def get_seq_length(self) -> int:
        return self._cache.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.columns + query_length, 0


class RowCache(Cache):
    """Keys and values of rows whose last tokens are aligned in one column. A shorter prompt begins in a later column;
    the columns before it are zeros.
    """

    def __init__(self, prompts: Iterable[tuple[ReadPrompt, slice]], *, rows: int, columns: int, longest: int) -> None:
        """Copy prompts of at most `columns` tokens to ranges of rows. The cache grows to at most `longest` columns."""
        super().__init__(layers=[])
        self.columns = self._reserved = columns
        """Number of columns that have tokens, and number of columns for which memory is reserved."""
        self._longest = longest
        for prompt, of_prompt in prompts:
            self.layers += [_RowLayer(self) for _ in prompt.cache.layers[len(self.layers) :]]
            for layer, prompt_layer in zip(self.layers, prompt.cache.layers, strict=True):
                layer.parts = [
                    None if part is None else self._filled(reserved, part, prompt, of_prompt, rows=rows)
                    for reserved, part in zip(layer.parts, _parts(prompt_layer), strict=True)
                ]

    def _filled(
        self, reserved: torch.Tensor | None, part: torch.Tensor, prompt: ReadPrompt, of_prompt: slice, *, rows: int
    ) -> torch.Tensor:
        columns, tokens = self.columns, part[prompt.row, ..., prompt.tokens, :]
        reserved = part.new_zeros(rows, *part.shape[1:-2], columns, part.shape[-1]) if reserved is None else reserved
        reserved[of_prompt, ..., columns - tokens.shape[-2] :, :] = tokens
        return reserved

    def begin_column(self) -> None:
        """Ensure that there is memory for one more token of each row."""
        if self.columns < self._reserved:
            return
        self._reserved = min(self._longest, max(self.columns + 1, int(self.columns * _GROWTH)))
        self._replace(lambda part: functional.pad(part, (0, 0, 0, self._reserved - self.columns)))

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Drop all rows except `rows`, int64 [remaining rows]."""
        self._replace(lambda part: part.index_select(0, rows))

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for layer in self.layers:
            layer.parts = [None if part is None else change(part) for part in layer.parts]
