"""Is an exported folder what was trained: its bytes, its names beside the base's, and its logits in a process without
any code of ours.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from ds_finetune.errors import ExportError
from ds_finetune.export.interruption import Interruption
from ds_finetune.export.verify.record import UNVERIFIED, Digest, Floats, Record
from ds_finetune.families.table import family_of
from ds_finetune.model.fp8 import FP8
from ds_finetune.model.safetensors_header import DTYPE_NAMES, read_header
from ds_finetune.units import GIB

_LIMIT = {"float32": 1e-5}
_LIMIT_16_BIT, _NOISE_FACTOR, _HIGHEST_LIMIT = 1e-3, 3.0, 0.05
_NOISE_FACTOR_FP8, _HIGHEST_LIMIT_FP8 = 2.0, 0.15
_QUANTILE = 0.9
_SHOWN = 10
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9]\d*)(?=\.)")
_FP8_MEMORY = 6.0
"""Times the size of FP8 files that their model takes in fp32, and while bf16 weights are joined."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Verdict:
    """What was found of `folder`: `problems` make it unverified, `lines` say what was compared, `left` why not all
    could be.
    """

    folder: Path
    problems: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    left: str = ""

    @property
    def is_verified(self) -> bool:
        """Whether all that was compared is the same."""
        return not self.problems and not self.left


@dataclass(frozen=True)
class Held:
    """Where a tensor lies: file, first byte, shape and safetensors' name of its dtype."""

    file: Path
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Loaded:
    """What export/verify/fresh.py said of a folder: its report and kept logits (fp32 ones where the folder is 16-bit or
    FP8), or why it failed.
    """

    report: Mapping[str, Any] = field(default_factory=dict)
    own: Floats | None = None
    fp32: Floats | None = None
    moved: Floats | None = None
    """Of an FP8 folder, in fp32, with each number moved within its rounding."""
    failure: str = ""

    @classmethod
    def read(cls, place: Path, number: int) -> "Loaded":
        """Of folder `number`."""
        report = json.loads((place / f"{number}.json").read_text(encoding="utf-8"))
        assert not report["ours"], report["ours"]
        files = {name: place / f"{number}.{name}.npy" for name in ("own", "fp32", "moved")}
        return cls(report, **{name: np.load(file) for name, file in files.items() if file.is_file()})


def verify(folders: Sequence[Path], *, base: Path | None = None, available_bytes: int | None = None) -> list[Verdict]:
    """Hold each exported folder against its record, and mark it: UNVERIFIED goes where all is well, and says why where
    not.

    Its tensors are summed and compared with what was written; names, shapes and dtypes with those of `base` (the
    record's, where not given); then one process without ds_finetune loads each with plain transformers, and its
    logits are compared with the recorded ones. A position's deviation is the root mean square over its kept logits
    of the difference, divided by the largest recorded logit of all; nine tenths of the positions must be within the
    limit: 1e-5 in fp32. In bf16 and fp16 it is 1e-3, or three times what plain transformers' own logits in that
    dtype deviate from its logits in fp32 where that is more (at most 0.05). A tenth is left to routers, whose near
    ties fall differently with every rounding.

    Weights in FP8 are multiplied out by that process, and its logits in fp32 compared. The limit is twice what
    rounding explains: the deviation of bf16 from fp32, and that of the model whose FP8 numbers are each moved at
    random within their rounding (at most 0.15). Folders that do not fit into `available_bytes` of memory (None: no
    limit) are left as they are. ExportError where a folder has no record, VerificationError where SIGINT or SIGTERM
    comes: it names the folders that are unverified.
    """
    verdicts: list[Verdict] = []
    with Interruption(signal.SIGINT, signal.SIGTERM) as interruption:
        try:
            # One after another: those before an interruption stay.
            for verdict in _verdicts(folders, base, available_bytes):
                verdicts.append(verdict)
        except KeyboardInterrupt:
            interruption.check(folders[len(verdicts) :])
            raise
        interruption.check(folders[len(verdicts) :])
    return verdicts


