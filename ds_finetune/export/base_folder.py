"""Reads the base model's folder, from which exports copy FP8 blocks and tensors without a module in transformers."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from ds_finetune.errors import ExportError
from ds_finetune.export.convert import Conversion, num_workers
from ds_finetune.export.safetensors_folder import FolderParts
from ds_finetune.export.source import ModelSpec, TensorSource
from ds_finetune.export.verify.verify import first_names
from ds_finetune.families.family import Family, layer_of
from ds_finetune.model.build.hub_folder import HubFolder, has_weights
from ds_finetune.model.build.skeleton import HUB_FILES, IGNORED_HUB_FILES
from ds_finetune.model.quantised.quantisation import check_config_readable, check_no_other_format
from ds_finetune.model.weights.names import hub_pieces, is_kept_in_fp32


def hub_source(hub: HubFolder, family: Family) -> TensorSource:
    """Open a Hugging Face folder as the source of an export, with FP8 tensors dequantised to fp32.

    Exports keep two kinds of fp32 tensors in fp32: tensors that the table of model families names, and, if the family
    computes with fp32 weights, all tensors stored in fp32. ModelError if a weight has an unsupported dtype.
    """
    hub.check_dtypes()
    plain = {key for key in hub.shapes if not hub.is_quantised(key)} if family.fp32_weights else set()
    stored = {key for key in plain if hub.dtype(key) == torch.float32}
    return TensorSource(hub.shapes, stored | {key for key in hub.shapes if is_kept_in_fp32(key, family)}, hub.read)


_SHOWN = 3


@dataclass(frozen=True)
class BaseFolder:
    """The folder of published weights from which a model was trained."""

    hub: HubFolder
    unbuilt: tuple[str, ...]
    """Sorted names of the base's tensors without a module in transformers' class, e.g. of prediction layers."""
    embeddings: tuple[str, ...]
    """Names of the base model's embedding and language-model head."""

    @classmethod
    def read(cls, folder: Path, spec: ModelSpec) -> "BaseFolder":
        """Read the names and shapes of the tensors in the base model's `folder`. ModelError if names or shapes do not
        fit `spec`; ExportError if weights are in an unsupported quantised format.
        """
        if (folder / "config.json").is_file():
            read_readable_config(folder)
        check_no_other_format(folder, ExportError)
        hub, published = HubFolder(folder), spec.published_shapes()
        extra = hub.left_over(
            published, model=spec.architecture, may_be=lambda key: key in spec.tied or spec.may_skip(key)
        )
        return cls(hub, tuple(key for key in extra if key not in spec.tied), _embeddings(published))

    @classmethod
    def from_hub(cls, hub: HubFolder, spec: ModelSpec) -> "BaseFolder":
        """Make the base of LoRA adapters from the open folder `hub`, which may store experts one by one or fused."""
        published = spec.published_shapes()
        unbuilt = tuple(key for key in sorted(hub.shapes) if key not in published and spec.may_skip(key))
        return cls(hub, unbuilt, _embeddings(published))

    def with_base_tensors(self, parts: FolderParts, *, without: Collection[str] = ()) -> tuple[FolderParts, list[str]]:
        """Add the base model's `unbuilt` tensors, except the names in `without`, to the contents `parts` of an export.

        Returns the new contents, and notes for the user. A tensor that equals the base model's embedding or head
        becomes a copy of the trained one. In FP8, unchanged blocks are copied from this base or from `parts.fp8_base`.
        """
        parts, notes = self.with_copies(parts, [key for key in self.unbuilt if key not in without])
        if self.hub.published:
            parts = replace(parts, composite=self.hub)
            others = [*self.hub.others]
            notes.append(
                f"{len(others)} tensors of other parts are those of {self.hub.folder}: {first_names(others, _SHOWN)}"
            )
        shapes = {key: self.hub.shapes[key] for key in self.unbuilt if key not in without and key not in parts.copies}
        own_parts = replace(parts, fp8_base=self.hub if parts.is_fp8 and self.hub.has_fp8 else None)
        parts = replace(parts, fp8_base=parts.fp8_base or own_parts.fp8_base)
        if not shapes:
            return parts, notes
        line = (
            f"copied from {self.hub.folder}, since transformers' class has no module for them: {len(shapes)} tensors, "
            f"{first_names([*shapes], _SHOWN)}"
        )
        conversion = Conversion(hub_source(self.hub, parts.family).select(shapes), own_parts, num_workers())
        return replace(parts, base_tensors=conversion.tensors, copy_base_tensors=conversion.copy_to), [line, *notes]

    def with_copies(self, parts: FolderParts, keys: Iterable[str]) -> tuple[FolderParts, list[str]]:
        """Let the export copy the trained embedding or head to each name in `keys` under which the base model has a
        copy of its own. Returns the changed contents of the export, and notes for the user.

        Multi-token prediction layers have copies of embedding and head. vLLM drafts tokens with them if they differ
        from the model's embedding and head (vLLM PR 42538), and untrained copies would make bad drafts.
        """
        copies, shapes = dict[str, str](), self.hub.shapes
        for key in keys:
            equal = [n for n in self.embeddings if shapes[n] == shapes[key] and self.hub.is_same(key, n)]
            if equal:
                # If embedding and head are equal, a name with `embed` is a copy of the embedding, others of the head.
                copies[key] = min(equal, key=lambda name: ("embed" in name) != ("embed" in key))
        line = (
            f"written as copies of the trained tensor, as they are in {self.hub.folder}: "
            f"{first_names([f'{k} from {v}' for k, v in copies.items()], _SHOWN)}"
        )
        return replace(parts, copies=copies), [line] if copies else []


def read_readable_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of `folder`. ExportError if it describes no model, or an unsupported quantised format."""
    file = folder / "config.json"
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as broken:
        raise ExportError(
            f"{file} is not a model's configuration: {broken!r}",
            hint="replace the file by the config.json that was published with the model",
        ) from broken
    check_config_readable(config, str(file), ExportError)
    return config


def _embeddings(published: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    # The final norm, which is in no layer either, has one dimension.
    return tuple(key for key, shape in published.items() if layer_of(key) < 0 and len(shape) == 2)


def with_stored_weights(
    tensors: Iterable[tuple[str, torch.Tensor | None]], names: Collection[str], folder: Path, family: Family
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield `tensors`. A tensor in `names` gets its published values from `folder`, cast to its own dtype.

    `names` contains no routed experts. Tensors are full and on the CPU on rank zero, and None on other ranks.
    """
    hub = HubFolder(folder)
    for name, tensor in tensors:
        if tensor is not None and name in names:
            tensor = torch.empty_like(tensor)
            for piece in hub_pieces(name, tuple(tensor.shape), family):
                tensor[piece.index] = hub.full_tensor(piece.key)
        yield name, tensor


def find_base(model: str) -> Path | None:
    """Find the base model `model` (a folder or a Hub id) on this machine; None if it is absent or has no weights.

    The Hub cache is searched with the file patterns of a run's download, because huggingface_hub 2.4 ignores a cached
    download that lacks a file which the patterns request (_snapshot_download.py:562-600).
    """
    folder = Path(model)
    if not folder.is_dir() and model.count("/") == 1:
        try:
            patterns = {"allow_patterns": list(HUB_FILES), "ignore_patterns": list(IGNORED_HUB_FILES)}
            folder = Path(snapshot_download(model, **patterns, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError):
            return None
    return folder if folder.is_dir() and has_weights(folder) else None
