"""The tensors of a Hugging Face folder as a source of an export."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ds_finetune.families.family import Family
from ds_finetune.model.build.hub_folder import HubFolder


@dataclass(frozen=True)
class HubSource:
    """The tensors of a Hugging Face folder as a TensorSource; those in FP8 are dequantised to fp32.

    ModelError where a tensor has a dtype that weights do not have.
    """

    hub: HubFolder
    family: Family

    def __post_init__(self) -> None:
        self.hub.check_dtypes()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, except the scales of FP8 weights."""
        return self.hub.shapes

    @property
    def fp32_names(self) -> Collection[str]:
        """Tensors that the family keeps in fp32."""
        return {name for name in self.hub.shapes if name.rpartition(".")[2] in self.family.fp32_buffers}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, 1-D; ModelError where they cannot be read."""
        return self.hub.read(name, start, numel)
