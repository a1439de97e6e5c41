"""Verifies an exported folder: compares its bytes, tensor names and logits with its record and its base model."""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from ds_finetune.config.units import GIB
from ds_finetune.errors import ExportError, VerificationError
from ds_finetune.export.verify.logits import LoadedFolder, compare_logits, compare_padding, compare_tokens, load_folders
from ds_finetune.export.verify.record import UNVERIFIED, Digest, ExportRecord
from ds_finetune.families.table import family_of
from ds_finetune.families.text_part import is_composite, text_name, text_tree
from ds_finetune.model.build.dtypes import SAFETENSORS_NAMES
from ds_finetune.model.quantised.fp8 import FP8
from ds_finetune.model.weights.safetensors_file import StoredTensor, TensorFile, read_header
from ds_finetune.plan.config_json import MAX_LAYERS


def read_tensor_table(folder: Path) -> dict[str, StoredTensor]:
    """Read the table of tensors in a folder's safetensors files, by name. ExportError if a header is damaged. A file
    may be shorter than its header says; then the digests of its tensors differ.
    """
    table = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = TensorFile(path)
        try:
            for key, entry in read_header(path, is_complete=False).tensors.items():
                table[key] = StoredTensor(file, entry.dtype, entry.shape, entry.begin)
        except (OSError, ValueError) as damaged:
            raise ExportError(
                f"{path} is not a safetensors file: {damaged}", hint="export the folder again"
            ) from damaged
    return table


def changed_tensors(tensors: Mapping[str, StoredTensor], record: ExportRecord) -> list[str]:
    """Lines on tensors that are missing, added or changed in comparison with the verification `record`."""
    digests = record.digests or {}
    absent = sorted(digests.keys() - tensors.keys())
    added = sorted(tensors.keys() - digests.keys())
    common = sorted(tensors.keys() & digests.keys())
    maps = {file: np.memmap(file.path, dtype=np.uint8, mode="r") for file in {tensors[key].file for key in common}}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sums = pool.map(lambda key: digest_of(maps[tensors[key].file], tensors[key], like=digests[key]), common)
        changed = [key for key, digest in zip(common, sums, strict=True) if digest != digests[key]]
    kinds = (
        ("were written and are missing", absent),
        ("were not written by the export", added),
        ("hold other bytes than were written", changed),
    )
    return [f"{len(keys)} tensors {text}: {first_names(keys)}" for text, keys in kinds if keys]


def digest_of(data: NDArray[np.uint8], tensor: StoredTensor, *, like: Digest) -> Digest:
    """Compute the digest of a tensor in a file; `data` are the bytes of the file. It has the segments of the
    recorded digest `like`. If the file is too short, only the bytes that exist are digested.
    """
    begin, segments = tensor.begin, []
    for numel in like.lengths():
        end = begin + numel * tensor.dtype.itemsize
        segments.append((numel, xxhash.xxh3_64_intdigest(data[begin:end].data)))
        begin = end
    return Digest.of(segments)


def compare_with_base(
    tensors: Mapping[str, StoredTensor], base_tensors: Mapping[str, StoredTensor], base: Path
) -> list[str]:
    """Lines on names, shapes and dtypes that differ from the base model's tensors, or a line that says none differs."""
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
    names = SAFETENSORS_NAMES
    dtypes = {key: (names[tensors[key].dtype], names[base_tensors[key].dtype]) for key in common}
    for pair in sorted({pair for pair in dtypes.values() if pair[0] != pair[1]}):
        kinds.append((f"are {pair[0]} here and {pair[1]} in the base", [key for key in common if dtypes[key] == pair]))
    lines = [f"{len(keys)} tensors {text}: {first_names(keys)}" for text, keys in kinds if keys]
    return lines or [f"names, shapes and dtypes of all {len(common)} tensors are those of the base"]


