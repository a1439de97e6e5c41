"""Streaming: training rows are read and tokenised during training instead of before it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import xxhash
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.data.batches import Batch, BatchPlan, Position, make_batch
from ds_finetune.data.classes import find_classes
from ds_finetune.data.documents import Counts
from ds_finetune.data.files import ReadRecord
from ds_finetune.data.prepare import TokenLimits, plan_tokenisation
from ds_finetune.data.prepared_rows import PreparedRows, Row, one_unit_a_row, pack_units
from ds_finetune.data.row_kind import DIALOGUE, RowKind
from ds_finetune.data.row_report import check_bad_rows, check_dropped_rows
from ds_finetune.data.sources import Source, find_sources, read_or_errors
from ds_finetune.data.units import Tokenisation, tokenise_records
from ds_finetune.errors import DataError

START = Position(0, 0)
RECORDS_AT_A_TIME = 1000
"""Number of records in a chunk of streamed data. A rank tokenises, packs and shuffles one chunk at a time in memory."""
SAMPLED_RECORDS = 16
"""Number of records of a stream that are tokenised before the run, for its report."""


@dataclass(frozen=True)
class StreamedRows:
    """Training rows streamed from `sources`, and how their records are tokenised."""

    sources: list[Source]
    tokenisation: Tokenisation
    config: DataConfig
    counts: Counts
    """Counts of the first `SAMPLED_RECORDS` records of the stream, for reports."""

    def fingerprint(self) -> str:
        """Identity of streamed data: name, split and size of each source, and a hash of all settings that decide how
        records become rows.

        The fingerprint is the same on every machine. It does not cover the content of the sources, which is not read
        before training.
        """
        text = json.dumps([self.tokenisation.facts(), self.config.packing], sort_keys=True)
        sources = [[source.path, source.subset, source.split, source.fingerprint[1]] for source in self.sources]
        return f"{json.dumps(sources)}, {xxhash.xxh3_64_hexdigest(text.encode())}"

    def summary(self) -> str:
        """One-line description of the stream for reports."""
        return f"streamed from {len(self.sources)} sources, {RECORDS_AT_A_TIME:,} records at a time on each rank"

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on splits of the data sources that are not read."""
        return tuple(dict.fromkeys(source.note for source in self.sources if source.note))


def open_stream(
    config: DataConfig,
    purpose: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    limits: TokenLimits,
    kind: RowKind = DIALOGUE,
) -> StreamedRows:
    """Open the training data as a stream; DataError where sources, template or vocabulary do not fit."""
    kind = find_classes(config, kind)
    sources, tokenisation = plan_tokenisation(config, purpose, tokenizer=tokenizer, limits=limits, kind=kind)
    _, counts = tokenise_records(list(islice(_all_records(sources), SAMPLED_RECORDS)), tokenisation)
    check_bad_rows(counts, config)
    return StreamedRows(sources, tokenisation, config, counts)


def streaming_batches(
    rows: StreamedRows, plan: BatchPlan, *, steps: int, start_step: int = 0, start: Position = START
) -> Iterator[Batch]:
    """Make the batches of the steps from `start_step` (0-based) to `steps`, exclusive.

    Rank r takes records r, r + dp, ... of each pass over the sources, so the batches depend on dp, unlike those of
    prepared rows. The rows of each chunk of `RECORDS_AT_A_TIME` records are shuffled by (seed, pass, chunk, rank). If
    the plan has costs of rows, a rank's rows of a step are sorted by descending cost, so that the n-th forward passes
    of all ranks take similar time. On resume, `start` is the position after the last batch; earlier records are read
    again, but not tokenised.
    """
    rank_rows = _my_rows(rows, plan, start)
    rows_of_step = plan.global_batch_size // plan.dp
    for step in range(start_step, steps):
        step_rows = list(islice(rank_rows, rows_of_step))
        of_step, numbers = [row for row, _ in step_rows], tuple(range(step * rows_of_step, (step + 1) * rows_of_step))
        if plan.streamed_row_cost is not None:
            of_step.sort(key=plan.streamed_row_cost, reverse=True)
        yield make_batch(of_step, plan, step_rows[-1][1], numbers)


def _my_rows(rows: StreamedRows, plan: BatchPlan, start: Position) -> Iterator[tuple[Row, Position]]:
    first, skipped, kind, row_len = start.index, start.row, rows.tokenisation.kind, plan.row_len
    for passes in count(start.epoch):
        records = islice(_all_records(rows.sources), plan.rank + first * RECORDS_AT_A_TIME * plan.dp, None, plan.dp)
        number = first
        while chunk := list(islice(records, RECORDS_AT_A_TIME)):
            documents, counts = tokenise_records(chunk, rows.tokenisation)
            check_dropped_rows(counts, rows.config, rows.sources)
            packing = one_unit_a_row(documents, kind) if row_len is None else pack_units(documents, kind, row_len)
            prepared = PreparedRows(documents, *packing, counts, kind=kind)
            order = np.arange(len(prepared))
            if plan.shuffle:
                order = np.random.default_rng([plan.seed, passes, number, plan.rank]).permutation(len(prepared))
            for end, index in enumerate(order.tolist()[skipped:], start=skipped + 1):
                yield prepared[index], Position(passes, number, end)
            number, skipped = number + 1, 0
            # The next chunk is tokenised without this one in memory.
            del documents, packing, prepared
        if not number:
            raise DataError(
                f"rank {plan.rank} of {plan.dp} finds no row in {', '.join(source.path for source in rows.sources)}",
                hint="stream at least as many rows as there are ranks",
            )
        first = 0


def _all_records(sources: list[Source]) -> Iterator[tuple[str, ReadRecord]]:
    return chain.from_iterable(map(read_or_errors, sources))


def overlap_notes(train: PreparedRows | StreamedRows, held_out: Mapping[str, PreparedRows]) -> list[str]:
    """Warn of held-out sets that repeat training data, with the number of documents or pairs that have the tokens of a
    training row.

    Streamed training data is not read in advance; for it the warning names the files that are in both data sets.
    """
    if isinstance(train, StreamedRows):
        held_out_files = _files_of(find_sources(train.config.paths("eval"), purpose="eval"))
        both = [path for path, real in _files_of(train.sources).items() if real in held_out_files.values()]
        return [f"data.eval has training files: {', '.join(both)}"] if both else []
    digests, unit = train.unit_digests(), train.kind.unit
    repeated = {name: int(np.isin(rows.unit_digests(), digests).sum()) for name, rows in held_out.items()}
    return [
        f"data.{name.replace('/', '.')} repeats training data: {number:,} of {held_out[name].num_units:,} "
        f"held-out {unit} have the tokens of a training {unit.removesuffix('s')}"
        for name, number in repeated.items()
        if number
    ]


def _files_of(sources: Sequence[Source]) -> dict[str, Path]:
    return {source.path: Path(source.path).resolve() for source in sources if source.format != "hub"}
