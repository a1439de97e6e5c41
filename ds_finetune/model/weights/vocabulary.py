"""Enlarges a model's vocabulary: embedding and head keep their rows and get new ones."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from ds_finetune.errors import ModelError
from ds_finetune.model.build.hub_folder import HubFolder, Shape

_EMBEDDING = re.compile(r"\b(embed_tokens|word_embeddings|embed_in|wte|embed)\.weight$")
_COMPARED, _MARGIN = 256, 1.25
"""Maximum number of ids in a sample of unused or used ids, and factor on the largest distance among unused ids."""
_STRIP_NUMEL = 2**20
"""Number of elements of a published tensor that are read at a time, rounded to full rows."""


@dataclass(frozen=True)
class Growth:
    """Vocabulary sizes of the published and the enlarged model, and a function from tensor name to seed of new rows."""

    before: int
    after: int
    seed_of: Callable[[str], int]


def grow_vocabulary(hf_config: PretrainedConfig, ids: int) -> None:
    """Set the model's vocabulary size to `ids` tokens if it is smaller. ModelError for a negative `pad_token_id`, or a
    model with token embeddings for each layer.
    """
    if ids <= hf_config.vocab_size:
        return
    if getattr(hf_config, "hidden_size_per_layer_input", 0):
        raise ModelError(
            f"model.resize_vocabulary: {hf_config.model_type} has token embeddings for each layer "
            f"(hidden_size_per_layer_input {hf_config.hidden_size_per_layer_input}), which are not enlarged",
            hint="use the model's own tokenizer",
        )
    pad = hf_config.pad_token_id
    if pad is not None and pad < 0:
        raise ModelError(
            f"pad_token_id {pad} counts from the end of the model's vocabulary, which model.resize_vocabulary enlarges "
            f"from {hf_config.vocab_size} to {ids} tokens",
            hint=f"write pad_token_id {pad + hf_config.vocab_size} in config.json, which is the same token",
        )
    hf_config.vocab_size = ids


def untrained_rows(folder: Path, candidates: Collection[int], used: Collection[int]) -> list[int]:
    """Token ids among `candidates` whose embeddings in the weights of `folder` look untrained.

    Distances are measured from the mean embedding of unused ids (not in `used`). An embedding looks untrained if its
    distance is at most `_MARGIN` times the largest distance of an unused id. But none looks untrained if most other
    used ids are as near, as after few training steps. If all ids are used, the mean is that of used ids, and the limit
    is half their median distance.
    """
    hub = HubFolder(folder)
    table = next((key for key, shape in hub.shapes.items() if _EMBEDDING.search(key) and len(shape) == 2), None)
    if table is None:
        return []

    def read(ids: Sequence[int]) -> torch.Tensor:
        return torch.cat([hub.rows(table, number, number + 1).double() for number in ids])

    unused = [number for number in range(hub.shapes[table][0]) if number not in used][:_COMPARED]
    used_ids = sorted({*used} - {*candidates})
    compared = used_ids[:: -(-len(used_ids) // _COMPARED)] if used_ids else []
    embeddings = read(unused or compared)
    distances = (embeddings - embeddings.mean(0)).norm(dim=1)
    limit = _MARGIN * distances.max() if unused else distances.median() / 2
    if unused and compared and (read(compared) - embeddings.mean(0)).norm(dim=1).median() <= limit:
        return []
    return [number for number in candidates if (read([number]) - embeddings.mean(0)).norm() <= limit]


class GrownFolder(HubFolder):
    """Published weights with the shapes of a larger vocabulary. `rows` reads published rows and samples new ones.

    Columns of new rows are normally distributed, with mean and standard deviation of the published rows. Samples depend
    on the tensor's name and the seed, not on the layout. Tensors with a row per token are found by their shapes.
    """

    def __init__(
        self, folder: Path, growth: Growth, shapes: Mapping[str, Shape], *, rename: Callable[[str], str] | None = None
    ) -> None:
        super().__init__(folder, rename=rename)
        self._growth = growth
        self._new_rows: dict[str, torch.Tensor] = {}
        grown = {
            key: shape
            for key, shape in shapes.items()
            if shape[:1] == (growth.after,) and self.shapes.get(key) == (growth.before, *shape[1:])
        }
        self._grown = frozenset(grown)
        self.shapes = {**self.shapes, **grown}

    def rows(self, key: str, first: int, last: int, within: tuple[slice, ...] = ()) -> torch.Tensor:
        """Rows `first` to `last` of a tensor, in the columns `within`. The thread's next read overwrites the result."""
        before = self._growth.before
        if key not in self._grown or last <= before:
            return super().rows(key, first, last, within)
        if key not in self._new_rows:
            mean, deviation = self._moments(key)
            generator = torch.Generator().manual_seed(self._growth.seed_of(key))
            shape = (self._growth.after - self._growth.before, *self.shapes[key][1:])
            self._new_rows[key] = (mean + deviation * torch.randn(shape, generator=generator)).float()
        new = self._new_rows[key][max(first - before, 0) : last - before]
        new = new[(slice(None), *within)]
        return new if first >= before else torch.cat([super().rows(key, first, before, within), new])

    def is_same(self, key: str, other: str) -> bool:
        """Whether the published rows of two tensors are equal."""
        return HubFolder(self.folder).is_same(key, other)

    def check_left(self, keys: Iterable[str]) -> None:
        """ModelError if one of the tensors `keys`, which no module loads, has a row for each token."""
        growing = [key for key in keys if self.shapes[key][:1] == (self._growth.before,)]
        if growing:
            raise ModelError(
                f"model.resize_vocabulary enlarges {self._growth.before} rows to {self._growth.after}, but "
                f"exports would copy {len(growing)} tensors of {self._growth.before} rows unchanged from "
                f"{self.folder}, because transformers does not load them: {', '.join(growing)}",
                hint="train a copy of the model without its multi-token prediction layers",
            )

    def _moments(self, key: str) -> tuple[torch.Tensor, torch.Tensor]:
        before, width = self._growth.before, self.shapes[key][1:]
        sums, squares = torch.zeros(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
        step = max(1, _STRIP_NUMEL // max(1, math.prod(width)))
        for first in range(0, before, step):
            values = super().rows(key, first, min(first + step, before)).double()
            sums += values.sum(dim=0)
            squares += values.square().sum(dim=0)
        mean = sums / before
        return mean, (squares / before - mean.square()).clamp_min(0).sqrt()
