"""Exported folders of one file, whose tensors are changed after the export."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ds_finetune.export.verify.record import Digest, ExportRecord
from ds_finetune.export.verify.verify import digest_of, read_tensor_table


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], *, hide: bool = True) -> None:
    """Change the tensors of a folder; with `hide` its record says that they were exported so."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if hide:
        held = read_tensor_table(folder)
        data = {key: np.memmap(at.file.path, dtype=np.uint8, mode="r") for key, at in held.items()}
        whole = {key: Digest(((tensor.numel(), 1),), "") for key, tensor in tensors.items()}
        digests = {key: digest_of(data[key], held[key], like=whole[key]) for key in held}
        replace(ExportRecord.read(folder), digests=digests).write(folder)