def _verdicts(folders: Sequence[Path], base: Path | None, available_bytes: int | None) -> Iterator[Verdict]:
    """The verdict on each folder, which is marked with it."""
    records = {folder: Record.read(folder) for folder in folders}
    fitting = [
        folder
        for folder in folders
        if available_bytes is None or _needed_bytes(folder, records[folder]) <= available_bytes
    ]
    loaded = dict(_loaded(fitting))
    for folder, record in records.items():
        if folder in loaded:
            verdict = _judged(folder, record, loaded[folder], base or Path(record.base))
        else:
            verdict = _left(folder, record, available_bytes or 0)
        mark(verdict)
        yield verdict


def _needed_bytes(folder: Path, record: Record) -> int:
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    is_fp8 = any(held.dtype == FP8 for held in tensors_of(folder).values())
    return round(size * (_FP8_MEMORY if is_fp8 else 1.2 if record.dtype == "float32" else 2.4))


def _left(folder: Path, record: Record, available_bytes: int) -> Verdict:
    needed = _needed_bytes(folder, record) / GIB
    text = (
        f"not checked: loading it takes {needed:.1f} GiB of memory, of which {available_bytes / GIB:.1f} GiB "
        "are free here"
    )
    return Verdict(folder, left=f"{text}; run `ds-finetune export --check {folder}` where there is more")


def _loaded(folders: Sequence[Path]) -> Iterator[tuple[Path, "Loaded"]]:
    """What a process of its own makes of each folder; after one that it fails on, another process does the rest."""
    environ = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS} | {"HF_HUB_OFFLINE": "1"}
    script = str(Path(__file__).with_name("fresh.py"))
    left = list(folders)
    while left:
        with tempfile.TemporaryDirectory() as place:
            command = [
                sys.executable,
                "-P",
                script,
                str(os.getpid()),
                place,
                *(str(folder.absolute()) for folder in left),
            ]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            whole = len(list(Path(place).glob("*.json")))
            yield from ((left[number], Loaded.read(Path(place), number)) for number in range(whole))
        failed, left = left[whole : whole + 1], left[whole + 1 :]
        if failed:
            yield (
                failed[0],
                Loaded(failure=f"exit code {done.returncode}: " + (done.stderr.strip().splitlines() or [""])[-1]),
            )


def _compared(folder: Path, record: Record, base: Path) -> tuple[list[str], list[str], Mapping[str, Held]]:
    """Problems and lines about the bytes and names on the disk, and the tensors of the base."""
    held, theirs = tensors_of(folder), tensors_of(base) if base.is_dir() else {}
    problems = _summed(held, record)
    lines = [
        f"{len(held)} tensors on the disk" + ("" if problems else ", each with the bytes that were written"),
        *_beside_base(held, theirs, base),
    ]
    return problems, lines, theirs


def _judged(folder: Path, record: Record, loaded: "Loaded", base: Path) -> Verdict:
    problems, lines, theirs = _compared(folder, record, base)
    if loaded.failure:
        return Verdict(folder, (*problems, f"plain transformers does not load it: {loaded.failure}"), tuple(lines))
    wrong = {
        "misses": loaded.report["missing_keys"],
        "does not know": [
            key for key in loaded.report["unexpected_keys"] if key not in theirs and not _may_leave(folder, key)
        ],
        "has other shapes for": loaded.report["mismatched_keys"],
    }
    problems += [
        f"plain transformers {what} {len(keys)} tensors: {_some(keys)}" for what, keys in wrong.items() if keys
    ]
    worse, said = _logits(record, loaded)
    return Verdict(folder, (*problems, *worse), (*lines, *said))