def first_names(names: Sequence[str], shown: int = 10) -> str:
    """Join the first names of a list for a message, followed by `...` if there are more than `shown`."""
    return ", ".join(names[:shown]) + (" ..." if len(names) > shown else "")


_MEMORY_FP8, _MEMORY_FP32, _MEMORY_16_BIT = 6.0, 1.2, 2.4
"""Memory for loading an exported folder, relative to the size of its files. FP8 weights are dequantised to bf16;
these and 16-bit weights are then cast to fp32.
"""


@dataclass(frozen=True)
class VerificationResult:
    """Result of verifying the exported `folder`."""

    folder: Path
    problems: tuple[str, ...] = ()
    """Lines for the user on differences from the trained model; empty if there are none."""
    lines: tuple[str, ...] = ()
    """Lines for the user on what verification compared."""
    skipped: str = ""
    """Why the exported folder could not be loaded on this machine; empty if it was loaded."""

    @property
    def is_verified(self) -> bool:
        """Whether the exported folder was compared completely and no difference was found."""
        return not self.problems and not self.skipped


class SignalInterruption:
    """Context in which each of `signals` raises KeyboardInterrupt. `name` is the name of the first signal that arrived.

    A KeyboardInterrupt raised within a destructor is lost: Python prints it and continues. DeepSpeed 0.19.8 has a
    destructor (runtime/engine.py:1236) that takes most of a second at the end of a run. A signal that arrives there is
    raised again at the end of the context, or by `check`. Signals that were ignored before, e.g. under nohup, stay
    ignored.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.name = ""
        self._signals = signals
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        handled = [number for number in self._signals if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._interrupt) for number in handled}
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is None and self.name:
            raise KeyboardInterrupt

    def check(self, unverified: Sequence[Path]) -> None:
        """Raise a VerificationError that lists the `unverified` folders, if a signal has arrived."""
        if self.name and unverified:
            raise VerificationError(
                f"{self.name} ended the verification: these folders are complete but not verified: "
                f"{', '.join(map(str, unverified))}",
                hint="verify them: " + "; ".join(f"ds-finetune export --check {folder}" for folder in unverified),
            )

    def _interrupt(self, number: int, _: object) -> None:
        self.name = self.name or signal.Signals(number).name
        raise KeyboardInterrupt


def verify_exports(
    folders: Sequence[Path], *, base: Path | None = None, available_bytes: int | None = None
) -> list[VerificationResult]:
    """Compare each exported folder with its record and mark it: the file UNVERIFIED is removed, or says what is wrong.

    The bytes of its tensors are compared with the digests of what was written, and their names, shapes and dtypes with
    the model `base` (by default the one in the record). Then one process without ds_finetune loads each folder with
    plain transformers, and its logits are compared with the recorded ones.

    The deviation of a position is the root mean square of the difference over its sampled logits, divided by the
    largest recorded logit of all positions. Nine tenths of the positions must be within the limit. The others may
    exceed it because of routers: rounding can make them choose another of two experts with nearly equal scores. In fp32
    the limit is 1e-5. In bf16 and fp16 it is 1e-3 or, if larger, three times the deviation between plain transformers
    in that dtype and in fp32; at most 0.05.

    FP8 weights are dequantised, and logits are compared in fp32. The limit is twice the deviation by rounding: that of
    bf16 from fp32, plus that of a model whose FP8 numbers are moved at random by up to half a step; at most 0.15.

    Folders that need more than `available_bytes` of memory (None: no limit) are skipped. ExportError if a folder has no
    record; VerificationError after SIGINT or SIGTERM, which names the unverified folders.
    """
    results: list[VerificationResult] = []
    with SignalInterruption(signal.SIGINT, signal.SIGTERM) as interruption:
        try:
            # Results arrive one folder at a time, so that an interruption keeps the earlier ones.
            for result in _verify_each(folders, base, available_bytes):
                results.append(result)
        except KeyboardInterrupt:
            interruption.check(folders[len(results) :])
            raise
        interruption.check(folders[len(results) :])
    return results


def mark_folder(result: VerificationResult) -> None:
    """Remove the file UNVERIFIED if the folder is verified; otherwise write the reason to it."""
    marker = result.folder / UNVERIFIED
    if result.is_verified:
        marker.unlink(missing_ok=True)
    else:
        marker.write_text("\n".join(result.problems or (result.skipped,)) + "\n", encoding="utf-8")


def _verify_each(
    folders: Sequence[Path], base: Path | None, available_bytes: int | None
) -> Iterator[VerificationResult]:
    records = {folder: ExportRecord.read(folder) for folder in folders}
    needed = {}
    for folder, record in records.items():
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        is_fp8 = any(tensor.dtype == FP8 for tensor in read_tensor_table(folder).values())
        factor = _MEMORY_FP8 if is_fp8 else _MEMORY_FP32 if record.dtype == "float32" else _MEMORY_16_BIT
        needed[folder] = round(size * factor)
    fitting = [folder for folder in folders if available_bytes is None or needed[folder] <= available_bytes]
    loaded = dict(load_folders(fitting))
    for folder, record in records.items():
        if folder in loaded:
            result = _compare(folder, record, loaded[folder], base or Path(record.base))
        else:
            text = (
                f"not checked: loading it takes {needed[folder] / GIB:.1f} GiB of memory, of which "
                f"{(available_bytes or 0) / GIB:.1f} GiB are free here; run `ds-finetune export --check {folder}` "
                "where there is more"
            )
            result = VerificationResult(folder, skipped=text)
        mark_folder(result)
        yield result


def _compare(folder: Path, record: ExportRecord, loaded: LoadedFolder, base: Path) -> VerificationResult:
    tensors = read_tensor_table(folder)
    base_tensors = read_tensor_table(base) if base.is_dir() else {}
    problems = changed_tensors(tensors, record)
    lines = [
        f"{len(tensors)} tensors on the disk" + ("" if problems else ", each with the bytes that were written"),
        *compare_with_base(tensors, base_tensors, base),
    ]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if is_composite(config):
        others = {key: tensor for key, tensor in base_tensors.items() if text_name(key) is None}
        digests = {key: digest for key, digest in (record.digests or {}).items() if text_name(key) is None}
        changed = changed_tensors(others, replace(record, digests=digests))
        problems += [f"of the parts other than text, which {base} has, {line}" for line in changed if others]
        lines += [f"{len(digests)} tensors of other parts than text have the base's bytes"] if others else []
    if loaded.failure:
        problems.append(f"plain transformers does not load it: {loaded.failure}")
        return VerificationResult(folder, tuple(problems), tuple(lines))
    text, unexpected = text_tree(config), []
    for key in (key for key in loaded.report["unexpected_keys"] if key not in base_tensors):
        # Tensors that the model class ignores, e.g. of a multi-token prediction layer, are not reported. Those of parts
        # other than text, which transformers may have renamed, are compared with the base where it is a folder.
        is_other = is_composite(config) and text_name(key) is None
        if not is_other and not family_of(str(text.get("model_type"))).may_skip(
            key, layers=text.get("num_hidden_layers", MAX_LAYERS)
        ):
            unexpected.append(key)
    differences = {
        "misses": loaded.report["missing_keys"],
        "does not know": unexpected,
        "has other shapes for": loaded.report["mismatched_keys"],
    }
    problems += [
        f"plain transformers {verb} {len(keys)} tensors: {first_names(keys)}"
        for verb, keys in differences.items()
        if keys
    ]
    of_classifier = (compare_logits, compare_padding, compare_tokens)
    for compare_kind in of_classifier if record.num_labels else (compare_tokens, compare_logits):
        more_problems, more_lines = compare_kind(record, loaded)
        problems, lines = [*problems, *more_problems], [*lines, *more_lines]
    return VerificationResult(folder, tuple(problems), tuple(lines))
