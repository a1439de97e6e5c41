"""Loads exported folders with plain transformers, in a process without ds_finetune, and compares their logits."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds_finetune.console.phase_line import PhaseLine
from ds_finetune.export.verify.record import ExportRecord, Floats
from ds_finetune.families.table import family_of
from ds_finetune.foreign.auto_configs import OWN_TYPES, published_names

_LIMIT_FP32 = 1e-5
_LIMIT_16_BIT, _NOISE_FACTOR, _HIGHEST_LIMIT = 1e-3, 3.0, 0.05
_NOISE_FACTOR_FP8, _HIGHEST_LIMIT_FP8 = 2.0, 0.15
_QUANTILE = 0.9
_PADDED_LIMIT = 1e-4
"""Allowed relative difference between a classifier's fp32 logits of a padded batch and of single texts."""
_POLL_SECONDS = 0.5
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LoadedFolder:
    """What plain transformers computed for an exported folder (by plain_transformers.py), or why it failed."""

    report: Mapping[str, Any] = field(default_factory=dict)
    logits: Floats | None = None
    """Sampled logits in the exported folder's dtype; for an FP8 folder in bf16."""
    fp32: Floats | None = None
    """Sampled logits of the export's weights, computed in fp32; None if the export itself is in fp32."""
    perturbed: Floats | None = None
    """Logits in fp32 of an FP8 folder after each FP8 number was moved at random by at most its rounding error."""
    padded: Floats | None = None
    """Logits in fp32 of a classifier, computed in one padded batch of all prompts."""
    failure: str = ""

    @classmethod
    def read(cls, results: Path, number: int) -> "LoadedFolder":
        """Read what plain_transformers.py wrote to `results` for exported folder number `number`."""
        report = json.loads((results / f"{number}.json").read_text(encoding="utf-8"))
        assert not report["ours"], report["ours"]
        files = {name: results / f"{number}.{name}.npy" for name in ("logits", "fp32", "perturbed", "padded")}
        return cls(report, **{name: np.load(file) for name, file in files.items() if file.is_file()})


def load_folders(folders: Sequence[Path]) -> Iterator[tuple[Path, LoadedFolder]]:
    """Load each folder with plain transformers, in another process without ds_finetune and without access to the Hub.
    One process loads all folders, one after another. If it fails on one, another process loads the rest.
    """
    environ = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    environ["HF_HUB_OFFLINE"] = "1"
    others = {str(folder.absolute()): other for folder in folders if (other := _other_type(folder)) is not None}
    command = [sys.executable, "-P", str(Path(__file__).with_name("plain_transformers.py")), str(os.getpid())]
    remaining = list(folders)
    while remaining:
        with tempfile.TemporaryDirectory() as results:
            arguments = [results, json.dumps(others), *(str(folder.absolute()) for folder in remaining)]
            with PhaseLine("verifying exports", len(folders)) as line:
                line.advance(len(folders) - len(remaining))
                done = _run([*command, *arguments], environ, line)
            count = len(list(Path(results).glob("*.json")))
            yield from ((remaining[number], LoadedFolder.read(Path(results), number)) for number in range(count))
        failed, remaining = remaining[count : count + 1], remaining[count + 1 :]
        if failed:
            reason = (done.stderr.strip().splitlines() or [""])[-1]
            yield failed[0], LoadedFolder(failure=f"exit code {done.returncode}: {reason}")


def _other_type(folder: Path) -> tuple[dict[str, Any], dict[str, str], str | None] | None:
    """How to load a folder whose model type the installed transformers lacks: config.json of a type whose classes fit,
    how these classes rename tensors, and `Family.published_qkv`. None if transformers has the model type.
    """
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        name = str(tree.get("model_type"))
    except (OSError, ValueError, AttributeError):
        # A broken config.json is reported by the process that loads the folder.
        return None
    if name not in OWN_TYPES:
        return None
    family = family_of(name)
    older = tree if family.newer is None else family.newer.older_config(tree)
    return {**older, "model_type": OWN_TYPES[name]}, published_names(name), family.published_qkv


def _run(command: list[str], environ: dict[str, str], line: PhaseLine) -> subprocess.CompletedProcess[str]:
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while True:
            try:
                out, errors = process.communicate(timeout=_POLL_SECONDS)
                return subprocess.CompletedProcess(command, process.returncode, out, errors)
            except subprocess.TimeoutExpired:
                line.advance(0)
            except BaseException:
                process.kill()
                raise


