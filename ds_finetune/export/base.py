"""The model that was trained from, as far as an export needs it: tensors that training did not touch, and bytes of FP8 blocks."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ds_finetune.export.convert import Conversion, ModelSpec, Selected, workers
from ds_finetune.export.folder import FolderParts
from ds_finetune.export.model_config import PREDICTION_LAYERS, prediction_layers
from ds_finetune.model.families import Family
from ds_finetune.model.hub_folder import HubFolder, has_weights

_SHOWN = 3


@dataclass(frozen=True)
class HubSource:
    """The tensors of a Hugging Face folder as a TensorSource; those in FP8 multiplied out to fp32. ModelError where one holds no weights."""

    hub: HubFolder
    family: Family

    def __post_init__(self) -> None:
        self.hub.check_kinds()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor but the scales."""
        return self.hub.shapes

    @property
    def fp32_names(self) -> Collection[str]:
        """Tensors that the family keeps in fp32."""
        return {name for name in self.hub.shapes if name.rpartition(".")[2] in self.family.fp32_buffers}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements [start, start + numel) of the flattened tensor, 1-D; ModelError where they cannot be read."""
        return self.hub.read(name, start, numel)


@dataclass(frozen=True)
class Base:
    """A folder of published weights, and its tensors that the model does not build, in order."""

    hub: HubFolder
    left: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec) -> "Base":
        """ModelError where the weights in `folder` are not those of the model that `spec` describes."""
        hub = HubFolder(folder)
        left = hub.left_over(spec.published(), model=spec.architecture, may_be=lambda key: key in spec.tied or spec.may_leave(key))
        return cls(hub, tuple(key for key in left if key not in spec.tied))

    def carried(self, parts: FolderParts, *, without: Collection[str] = ()) -> tuple[FolderParts, list[str]]:
        """`parts` with those tensors, but `without` the ones that are there already, and what to say of it.

        In an FP8 folder, blocks keep this base's bytes unless another folder is named for that.
        """
        shapes = {key: self.hub.shapes[key] for key in self.left if key not in without}
        mine = replace(parts, fp8_base=self.hub if parts.is_fp8 and self.hub.has_fp8 else None)
        parts = replace(parts, fp8_base=parts.fp8_base or mine.fp8_base)
        if not shapes:
            return parts, []
        shown = f"{', '.join([*shapes][:_SHOWN])}{' ...' if len(shapes) > _SHOWN else ''}"
        line = f"carried over from {self.hub.folder}, since the model does not build them: {len(shapes)} tensors, {shown}"
        return replace(parts, carried=(Conversion(Selected(HubSource(self.hub, parts.family), shapes), mine, workers()),)), [line]


def read_again(tensors: Iterable[tuple[str, torch.Tensor | None]], names: Collection[str], folder: Path) -> Iterator[tuple[str, torch.Tensor | None]]:
    """`tensors` (whole, on the CPU; None on other ranks than zero), of which `names` are read from `folder`, in the dtype they have."""
    hub = HubFolder(folder)
    for name, tensor in tensors:
        yield name, tensor if tensor is None or name not in names else hub.whole(name).to(tensor.dtype)


def counted(parts: FolderParts, keys: Iterable[str]) -> list[str]:
    """That config.json will say another number of prediction layers than it did, where it does, for the tensors `keys`."""
    said, found = parts.config.get(PREDICTION_LAYERS), prediction_layers(parts.config, list(keys))
    return [f"config.json: {PREDICTION_LAYERS} {said} -> {found}, as many as have tensors"] if said is not None and said != found else []


def base_of_run(model: str) -> Path | None:
    """The folder of `model.path` of a run file, where it or its download is on this machine and has weights."""
    folder = Path(model)
    if not folder.is_dir() and model.count("/") == 1:
        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError):
            return None
    return folder if folder.is_dir() and has_weights(folder) else None
