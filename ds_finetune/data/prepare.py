"""Prepares training rows: tokenises and packs them into a cache, once per host, before any process group exists.

A fingerprint of the data and all settings identifies the cache. Several processes tokenise, part by part.
"""

import gc
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.console.phase_line import PhaseLine
from ds_finetune.data.cache import ArrayParts, content_hash, find_damage, lock_folder, remove_damaged, write_folder
from ds_finetune.data.classes import find_classes
from ds_finetune.data.documents import (
    DOCUMENT_ARRAYS,
    PROMPT_ARRAYS,
    TOKEN_ARRAYS,
    Counts,
    Documents,
    LengthLimit,
    NamedCounts,
    join_parts,
    read_counts,
)
from ds_finetune.data.files import ReadRecord
from ds_finetune.data.mixture import Mixture
from ds_finetune.data.prepared_rows import PreparedRows, one_unit_a_row, pack_units
from ds_finetune.data.prompt_format import template_settings
from ds_finetune.data.row_kind import DIALOGUE, RowKind
from ds_finetune.data.row_report import check_columns, check_dropped_rows
from ds_finetune.data.samples import check_layout_name
from ds_finetune.data.sources import RecordChoice, Source, estimate_rows, find_sources
from ds_finetune.data.units import ROWS_PER_PART, Tokenisation, divide, tokenise_records
from ds_finetune.errors import ConfigError, DataError, RunError

FORMAT_VERSION = 11
"""Version of the data cache's format. It is raised when the format changes, so that older caches are not read."""
_BYTES_FOR_PROCESSES = 2_000_000
"""Data files with more bytes than this in total are tokenised by several processes."""
_Task = tuple[Path, list[tuple[str, ReadRecord]]]
"""A part of the data to tokenise: the folder to write, and the records with their locations (`file line 7`)."""


@dataclass(frozen=True)
class TokenLimits:
    """Limits on training rows: maximum tokens of a row, and vocabulary size of the model."""

    max_seq_len: int
    vocab_size: int
    answer_tokens: int = 0
    """Number of tokens in a row that a prompt leaves free for its sampled answer."""
    seed: int = 0
    """Seed that selects which training rows are held out."""


def prepare_rows(
    config: DataConfig,
    purpose: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    limits: TokenLimits,
    kind: RowKind = DIALOGUE,
) -> PreparedRows:
    """Tokenise and pack the rows of `config.train` or `config.eval` for an objective with rows of `kind`.

    Every process of a host calls this function; one prepares the rows and the others wait. The cache key is made of the
    files' paths, sizes and modification times, the tokenizer, the template and the settings. A second start reads no
    raw data, and a preparation that was killed resumes after its last complete part. DataError where rows cannot be
    read or too many are dropped, OutputError where the cache cannot be written.
    """
    kind = find_classes(config, kind)
    sources, tokenisation = plan_tokenisation(config, purpose, tokenizer=tokenizer, limits=limits, kind=kind)
    choice = _choice(config, purpose, limits.seed)
    folder = Path(config.cache_dir) / _fingerprint(sources, tokenisation, choice)
    weights = config.weights if purpose == "train" else {}
    complete, packed = folder / "whole", folder / ("packed-by-path" if weights else "packed")
    began = time.time()
    with lock_folder(folder):
        notes = remove_damaged([complete, packed], since=began)
        if not complete.is_dir():
            _tokenise(choice, sources, tokenisation, folder, workers=config.workers or os.cpu_count() or 1)
        counts = read_counts(complete)
        check_dropped_rows(counts, config, sources)
        if purpose == "train":
            check_columns(counts, config)
        documents = Documents.read(complete)
        parts = _units_of_paths(counts, weights, sources, kind)
        is_packed = config.packing and kind.name != "prompts"
        if is_packed and not packed.is_dir():
            packing = zip(("order", "offsets"), pack_units(documents, kind, limits.max_seq_len, parts), strict=True)
            write_folder(packed, {name: ArrayParts.of(array) for name, array in packing}, {})
    notes = [*_choice_notes(choice, counts, sources), *_notes_on_marks(documents, kind, purpose), *notes]
    order, offsets = one_unit_a_row(documents, kind)
    if is_packed:
        order, offsets = np.load(packed / "order.npy"), np.load(packed / "offsets.npy")
    path_of_row = np.searchsorted(np.cumsum(parts), order[offsets[:-1]], side="right")
    mixture = Mixture.of(weights, np.bincount(path_of_row, minlength=len(parts)).tolist()) if weights else None
    token_arrays = DOCUMENT_ARRAYS if kind.documents_per_unit else TOKEN_ARRAYS
    content = content_hash(complete, PROMPT_ARRAYS if kind.name == "prompts" else token_arrays)
    return PreparedRows(documents, order, offsets, counts, content, tuple(notes), mixture, kind)


