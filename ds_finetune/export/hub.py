"""The tensors of a Hugging Face folder as they lie in its safetensors files, read in parts without mapping the files."""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_finetune.errors import ExportError
from ds_finetune.export.shards import DTYPE_CODES, INDEX
from ds_finetune.export.torch_files import DataFile, FlatVector, Run, Scratch
from ds_finetune.model.families import Family

_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_LENGTH_BYTES = 8


class HubFolder:
    """A TensorSource over `folder`, by the names of its files; ExportError where a file is absent, torn, or of another dtype than 16 or 32 bits."""

    def __init__(self, folder: Path, family: Family) -> None:
        found = {name: (run, shape) for file in _files(folder) for name, run, shape in _tensors(file)}
        self._runs = {name: FlatVector([run]) for name, (run, _) in found.items()}
        self._shapes = {name: shape for name, (_, shape) in found.items()}
        self._family, self._scratch = family, Scratch()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by its name in the files."""
        return self._shapes

    @property
    def fp32_names(self) -> Collection[str]:
        """Buffers that the family keeps in fp32."""
        return {name for name in self._shapes if name.rpartition(".")[2] in self._family.fp32_buffers}

    def read(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of the flattened tensor, valid until the same thread's next read."""
        flat = self._scratch.take(numel, self._runs[name].dtype)
        self._runs[name].read_into(flat.view(torch.uint8).numpy().data, start)
        return flat


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ExportError(f"`{folder}` has no safetensors weights", hint="name the folder of the model by --base")
        return found
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    wrong = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if wrong:
        raise ExportError(f"{index} names {len(wrong)} files that are not in the folder: {', '.join(wrong[:5])}", hint="download the model again")
    return [folder / name for name in names]


def _tensors(path: Path) -> Iterator[tuple[str, Run, tuple[int, ...]]]:
    """Name, place and shape of every tensor of a file, from its header."""
    begin, header = _header(path)
    file = DataFile(path)
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ExportError(f"{path} holds `{name}` as {entry['dtype']}", hint=f"give a copy in {', '.join(_DTYPES)} by --base")
        shape = tuple(entry["shape"])
        yield name, Run(file, begin + entry["data_offsets"][0], math.prod(shape), _DTYPES[entry["dtype"]]), shape


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begins, and its entries; ExportError where the file is not as long as they say."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        text = file.read(length) if length < size else b""
    try:
        header = json.loads(text)
    except ValueError as broken:
        raise ExportError(f"{path} is no safetensors file: {broken}", hint="download the model again") from broken
    header.pop("__metadata__", None)
    begin = _LENGTH_BYTES + length
    wanted = begin + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != wanted:
        raise ExportError(f"{path} has {size:,} bytes and its header speaks of {wanted:,}", hint="the file is torn; download the model again")
    return begin, header
