"""Tokenise once per machine, before any process group exists: in parallel, in parts, found again by fingerprint."""

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from ds_finetune.config import DataConfig
from ds_finetune.data.documents import Counts, Documents, Limits, gather, read_counts
from ds_finetune.data.layouts import Sample, read_sample, recognise
from ds_finetune.data.pack import pack
from ds_finetune.data.packed import PreparedRows
from ds_finetune.data.sources import Record, Source, find_sources, read_records
from ds_finetune.data.template import Templater, TemplateSettings
from ds_finetune.errors import ConfigError, DataError

FORMAT = 1
"""Raised when what is written changes, so that an older cache is not taken for it."""
ROWS_PER_PART = 2000
_PLACED_RECORDS = list[tuple[str, Record]]


@dataclass(frozen=True)
class TokenSpec:
    """What rows must respect: tokens of a row, ids the model has, positions it knows (None: no limit)."""

    max_seq_len: int
    vocab_size: int
    max_positions: int | None


@dataclass(frozen=True)
class Work:
    """All a process needs to turn records into documents."""

    tokenizer: PreTrainedTokenizerBase
    settings: TemplateSettings
    layout: str
    columns: dict[str, str]
    limits: Limits


def prepare(config: DataConfig, which: str, *, tokenizer: PreTrainedTokenizerBase, spec: TokenSpec) -> PreparedRows:
    """Rows of `config.train` or `config.eval`, tokenised and packed; every process of a machine calls this, one does the work.

    The cache is found by the paths, sizes and modification times of the files, the tokenizer, the template and the
    settings: a second start reads no raw data, and a preparation that was killed goes on after its last whole part.
    """
    sources, work = plan_work(config, which, tokenizer=tokenizer, spec=spec)
    folder = Path(config.cache_dir) / _fingerprint(sources, work)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "whole").is_dir():
            _tokenise(sources, work, folder, workers=config.workers or os.cpu_count() or 1)
    counts = read_counts(folder / "whole")
    refuse_losses(counts, config, sources)
    return _rows(folder, counts, config, spec)


def plan_work(config: DataConfig, which: str, *, tokenizer: PreTrainedTokenizerBase, spec: TokenSpec) -> tuple[list[Source], Work]:
    """The sources of `config.train` or `config.eval` and what is to be done with their records, checked but not read."""
    _check_vocabulary(tokenizer, spec)
    sources = find_sources(config.train if which == "train" else config.eval)
    settings = TemplateSettings(_chat_template(config, tokenizer), config.train_on, config.reasoning)
    if config.long_rows == "split" and config.layout != "text":
        raise ConfigError(f"data.long_rows split needs data.layout text, not {config.layout}", hint="use truncate or drop")
    return sources, Work(tokenizer, settings, config.layout, dict(config.columns), Limits(spec.max_seq_len, config.long_rows))


def documents_of(records: Sequence[tuple[str, Record]], work: Work) -> tuple[Documents, Counts]:
    """Documents of a stretch of records, in one tokenizer call, and what became of the records."""
    samples: list[tuple[str, Sample]] = []
    for where, record in records:
        layout = recognise(record, work.columns, where) if work.layout == "auto" else work.layout
        samples.append((where, read_sample(record, layout, work.columns, where)))
    return gather(Templater(work.tokenizer, work.settings).tokens(samples), work.limits)


def _rows(folder: Path, counts: Counts, config: DataConfig, spec: TokenSpec) -> PreparedRows:
    documents = Documents.read(folder / "whole")
    if not config.packing:
        return PreparedRows(documents, np.arange(counts.documents), np.arange(counts.documents + 1), counts)
    plan = folder / f"packed-{spec.max_seq_len}.npz"
    with FileLock(folder / "lock"):
        if not plan.is_file():
            rows = pack(np.diff(documents.offsets), spec.max_seq_len)
            partial = plan.with_suffix(".partial.npz")
            np.savez(partial, order=np.concatenate(rows), offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]))
            partial.rename(plan)
    with np.load(plan) as packed:
        return PreparedRows(documents, packed["order"], packed["offsets"], counts)


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, spec: TokenSpec) -> None:
    largest = max(tokenizer.get_vocab().values())
    if largest >= spec.vocab_size:
        raise DataError(
            f"the tokenizer has ids up to {largest} and the model a vocabulary of {spec.vocab_size}",
            hint="use the model's own tokenizer (model.tokenizer)",
        )