def _may_leave(folder: Path, key: str) -> bool:
    """Whether a model of this kind may leave the tensor `key` out, as transformers does with multi-token prediction."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return family_of(config["model_type"]).may_skip(key, layers=config["num_hidden_layers"])


def _logits(record: Record, loaded: "Loaded") -> tuple[list[str], list[str]]:
    """Problems and lines about the logits."""
    report, own = loaded.report, loaded.own
    assert own is not None
    name = f"{report['versions']} in {report['dtype']} on {report['device']}, without code of ours"
    if report["eager_experts"]:
        name += f", with eager experts, since its grouped product refuses them ({report['eager_experts']})"
    reached = (
        f"; its prompts reach {report['experts_reached']} of {report['experts']} routed experts"
        if report["experts"]
        else ""
    )
    if not np.isfinite(own).all():
        return [f"{int((~np.isfinite(own)).sum())} of {own.size} logits are not finite"], [name]
    if not own.any():
        return ["all logits are zero"], [name]
    if record.logits is None:
        return [], [
            f"{name}: loads, and its logits are finite; there are no logits of the run to compare them with{reached}"
        ]
    if loaded.moved is None and record.dtype != report["dtype"]:
        return [], [f"{name}: loads; the run's logits are of its {record.dtype} weights and are not compared{reached}"]
    if own.shape != record.logits.shape:
        return [f"{own.size} logits instead of {record.logits.size}: another vocabulary"], [name]
    found = own if loaded.moved is None or loaded.fp32 is None else loaded.fp32
    deviation, limit = deviations(found, record.logits, record.lengths()), _limit(record, loaded, own)
    high = float(np.quantile(deviation, _QUANTILE))
    text = (
        f"logits of {len(record.prompts)} prompts deviate by {high:.1e} of the largest at nine tenths of the positions"
    )
    text += f" (limit {limit:.1e}), {deviation.max():.1e} at the worst"
    return ([] if high <= limit else [text]), [f"{name}: {text}{reached}"]


def _limit(record: Record, loaded: "Loaded", own: Floats) -> float:
    """The deviation that nine tenths of the positions may have."""
    lengths, fp32 = record.lengths(), own if loaded.fp32 is None else loaded.fp32
    rounding = deviations(own, fp32, lengths)
    if loaded.moved is not None:
        return min(
            _NOISE_FACTOR_FP8 * float(np.quantile(rounding + deviations(loaded.moved, fp32, lengths), _QUANTILE)),
            _HIGHEST_LIMIT_FP8,
        )
    return _LIMIT.get(record.dtype) or _limit_16_bit(rounding)


def _limit_16_bit(noise: NDArray[np.float64]) -> float:
    return min(max(_LIMIT_16_BIT, _NOISE_FACTOR * float(np.quantile(noise, _QUANTILE))), _HIGHEST_LIMIT)


def deviations(found: Floats, wanted: Floats, lengths: Sequence[int]) -> NDArray[np.float64]:
    """Root mean square of `found - wanted` over each position's logits, of which there are `lengths`, divided by the
    largest |wanted|.
    """
    ends = np.cumsum(lengths)
    squares = (found.astype(np.float64) - wanted) ** 2
    sums = np.add.reduceat(squares, np.concatenate([[0], ends[:-1]]))
    deviation: NDArray[np.float64] = np.sqrt(sums / np.asarray(lengths)) / np.abs(wanted).max()
    return deviation


def tensors_of(folder: Path) -> dict[str, Held]:
    """Every tensor of a folder's safetensors files by name; ExportError where a file is damaged."""
    return {key: held for file in sorted(folder.glob("*.safetensors")) for key, held in _tensors_in(file)}


def _tensors_in(file: Path) -> Iterator[tuple[str, Held]]:
    try:
        for key, entry in read_header(file, is_whole=False).tensors.items():
            yield key, Held(file, entry.begin, entry.shape, entry.dtype)
    except (OSError, ValueError) as damaged:
        raise ExportError(f"{file} is not a safetensors file: {damaged}", hint="export the folder again") from damaged


