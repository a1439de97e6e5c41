"""The held-out rows on which models are scored, tokenised as a run would tokenise them."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.config.units import share_text
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import DIALOGUE, RowKind
from ds_finetune.data.row_report import row_notes
from ds_finetune.evaluation.classifier_scores import LabelledDocument, kind_of, labelled_documents
from ds_finetune.evaluation.marked_scores import MarkedDocument, marked_answers
from ds_finetune.evaluation.model_scores import Document
from ds_finetune.evaluation.preference_scores import sides_of
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.encoder import max_positions
from ds_finetune.objectives.objective import DocumentObjective

AnyDocument = TypeVar("AnyDocument", Document, LabelledDocument, MarkedDocument)


@dataclass(frozen=True)
class EvalRequest:
    """The models and data to score, and how; at most `limit` documents of each held-out set.

    `extract` is the name of an extractor. With it, answers of at most `max_new_tokens` tokens are generated, and their
    extracts compared with those of the rows' answers.
    """

    model: str
    baseline: str | None
    data: DataConfig
    extract: str | None = None
    max_seq_len: int = 2048
    max_new_tokens: int = 256
    batch_tokens: int = 4096
    limit: int | None = None
    kind: RowKind = DIALOGUE
    preference: DocumentObjective | None = None
    """The objective whose metrics score pairs of answers, or marked ones."""


def held_out_sets(
    request: EvalRequest,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    read: Callable[[EvalRequest, Path, PreTrainedTokenizerBase], tuple[list[AnyDocument], list[str]]],
) -> tuple[dict[str, list[AnyDocument]], list[str]]:
    """The documents of each held-out set by its name (empty for files without one), and lines that report on rows; each
    set is read by `read`.
    """
    sets, notes = {}, []
    for place, paths in request.data.held_out_sets.items():
        name = place.removeprefix("eval").removeprefix("/")
        of_set = replace(request, data=request.data.model_copy(update={"eval": paths}))
        sets[name], lines = read(of_set, folder, tokenizer)
        notes += [f"{name}: {line}" if name else line for line in lines]
    return sets, notes


def read_documents(
    request: EvalRequest, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Document], list[str]]:
    """The documents of one held-out set, and lines that report on the rows."""
    with _rows_of(request, folder, tokenizer) as (rows, length):
        number = min(rows.counts.documents, request.limit or rows.counts.documents)
        documents = [
            Document(*rows.document(index), *prompt) for index, prompt in enumerate(rows.prompts_and_answers(number))
        ]
        counts = rows.counts
    note = (
        f"{counts.read} rows read, {counts.truncated} truncated to {length} tokens "
        f"({share_text(counts.truncated_ratio, 2)} of all tokens cut off)"
    )
    note += f", {counts.split} split, {counts.too_long_dropped} too long"
    note += f", {counts.nothing_supervised} without supervised tokens, {number} documents scored"
    return documents, [note, *row_notes(counts)]


def read_sides(
    request: EvalRequest, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Document], list[str]]:
    """Both sides of the pairs of one held-out set, and lines that report on the rows."""
    with _rows_of(request, folder, tokenizer) as (rows, length):
        documents, counts = sides_of(rows, request.limit), rows.counts
    note = (
        f"{counts.read} rows read, {counts.truncated} truncated to {length} tokens of both sides, "
        f"{counts.too_long_dropped} too long, {len(documents) // 2} pairs scored"
    )
    return documents, [note, *row_notes(counts)]


def read_marked(
    request: EvalRequest, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[MarkedDocument], list[str]]:
    """The marked answers of one held-out set, and lines that report on the rows."""
    with _rows_of(request, folder, tokenizer) as (rows, length):
        answers, counts = marked_answers(rows, request.limit, max_seq_len=length), rows.counts
    note = (
        f"{counts.read} rows read, {counts.truncated} truncated to {length} tokens, {counts.too_long_dropped} too "
        f"long, {len(answers)} answers scored"
    )
    return answers, [note, *row_notes(counts)]


def read_labelled(
    request: EvalRequest, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[LabelledDocument], list[str]]:
    """The texts or sides of pairs of one held-out set, and lines that report on the rows."""
    kind = kind_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    with _rows_of(replace(request, kind=kind), folder, tokenizer) as (rows, length):
        documents, counts = labelled_documents(rows, request.limit), rows.counts
    number = len(documents) // rows.kind.documents_per_unit
    note = (
        f"{counts.read} rows read, {counts.truncated} truncated to {length} tokens, "
        f"{counts.too_long_dropped} too long, {number} {rows.kind.unit} scored"
    )
    return documents, [note, *row_notes(counts)]


@contextmanager
def _rows_of(
    request: EvalRequest, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[PreparedRows, int]]:
    """The rows of one held-out set, tokenised, and the most tokens of a unit; the context holds their files."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    length = min(request.max_seq_len, max_positions(config) or request.max_seq_len)
    limits = TokenLimits(length, config.vocab_size)
    with tempfile.TemporaryDirectory() as cache:
        data = request.data.model_copy(update={"cache_dir": cache})
        yield prepare_rows(data, "eval", tokenizer=tokenizer, limits=limits, kind=request.kind), length
