"""The tensors of an exported folder compared with the digests of what was written, and with the tensors of its base."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ds_finetune.errors import ExportError
from ds_finetune.export.verify.record import Digest, ExportRecord
from ds_finetune.model.build.dtypes import SAFETENSORS_NAMES
from ds_finetune.model.weights.safetensors_file import read_header

_SHOWN = 10
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d*)(?=\.)")


@dataclass(frozen=True)
class TensorInFile:
    """Where a tensor is stored: row-major, from byte `begin` of `file`."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def read_tensor_table(folder: Path) -> dict[str, TensorInFile]:
    """Every tensor of a folder's safetensors files by name; ExportError where a header is damaged.

    A file may be shorter than its header says: then the digests of its tensors differ.
    """
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in _tensors_in(file)}


def _tensors_in(file: Path) -> Iterator[tuple[str, TensorInFile]]:
    try:
        for key, entry in read_header(file, is_whole=False).tensors.items():
            yield key, TensorInFile(file, entry.begin, entry.shape, entry.dtype)
    except (OSError, ValueError) as damaged:
        raise ExportError(f"{file} is not a safetensors file: {damaged}", hint="export the folder again") from damaged


def changed_tensors(tensors: Mapping[str, TensorInFile], record: ExportRecord) -> list[str]:
    """A line for each way in which `tensors` differ from what was written according to `record`."""
    digests = record.digests or {}
    absent = sorted(digests.keys() - tensors.keys())
    added = sorted(tensors.keys() - digests.keys())
    common = sorted(tensors.keys() & digests.keys())
    maps = {file: np.memmap(file, dtype=np.uint8, mode="r") for file in {tensors[key].file for key in common}}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sums = pool.map(lambda key: digest_of(maps[tensors[key].file], tensors[key], like=digests[key]), common)
        changed = [key for key, digest in zip(common, sums, strict=True) if digest != digests[key]]
    kinds = (
        ("were written and are missing", absent),
        ("were not written by the export", added),
        ("hold other bytes than were written", changed),
    )
    return [f"{len(keys)} tensors {text}: {first_names(keys)}" for text, keys in kinds if keys]


def digest_of(data: NDArray[np.uint8], tensor: TensorInFile, *, like: Digest) -> Digest:
    """The digest of a tensor whose file holds the bytes `data`, over the same segments as `like`.

    Where the file is too short, only the bytes that it has are digested.
    """
    begin, segments = tensor.begin, []
    for numel in like.lengths():
        end = begin + numel * tensor.dtype.itemsize
        segments.append((numel, xxhash.xxh3_64_intdigest(data[begin:end].data)))
        begin = end
    return Digest.of(segments)


def compare_with_base(
    tensors: Mapping[str, TensorInFile], base_tensors: Mapping[str, TensorInFile], base: Path
) -> list[str]:
    """A line for each way in which names, shapes and dtypes differ from those of the base; one line where none does."""
    if not base_tensors:
        return [f"names are not compared with the base's: `{base}` has no safetensors weights here"]
    common = sorted(tensors.keys() & base_tensors.keys())
    shapes = [
        f"{key} {tensors[key].shape} for {base_tensors[key].shape}"
        for key in common
        if tensors[key].shape != base_tensors[key].shape
    ]
    kinds = [
        ("of the base are not here", sorted(base_tensors.keys() - tensors.keys())),
        ("are not in the base", sorted(tensors.keys() - base_tensors.keys())),
        ("have another shape than in the base", shapes),
    ]
    dtypes = {
        key: (SAFETENSORS_NAMES[tensors[key].dtype], SAFETENSORS_NAMES[base_tensors[key].dtype]) for key in common
    }
    for ours, its in sorted({pair for pair in dtypes.values() if pair[0] != pair[1]}):
        kinds.append((f"are {ours} here and {its} in the base", [key for key in common if dtypes[key] == (ours, its)]))
    lines = [f"{len(keys)} tensors {text}: {', '.join(in_ranges(keys))}" for text, keys in kinds if keys]
    return lines or [f"names, shapes and dtypes of all {len(common)} tensors are those of the base"]


def in_ranges(names: Sequence[str]) -> list[str]:
    """All of `names`; those that differ only in their numbers are written as one, e.g. `experts.{0-255}.up_proj`.

    Names are joined only where the ranges describe exactly those names.
    """
    by_pattern: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        pattern = _NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}"))
        by_pattern.setdefault(pattern, []).append(tuple(map(int, _NUMBER.findall(name))))
    lines: list[str] = []
    for pattern, numbers in by_pattern.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if set(product(*columns)) == set(numbers):
            lines.append(pattern.format(*map(_range_text, columns)))
        else:
            lines += [pattern.format(*each) for each in numbers]
    return lines


def _range_text(numbers: Sequence[int]) -> str:
    """`7`, or `{0-2, 5}` for several numbers."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return f"{{{', '.join(f'{run[0]}-{run[-1]}' if len(run) > 1 else str(run[0]) for run in runs)}}}"


def first_names(names: Sequence[str]) -> str:
    """The first of `names`, for a message."""
    return ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