def _summed(held: Mapping[str, Held], record: Record) -> list[str]:
    """Tensors that are not what was written."""
    digests = record.digests or {}
    absent = sorted(digests.keys() - held.keys())
    added = sorted(held.keys() - digests.keys())
    common = sorted(held.keys() & digests.keys())
    maps = {file: np.memmap(file, dtype=np.uint8, mode="r") for file in {held[key].file for key in common}}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sums = pool.map(lambda key: _digest(maps[held[key].file], held[key], digests[key]), common)
        changed = [key for key, found in zip(common, sums, strict=True) if found != digests[key]]
    kinds = (
        ("were written and are gone", absent),
        ("were not written by the export", added),
        ("hold other bytes than were written", changed),
    )
    return [f"{len(keys)} tensors {text}: {_some(keys)}" for text, keys in kinds if keys]


def _digest(data: NDArray[np.uint8], held: Held, wanted: Digest) -> Digest:
    """The sum of a tensor in the file of bytes `data`, in the stretches of `wanted`; of as many bytes as there are
    where the file is short.
    """
    begin, stretches = held.begin, []
    for numel in wanted.lengths():
        end = begin + numel * held.dtype.itemsize
        stretches.append((numel, xxhash.xxh3_64_intdigest(data[begin:end].data)))
        begin = end
    return Digest.of(stretches)


def _beside_base(held: Mapping[str, Held], theirs: Mapping[str, Held], base: Path) -> list[str]:
    """How names, shapes and dtypes differ from those of the base, a line each kind."""
    if not theirs:
        return [f"names are not compared with the base's: `{base}` has no safetensors weights here"]
    common = sorted(held.keys() & theirs.keys())
    shapes = [
        f"{key} {held[key].shape} for {theirs[key].shape}" for key in common if held[key].shape != theirs[key].shape
    ]
    kinds = [
        ("of the base are not here", sorted(theirs.keys() - held.keys())),
        ("are not in the base", sorted(held.keys() - theirs.keys())),
        ("have another shape than in the base", shapes),
    ]
    dtypes = {key: (DTYPE_NAMES[held[key].dtype], DTYPE_NAMES[theirs[key].dtype]) for key in common}
    for ours, its in sorted({pair for pair in dtypes.values() if pair[0] != pair[1]}):
        kinds.append((f"are {ours} and {its} in the base", [key for key in common if dtypes[key] == (ours, its)]))
    lines = [f"{len(keys)} tensors {text}: {', '.join(in_ranges(keys))}" for text, keys in kinds if keys]
    return lines or [f"names, shapes and dtypes of all {len(common)} tensors are those of the base"]


def in_ranges(names: Sequence[str]) -> list[str]:
    """Every one of `names`, those that differ in their numbers alone as one where it says neither more nor less:
    `experts.{0-255}.up_proj`.
    """
    found: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        found.setdefault(_NUMBER.sub("{}", name.replace("{", "{{").replace("}", "}}")), []).append(
            tuple(map(int, _NUMBER.findall(name)))
        )
    lines: list[str] = []
    for pattern, numbers in found.items():
        columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        if set(product(*columns)) == set(numbers):
            lines.append(pattern.format(*map(_range, columns)))
        else:
            lines += [pattern.format(*some) for some in numbers]
    return lines


def _range(numbers: Sequence[int]) -> str:
    """`7`, or `{0-2, 5}` for several."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return (
        str(numbers[0])
        if len(numbers) == 1
        else f"{{{', '.join(f'{run[0]}-{run[-1]}' if len(run) > 1 else str(run[0]) for run in runs)}}}"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")


def mark(verdict: Verdict) -> None:
    """Say in the folder that it is unverified and why; or that it is, by saying nothing."""
    marker = verdict.folder / UNVERIFIED
    if verdict.is_verified:
        marker.unlink(missing_ok=True)
    else:
        marker.write_text("\n".join(verdict.problems or (verdict.left,)) + "\n", encoding="utf-8")
