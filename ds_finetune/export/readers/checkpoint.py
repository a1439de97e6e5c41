"""Weights of a checkpoint of a run, read a bounded piece at a time from the parts of all ranks."""

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from ds_finetune.checkpoint.chunks import flat_range_chunks
from ds_finetune.checkpoint.files import Manifest, part_name
from ds_finetune.checkpoint.part_storage import PartReader
from ds_finetune.engine.state.state import BUFFER, WEIGHT
from ds_finetune.errors import CheckpointError
from ds_finetune.model.parallel.sharding import shape_in_model


class CheckpointSource:
    """The fp32 weights and the buffers of a checkpoint, as a TensorSource."""

    def __init__(self, folder: Path) -> None:
        manifest = Manifest.read(folder)
        absent = [
            part_name(rank, manifest.world_size) for rank in range(manifest.world_size) if rank not in manifest.ranks
        ]
        if absent:
            raise CheckpointError(
                f"{folder} lacks {', '.join(absent)}: other nodes keep them",
                hint="make it whole with `ds-finetune checkpoint gather`",
            )
        self._reader = reader = PartReader(folder / name for name in manifest.parts)
        kinds = {key: key.partition("/") for key in reader.held}
        self._chunks = {name: reader.held[key] for key, (kind, _, name) in kinds.items() if kind in (WEIGHT, BUFFER)}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every parameter and persistent buffer by the model's name for it."""
        return {name: shape_in_model(chunks[0][1].shape) for name, chunks in self._chunks.items()}

    @property
    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """The same without buffers."""
        return {
            name: shape for name, shape in self.shapes.items() if self._chunks[name][0][1].key.startswith(f"{WEIGHT}/")
        }

    @property
    def fp32_names(self) -> Collection[str]:
        """Buffers that training kept in fp32."""
        return {
            name
            for name, chunks in self._chunks.items()
            if chunks[0][1].key.startswith(f"{BUFFER}/") and chunks[0][1].dtype == torch.float32
        }

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, 1-D.

        CheckpointError where some of them are in no part.
        """
        item = self._chunks[name][0][1]
        out = torch.empty(numel, dtype=item.dtype)
        position = copied = 0
        for box in flat_range_chunks(item.shape, start, numel):
            target = out[position : position + box.numel].view(box.sizes)
            position += box.numel
            copied += self._reader.copy(item.key, box, target)
        if copied != numel:
            raise CheckpointError(
                f"{numel - copied:,} of {numel:,} elements of `{name}` are in no part", hint="take another checkpoint"
            )
        return out