def _choice(config: DataConfig, purpose: str, seed: int) -> RecordChoice:
    fraction = config.held_out_share
    if purpose != "train" and not fraction:
        return RecordChoice()
    return RecordChoice(config.rows, fraction, seed if fraction else 0, is_held_out=purpose != "train")


def _choice_notes(choice: RecordChoice, counts: Counts, sources: Sequence[Source]) -> list[str]:
    if choice.is_held_out:
        return [f"data.eval: {counts.read:,} rows of data.train, drawn by train.seed {choice.seed}, are not trained"]
    first = f"data.rows: only the first {choice.rows:,} rows of data.train are read" if choice.rows else ""
    # With held-out rows, counts.read is below the number of rows of the files, by a fraction that is rounded.
    if choice.rows and counts.read + bool(choice.fraction) < choice.rows * (1 - choice.fraction):
        first = f"data.rows: data.train has fewer than {choice.rows:,} rows, so all of them are read"
    return [*dict.fromkeys(source.note for source in sources if source.note), *filter(None, [first])]


def _notes_on_marks(documents: Documents, kind: RowKind, purpose: str) -> list[str]:
    """A note if all marked answers of the training rows are good, or all are bad."""
    if kind.name != "marked" or purpose != "train" or len(marks := np.unique(documents.targets)) > 1:
        return []
    only, other = ("good", "bad") if marks[0] else ("bad", "good")
    return [f"data.train has {only} answers only: KTO compares them with {other} ones, which it needs too"]