def compare_logits(record: ExportRecord, loaded: LoadedFolder) -> tuple[list[str], list[str]]:
    """Compare an export's logits with its record; returns lines on differences, and on what was compared."""
    report, logits = loaded.report, loaded.logits
    assert logits is not None
    name = f"{report['versions']} in {report['dtype']} on {report['device']}, without ds_finetune"
    if report["eager_experts"]:
        name += f", with eager experts, since torch's grouped product refuses this model ({report['eager_experts']})"
    reached = ""
    if report["experts"]:
        reached = f"; its prompts reach {report['experts_reached']} of {report['experts']} routed experts"
    if not np.isfinite(logits).all():
        return [f"{int((~np.isfinite(logits)).sum())} of {logits.size} logits are not finite"], [name]
    if not logits.any():
        return ["all logits are zero"], [name]
    if record.logits is None:
        text = "loads, and its logits are finite; there are no logits of the run to compare them with"
        return [], [f"{name}: {text}{reached}"]
    if loaded.perturbed is None and record.dtype != report["dtype"]:
        return [], [f"{name}: loads; the run's logits are of its {record.dtype} weights and are not compared{reached}"]
    if logits.shape != record.logits.shape:
        other = "labels" if record.num_labels else "vocabulary"
        return [f"{logits.size} logits instead of {record.logits.size}: another number of {other}"], [name]
    compared = logits if loaded.perturbed is None or loaded.fp32 is None else loaded.fp32
    deviation, limit = deviations(compared, record.logits, record.lengths()), _limit(record, loaded, logits)
    high = float(np.quantile(deviation, _QUANTILE))
    text = (
        f"logits of {len(record.prompts)} prompts deviate by {high:.1e} of the largest at nine tenths of the positions"
        f" (limit {limit:.1e}), {deviation.max():.1e} at the worst"
    )
    return ([] if high <= limit else [text]), [f"{name}: {text}{reached}"]


def compare_padding(record: ExportRecord, loaded: LoadedFolder) -> tuple[list[str], list[str]]:
    """Compare a classifier's logits of a padded batch with logits of single texts. Returns lines on differences, and on
    what was compared.

    transformers classifies by the last token that differs from the padding token. So logits are wrong if texts end with
    the padding token.
    """
    one_by_one = loaded.logits if loaded.fp32 is None else loaded.fp32
    assert one_by_one is not None
    if loaded.padded is None:
        return [], ["config.json names no padding token: transformers classifies one text at a time"]
    deviation = float(deviations(loaded.padded, one_by_one, record.lengths()).max())
    text = f"logits of a padded batch deviate by {deviation:.1e} from those of single texts (limit {_PADDED_LIMIT:.0e})"
    return ([] if deviation <= _PADDED_LIMIT else [text]), [text]


def compare_tokens(record: ExportRecord, loaded: LoadedFolder) -> tuple[list[str], list[str]]:
    """Compare an exported tokenizer's ids with its record; returns lines on differences, and on matches."""
    count = len(record.texts)
    if not count:
        return [], []
    problems, lines = [], []
    kinds = {
        "texts": (loaded.report["tokenised"], record.text_ids or record.prompts[-count:]),
        "prompts in the chat template": (loaded.report["chats"], record.chat_ids),
    }
    for kind, (ids_of_folder, ids_of_run) in kinds.items():
        expected = [list(ids) for ids in ids_of_run]
        wrong = [number for number, ids in enumerate(expected) if ids_of_folder[number] != ids]
        if wrong:
            text, ids_here, expected_ids = (each[wrong[0]] for each in (record.texts, ids_of_folder, expected))
            pairs = enumerate(zip(ids_here, expected_ids, strict=False))
            at = next((at for at, (a, b) in pairs if a != b), min(len(ids_here), len(expected_ids)))
            problems.append(
                f"the tokenizer gives other ids than the run for {len(wrong)} of {count} {kind}: {text!r:.60} has "
                f"{ids_here[at : at + 3]} from token {at} on, in the run {expected_ids[at : at + 3]}"
            )
        elif expected:
            lines.append(f"the tokenizer gives the ids of the run for {count} {kind}")
    return problems, lines


def _limit(record: ExportRecord, loaded: LoadedFolder, logits: Floats) -> float:
    lengths, fp32 = record.lengths(), logits if loaded.fp32 is None else loaded.fp32
    rounding = deviations(logits, fp32, lengths)
    if loaded.perturbed is not None:
        rounding = rounding + deviations(loaded.perturbed, fp32, lengths)
        return min(_NOISE_FACTOR_FP8 * float(np.quantile(rounding, _QUANTILE)), _HIGHEST_LIMIT_FP8)
    if record.dtype == "float32":
        return _LIMIT_FP32
    return min(max(_LIMIT_16_BIT, _NOISE_FACTOR * float(np.quantile(rounding, _QUANTILE))), _HIGHEST_LIMIT)


def deviations(logits: Floats, expected: Floats, lengths: Sequence[int]) -> NDArray[np.float64]:
    """Deviation of the logits at each position, [positions]: the root mean square of `logits - expected`, divided by
    the largest |expected| of all positions. Logits are flat; `lengths` has the number of logits of each position.
    """
    ends = np.cumsum(lengths)
    squares = (logits.astype(np.float64) - expected) ** 2
    sums = np.add.reduceat(squares, np.concatenate([[0], ends[:-1]]))
    deviation: NDArray[np.float64] = np.sqrt(sums / np.asarray(lengths)) / np.abs(expected).max()
    return deviation
