"""Convert a folder whose experts are in FP4 (DeepSeek-V4-Flash) to 16 or 32 bits, by its published names.

Such a folder is not fitted to transformers' class, which has other names for its tensors and reads the published ones.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ds_finetune.errors import ExportError
from ds_finetune.export.convert import Conversion, num_workers
from ds_finetune.export.folder import FolderParts
from ds_finetune.export.readers.hub import HubSource
from ds_finetune.export.verify.record import ExportRecord, fixed_prompts
from ds_finetune.families.family import Family
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.dtypes import dtype_name
from ds_finetune.model.build.hub_folder import HubFolder, check_folder
from ds_finetune.model.quantised.quantisation import has_fp4_experts

_WHOLE_NUMBERS = (torch.int64, torch.int32)
"""Dtypes of tables of V4's routers, which are copied as they are."""


@dataclass(frozen=True)
class _PublishedTensors(HubSource):
    """The tensors of a folder; those that are stored in fp32 or as whole numbers keep their dtype."""

    def __post_init__(self) -> None:
        self.hub.check_dtypes(besides=[key for key in self.hub.shapes if self.hub.dtype(key) in _WHOLE_NUMBERS])


@dataclass(frozen=True)
class _Copy(Conversion):
    source: _PublishedTensors

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of the export for what is quantised or has 16 bits, else the stored one."""
        hub = self.source.hub
        stored = hub.dtype(name)
        return self.parts.dtype if hub.is_quantised(name) or stored.itemsize == torch.bfloat16.itemsize else stored


def is_in_fp4(path: Path) -> bool:
    """Whether `path` is a model folder whose config.json says that its experts are in FP4."""
    file = path / "config.json"
    if not file.is_file():
        return False
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(config, dict) and has_fp4_experts(config)


def published_copy(path: Path, *, dtype: torch.dtype, files: tuple[Path, ...]) -> Conversion:
    """The conversion of the model in `path` to `dtype`, with `files` beside it.

    ModelError where the folder cannot be read; ExportError where transformers does not know its model type.
    """
    check_folder(path)
    try:
        read = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (ValueError, OSError) as unknown:
        raise ExportError(
            f"{path}/config.json: {str(unknown).splitlines()[0]}", hint="take the config.json published with it"
        ) from unknown
    hub, vocab_size = HubFolder(path), int(read.vocab_size)
    # Its names are not those of the model, so that no row of the table of families fits.
    family = Family(str(read.model_type), is_generic=True)
    parts = FolderParts(
        family=family,
        config=json.loads((path / "config.json").read_text(encoding="utf-8")),
        architecture=(read.architectures or ["AutoModelForCausalLM"])[0],
        dtype=dtype,
        files=files,
        record=ExportRecord(str(path.absolute()), dtype_name(dtype), vocab_size, fixed_prompts(vocab_size, None)),
    )
    return _Copy(_PublishedTensors(hub, family), parts, num_workers())