def _units_of_paths(
    counts: Counts, weights: Mapping[str, float], sources: Sequence[Source], kind: RowKind
) -> list[int]:
    """Number of examples of each path in `weights`, or of all data for a single path; DataError if a path has none."""
    size = max(kind.documents_per_unit, 1)
    if len(weights) < 2:
        return [counts.documents // size]
    numbers = [counts.by_path.entries.get(str(entry), (0, ""))[0] // size for entry in range(len(weights))]
    for entry, (path, number) in enumerate(zip(weights, numbers, strict=True)):
        if not number:
            files = [source.path for source in sources if source.entry == entry]
            raise DataError(
                f"data.train gives `{path}` ({len(files)} files) a weight, but no row of it can be trained",
                hint="look at its rows with `ds-finetune data show`, or leave the path out",
            )
    return numbers


def plan_tokenisation(
    config: DataConfig,
    purpose: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    limits: TokenLimits,
    kind: RowKind = DIALOGUE,
) -> tuple[list[Source], Tokenisation]:
    """Find and check the sources of `config.train` or `config.eval` without reading them, and collect the settings to
    tokenise their records.

    DataError or ConfigError where sources, template or vocabulary do not fit.
    """
    _check_tokenizer(tokenizer, limits, kind)
    check_layout_name(config.layout, config.columns, kind)
    purpose = "train" if config.held_out_share else purpose
    sources = find_sources(config.paths(purpose), purpose=purpose)
    settings = template_settings(config, tokenizer)
    if config.long_rows == "split" and (config.layout not in ("auto", "text") or kind.documents_per_unit):
        rows_read = kind.description if kind.documents_per_unit else f"data.layout is {config.layout}"
        raise ConfigError(f"data.long_rows split is for plain text, but {rows_read}", hint="use truncate or drop")
    if config.long_rows == "truncate" and kind.name == "prompts":
        raise ConfigError(
            f"data.long_rows is {config.long_rows}, and {kind.description}; a truncated prompt would be another prompt",
            hint="set data.long_rows: drop, or leave it out, so that a longer prompt is an error",
        )
    limit = LengthLimit(limits.max_seq_len - limits.answer_tokens, config.long_rows)
    return sources, Tokenisation(tokenizer, settings, config.layout, dict(config.columns), limit, kind)


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, limits: TokenLimits, kind: RowKind) -> None:
    if tokenizer.bos_token_id is None and kind.bos == "always":
        raise DataError(
            f"the tokenizer of `{tokenizer.name_or_path}` has no bos_token, and objective.bos is always",
            hint="set objective.bos: auto, or add bos_token to tokenizer_config.json",
        )
    if tokenizer.eos_token_id is None and kind.name != "labelled" and kind.has_eos:
        raise DataError(
            f"the tokenizer of `{tokenizer.name_or_path}` has no eos_token, and {kind.description}",
            hint="encoders are trained with objective classification; for other models add eos_token to "
            "tokenizer_config.json",
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= limits.vocab_size:
        raise DataError(
            f"the tokenizer has ids up to {largest} and the model a vocabulary of {limits.vocab_size}",
            hint="use the model's own tokenizer (model.tokenizer), or set model.resize_vocabulary: true to add rows",
        )


def _fingerprint(sources: Sequence[Source], tokenisation: Tokenisation, choice: RecordChoice) -> str:
    parts = {
        "format": FORMAT_VERSION,
        "sources": [source.fingerprint for source in sources],
        "choice": [choice.rows, str(choice.fraction), choice.seed, choice.is_held_out],
        **tokenisation.facts(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _tokenise(
    choice: RecordChoice, sources: Sequence[Source], tokenisation: Tokenisation, folder: Path, *, workers: int
) -> None:
    parts: dict[Path, int] = {}
    tasks = _open_parts(choice, sources, folder, parts)
    size = sum(source.fingerprint[1] for source in sources)
    # Small data is tokenised in this process, since another process takes one or two seconds to start. The size of a
    # hub data set is unknown, so it counts as large.
    if size <= _BYTES_FOR_PROCESSES and not any(source.format == "hub" for source in sources):
        workers = 1
    done = sum(read_counts(part).read for part in folder.glob("part-??????"))
    # Only the process that locks the cache tokenises, so this process shows the progress whatever its rank.
    estimate = estimate_rows(sources)
    total = max(min(estimate, choice.rows or estimate) - done, 0)
    with PhaseLine("tokenising rows", total, warmup=workers * ROWS_PER_PART, is_rank_zero=True) as line:
        for part in _write_parts(tasks, tokenisation, workers):
            line.advance(read_counts(part).read)
    counts = sum((read_counts(part) for part in parts), Counts())
    if len(set(parts.values())) > 1:
        # Each part of the data is from a single data path, so all its documents are counted for this path.
        by_path = (NamedCounts({str(entry): (read_counts(part).documents, "")}) for part, entry in parts.items())
        counts = replace(counts, by_path=sum(by_path, NamedCounts()))
    if counts.read:
        join_parts(list(parts), folder / "whole", counts)
    for part in parts:
        shutil.rmtree(part)
    if not counts.read:
        names = ", ".join(source.path for source in sources)
        if choice.fraction:
            purpose, percent = "data.eval" if choice.is_held_out else "data.train", f"{float(choice.fraction * 100):g}%"
            rows = sum(1 for _, records in RecordChoice(choice.rows).read(sources) for _ in records)
            # One row of each block of 1 / share rows is held out, so this share gives a complete block.
            smallest = f"set data.eval: {math.ceil(10_000 / rows) / 100:g}% or more" if rows > 1 else "give more rows"
            raise DataError(
                f"{purpose} has no row: {names} have too few rows, {rows:,}, to hold out {percent} of them",
                hint=f"{smallest}, or name a file as data.eval",
            )
        raise DataError(f"data files {names} have 0 rows", hint="write at least one row")


def _open_parts(
    choice: RecordChoice, sources: Sequence[Source], folder: Path, parts: dict[Path, int]
) -> Iterator[_Task]:
    """Yield each part of the data that is not yet written completely.

    `parts` receives the folder of every part, with the index of the part's path in data.train.
    """
    for source, records in choice.read(sources):
        for chunk in divide(records, ROWS_PER_PART):
            part = folder / f"part-{len(parts):06d}"
            parts[part] = source.entry
            if part.is_dir() and find_damage(part):
                shutil.rmtree(part)
            if not part.is_dir():
                yield part, chunk


_worker: list[Tokenisation] = []
"""Tokenizer and settings of this worker process, set once at its start."""


def _start_worker(tokenisation: Tokenisation) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker[:] = [tokenisation]


def _write_part(task: _Task) -> Path:
    folder, records = task
    # Garbage collection is off: records form no reference cycles, and looking for them takes a fifth of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        documents, counts = tokenise_records(records, _worker[0])
    finally:
        if was_enabled:
            gc.enable()
    documents.write(folder, counts)
    return folder


def _write_parts(tasks: Iterable[_Task], tokenisation: Tokenisation, workers: int) -> Iterator[Path]:
    if workers == 1:
        _start_worker(tokenisation)
        yield from map(_write_part, tasks)
        _worker.clear()
        return
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, context, _start_worker, (tokenisation,)) as pool, _terminated_early(pool):
            for written in _submit(pool, tasks, most=2 * workers):
                yield written.result()
    except BrokenProcessPool as killed:
        raise RunError(
            f"one of {workers} processes that tokenise was killed",
            hint="if memory ran out, set data.workers lower and start again: complete parts are kept",
        ) from killed


@contextmanager
def _terminated_early(pool: ProcessPoolExecutor) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for process in list(pool._processes.values()):
            process.terminate()
        raise


def _submit(pool: ProcessPoolExecutor, tasks: Iterable[_Task], *, most: int) -> Iterator[Future[Path]]:
    waiting: set[Future[Path]] = set()
    for task in tasks:
        # The pool's processes inherit this signal mask, so that Ctrl-C reaches only the parent, which terminates them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        waiting.add(pool.submit(_write_part, task))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if len(waiting) >= most:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from done
    yield from waiting
