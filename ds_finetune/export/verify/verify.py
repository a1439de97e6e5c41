"""Verifies that an exported folder is what was trained: compares its bytes, its names with the base's, and its
logits.
"""

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_finetune.config.units import GIB
from ds_finetune.export.interruption import SignalInterruption
from ds_finetune.export.verify.logits import (
    LoadedFolder,
    compare_logits,
    compare_padding,
    compare_tokens,
    load_folders,
)
from ds_finetune.export.verify.record import UNVERIFIED, ExportRecord
from ds_finetune.export.verify.tensors import changed_tensors, compare_with_base, first_names, read_tensor_table
from ds_finetune.families.table import family_of
from ds_finetune.model.quantised.fp8 import FP8

_MEMORY_FP8, _MEMORY_FP32, _MEMORY_16_BIT = 6.0, 1.2, 2.4
"""Times the size of its files that loading a folder takes: FP8 weights are dequantised to fp32 and joined as bf16,
16-bit ones are loaded and then cast to fp32.
"""


@dataclass(frozen=True)
class VerificationResult:
    """The result of verifying `folder`."""

    folder: Path
    problems: tuple[str, ...] = ()
    """Differences from what was trained."""
    lines: tuple[str, ...] = ()
    """What was compared."""
    skipped: str = ""
    """Why the folder could not be loaded here; empty where it was."""

    @property
    def is_verified(self) -> bool:
        """Whether everything was compared and nothing differs."""
        return not self.problems and not self.skipped


def verify_exports(
    folders: Sequence[Path], *, base: Path | None = None, available_bytes: int | None = None
) -> list[VerificationResult]:
    """Compare each exported folder with its record and mark it: the file UNVERIFIED is removed, or says what is
    wrong.

    The bytes of its tensors are compared with the digests of what was written; names, shapes and dtypes with those
    of `base` (by default the base in the record). Then one process without ds_finetune loads each folder with plain
    transformers, and its logits are compared with the recorded ones.

    A position's deviation is the root mean square of the difference over its sampled logits, divided by the largest
    recorded logit of all positions. Nine tenths of the positions must be within the limit; the other tenth allows
    for routers, which rounding can make choose another of two experts with nearly equal scores. The limit in fp32 is
    1e-5. In bf16 and fp16 it is 1e-3, or three times what the logits of plain transformers in that dtype deviate
    from its logits in fp32 where that is more, at most 0.05.

    Weights in FP8 are dequantised by that process, and its logits in fp32 are compared. The limit is twice what
    rounding explains: the deviation of bf16 from fp32, plus that of the model whose FP8 numbers are each moved at
    random within their rounding. It is at most 0.15.

    Folders that need more than `available_bytes` of memory (None: no limit) are skipped. ExportError where a folder
    has no record; VerificationError after SIGINT or SIGTERM, which names the folders that are unverified.
    """
    results: list[VerificationResult] = []
    with SignalInterruption(signal.SIGINT, signal.SIGTERM) as interruption:
        try:
            # One at a time, so that an interruption keeps the results before it.
            for result in _verify_each(folders, base, available_bytes):
                results.append(result)
        except KeyboardInterrupt:
            interruption.check(folders[len(results) :])
            raise
        interruption.check(folders[len(results) :])
    return results


def mark_folder(result: VerificationResult) -> None:
    """Remove the file UNVERIFIED from a verified folder; in another one write why it is not verified."""
    marker = result.folder / UNVERIFIED
    if result.is_verified:
        marker.unlink(missing_ok=True)
    else:
        marker.write_text("\n".join(result.problems or (result.skipped,)) + "\n", encoding="utf-8")


def _verify_each(
    folders: Sequence[Path], base: Path | None, available_bytes: int | None
) -> Iterator[VerificationResult]:
    """Verify and mark the folders one after another."""
    records = {folder: ExportRecord.read(folder) for folder in folders}
    needed = {folder: _needed_bytes(folder, record) for folder, record in records.items()}
    fitting = [folder for folder in folders if available_bytes is None or needed[folder] <= available_bytes]
    loaded = dict(load_folders(fitting))
    for folder, record in records.items():
        if folder in loaded:
            result = _compare(folder, record, loaded[folder], base or Path(record.base))
        else:
            result = _skipped(folder, needed[folder], available_bytes or 0)
        mark_folder(result)
        yield result


def _needed_bytes(folder: Path, record: ExportRecord) -> int:
    """Memory that loading a folder takes."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    is_fp8 = any(tensor.dtype == FP8 for tensor in read_tensor_table(folder).values())
    return round(size * (_MEMORY_FP8 if is_fp8 else _MEMORY_FP32 if record.dtype == "float32" else _MEMORY_16_BIT))


def _skipped(folder: Path, needed_bytes: int, available_bytes: int) -> VerificationResult:
    text = (
        f"not checked: loading it takes {needed_bytes / GIB:.1f} GiB of memory, of which {available_bytes / GIB:.1f} "
        f"GiB are free here; run `ds-finetune export --check {folder}` where there is more"
    )
    return VerificationResult(folder, skipped=text)


def _compare(folder: Path, record: ExportRecord, loaded: LoadedFolder, base: Path) -> VerificationResult:
    tensors = read_tensor_table(folder)
    base_tensors = read_tensor_table(base) if base.is_dir() else {}
    problems = changed_tensors(tensors, record)
    lines = [
        f"{len(tensors)} tensors on the disk" + ("" if problems else ", each with the bytes that were written"),
        *compare_with_base(tensors, base_tensors, base),
    ]
    if loaded.failure:
        problems.append(f"plain transformers does not load it: {loaded.failure}")
        return VerificationResult(folder, tuple(problems), tuple(lines))
    unexpected = [
        key for key in loaded.report["unexpected_keys"] if key not in base_tensors and not _may_leave(folder, key)
    ]
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
    kinds = (compare_logits, compare_padding, compare_tokens) if record.num_labels else (compare_logits,)
    for compare_kind in kinds:
        more_problems, more_lines = compare_kind(record, loaded)
        problems, lines = [*problems, *more_problems], [*lines, *more_lines]
    return VerificationResult(folder, tuple(problems), tuple(lines))


def _may_leave(folder: Path, key: str) -> bool:
    """Whether a model of this kind may leave the tensor `key` out, as transformers does with multi-token prediction."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return family_of(config["model_type"]).may_skip(key, layers=config["num_hidden_layers"])