def _chat_template(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    if config.template == "plain":
        return None
    if config.template == "auto":
        template = tokenizer.chat_template
        return template["default"] if isinstance(template, dict) else template
    try:
        return Path(config.template).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"data.template `{config.template}` does not exist", hint="use auto, plain, or the path of a Jinja file") from None
    except (OSError, UnicodeDecodeError) as unreadable:
        raise ConfigError(f"data.template `{config.template}` cannot be read: {unreadable}", hint="name a Jinja file in UTF-8") from None


def _fingerprint(sources: Sequence[Source], work: Work) -> str:
    parts = {
        "format": FORMAT,
        "sources": [source.fingerprint for source in sources],
        "tokenizer": work.tokenizer.backend_tokenizer.to_str(),
        "special": [work.tokenizer.bos_token, work.tokenizer.eos_token, bool(getattr(work.tokenizer, "add_bos_token", False))],
        "settings": asdict(work.settings),
        "layout": [work.layout, work.columns],
        "limits": asdict(work.limits),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def _tokenise(sources: Sequence[Source], work: Work, folder: Path, *, workers: int) -> None:
    """Write a part per `ROWS_PER_PART` rows, passing over those that exist, then join them."""
    parts: list[Path] = []
    with multiprocessing.get_context("spawn").Pool(workers, _start_worker, (work,)) if _is_large(sources) else _Here(work) as pool:
        for _ in pool.imap_unordered(_write_part, _open_parts(sources, folder, parts)):
            pass
    counts = sum((read_counts(part) for part in parts), Counts())
    if counts.read:
        Documents.join([Documents.read(part) for part in parts]).write(folder / "whole", counts)
    for part in parts:
        shutil.rmtree(part)
    if not counts.read:
        raise DataError(f"data files {', '.join(source.path for source in sources)} hold 0 rows", hint="write at least one row")


def _open_parts(sources: Sequence[Source], folder: Path, parts: list[Path]) -> Iterator[tuple[Path, _PLACED_RECORDS]]:
    """Parts still to be written; `parts` collects all of them in order."""
    for source in sources:
        records = read_records(source)
        while chunk := list(islice(records, ROWS_PER_PART)):
            part = folder / f"part-{len(parts):06d}"
            parts.append(part)
            if not part.is_dir():
                yield part, chunk


def _is_large(sources: Sequence[Source]) -> bool:
    """Whether starting processes (seconds each) pays: above 2 MB of raw data."""
    return any(source.kind == "hub" for source in sources) or sum(source.fingerprint[1] for source in sources) > 2_000_000


_worker: list[Work] = []
"""The work of this tokenising process, set once when it starts."""


def _start_worker(work: Work) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker[:] = [work]


def _write_part(task: tuple[Path, _PLACED_RECORDS]) -> Path:
    folder, records = task
    documents, counts = documents_of(records, _worker[0])
    documents.write(folder, counts)
    return folder


class _Here:
    """The interface of a pool, in this process."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __enter__(self) -> "_Here":
        _worker[:] = [self._work]
        return self

    def __exit__(self, *_: object) -> None:
        _worker.clear()

    imap_unordered = staticmethod(map)


def refuse_losses(counts: Counts, config: DataConfig, sources: Sequence[Source]) -> None:
    """DataError where too many rows are lost, or none is left."""
    names = ", ".join(source.path for source in sources)
    lost = counts.nothing_supervised + counts.too_long_dropped
    reason = f"{counts.nothing_supervised} with nothing supervised, {counts.too_long_dropped} too long"
    if not counts.documents:
        raise DataError(f"none of the {counts.read} rows of {names} is left ({reason})", hint="look at them with `ds-finetune data show`")
    if lost > config.max_dropped_ratio * counts.read:
        raise DataError(
            f"{lost} of {counts.read} rows of {names} are dropped ({reason}), more than data.max_dropped_ratio {config.max_dropped_ratio:g}",
            hint="raise train.max_seq_len if prompts fill it, check the template and data.columns, or raise the ratio",
        )
