"""Scores a model and its baseline, one after the other, on rows that are tokenised as a run would tokenise them."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.config.units import share_text
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import DIALOGUE, RowKind
from ds_finetune.data.row_report import row_notes
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.evaluation.classifier_scores import (
    LabelledDocument,
    LabelledScores,
    check_baseline,
    kind_of,
    labelled_documents,
    score_labelled,
)
from ds_finetune.evaluation.compare import METHOD, Metric, compare
from ds_finetune.evaluation.extractors import EXTRACTORS
from ds_finetune.evaluation.model_scores import (
    Document,
    Scores,
    generate_answers,
    load_drafter,
    load_model,
    score_documents,
)
from ds_finetune.evaluation.preference_scores import (
    MarkedDocument,
    MarkedScores,
    PreferenceScores,
    check_reference,
    marked_answers,
    sides_of,
)
from ds_finetune.export.classifiers import holds_classifier
from ds_finetune.export.load import check_generates, check_loadable
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.encoder import max_positions
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.objectives.objective import DocumentObjective

AnyScores = TypeVar("AnyScores", Scores, LabelledScores, PreferenceScores, MarkedScores)
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


@dataclass(frozen=True)
class EvalReport:
    """Metrics by name, with the models and the numbers of documents and supervised tokens behind them.

    `sets` has the metrics of each held-out set that has a name; `metrics` are those of all documents together.
    """

    model: str
    baseline: str | None
    metrics: Mapping[str, Metric]
    documents: int
    tokens: int
    notes: tuple[str, ...] = ()
    sets: Mapping[str, Mapping[str, Metric]] = field(default_factory=dict)
    method: str = field(default=METHOD)
    unit: str = "documents"
    """What `documents` counts: documents, pairs or examples."""
    counts_all_tokens: bool = False
    """Whether `tokens` are all tokens, as of a classifier, and not the supervised ones."""

    @property
    def counted(self) -> str:
        """The numbers of units and tokens that were scored, in words."""
        kind = "tokens" if self.counts_all_tokens else "supervised tokens"
        return f"{self.tokens:,} {kind} of {self.documents:,} {self.unit}"

    def as_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


def evaluate_model(request: EvalRequest) -> EvalReport:
    """Score `request.model`, and `request.baseline` on the same token ids.

    DataError or ExportError where rows or models cannot be read, or the models cannot be compared.
    """
    folder = _model_folder(request.model)
    base = None if request.baseline is None else _model_folder(request.baseline)
    if holds_classifier(folder):
        return _evaluate_classifier(request, folder, base)
    if request.preference is not None:
        evaluate_answers = _evaluate_marked if request.kind.name == "marked" else _evaluate_preferences
        return evaluate_answers(request, request.preference, folder, base)
    tokenizer = load_tokenizer(str(folder))
    sets, notes = held_out_sets(request, folder, tokenizer, read_documents)
    documents = list(chain.from_iterable(sets.values()))
    if base is not None:
        check_generates(base)
        notes += _check_same_tokens(folder, base, tokenizer, documents)
    if request.kind.objective == "distill":
        notes.append("objective distill: the loss is that of the labels, which is eval/label_loss of a run")
    references = None if request.extract is None else _references(request.extract, documents, tokenizer)
    scores = _score(folder, documents, request, tokenizer, references)
    baseline = None if base is None else _score(base, documents, request, tokenizer, references)
    if baseline is not None and (scores.drafts is None) != (baseline.drafts is None):
        without = folder if scores.drafts is None else base
        notes.append(f"`{without}` has no multi-token prediction layer, so drafts are not compared")
        scores, baseline = replace(scores, drafts=None), replace(baseline, drafts=None)
    return EvalReport(
        request.model,
        request.baseline,
        compare(scores, baseline),
        len(documents),
        int(scores.tokens.sum()),
        tuple(notes),
        _compare_sets(sets, scores, baseline),
    )


def _evaluate_classifier(request: EvalRequest, folder: Path, base: Path | None) -> EvalReport:
    """Score a classifier or reward model on labelled texts or pairs, by the metrics of training."""
    if request.extract is not None:
        raise ConfigError(
            f"--extract {request.extract} needs answers, and `{folder}` holds a classifier", hint="leave it out"
        )
    if request.preference is not None:
        raise ConfigError(
            f"objective {request.preference.name} compares answers of language models, and `{folder}` holds a "
            "classifier",
            hint="leave objective out: a reward model is scored on pairs, a classifier on labelled texts",
        )
    tokenizer = load_tokenizer(str(folder))
    sets, notes = held_out_sets(request, folder, tokenizer, read_labelled)
    documents = list(chain.from_iterable(sets.values()))
    if base is not None:
        check_baseline(folder, base)
        notes += _check_same_tokens(folder, base, tokenizer, documents)
    models = [each for each in (folder, base) if each is not None]
    scores, *others = (score_labelled(each, documents, batch_tokens=request.batch_tokens) for each in models)
    baseline = others[0] if others else None
    return EvalReport(
        request.model,
        request.baseline,
        compare(scores, baseline),
        len(scores),
        sum(len(document.ids) for document in documents),
        tuple(notes),
        _compare_sets(sets, scores, baseline),
        unit="pairs" if scores.objective.documents_per_unit > 1 else "examples",
        counts_all_tokens=True,
    )


def _evaluate_preferences(
    request: EvalRequest, objective: DocumentObjective, folder: Path, base: Path | None
) -> EvalReport:
    """Score a language model on pairs of answers, by the metrics of training.

    The baseline is the reference model where the objective compares with one, else a model to compare with.
    """
    _check_preference(request, objective)
    tokenizer = load_tokenizer(str(folder))
    sets, notes = held_out_sets(request, folder, tokenizer, read_sides)
    documents = list(chain.from_iterable(sets.values()))
    if base is not None:
        check_generates(base)
        notes += _check_same_tokens(folder, base, tokenizer, documents)
    models = [each for each in (folder, base) if each is not None]
    mine, *others = (_score(each, documents, request, tokenizer, None) for each in models)
    reference = others[0] if objective.needs_reference else None
    scores = PreferenceScores.of(objective, mine, reference)
    baseline = PreferenceScores.of(objective, others[0], None) if others and reference is None else None
    return EvalReport(
        request.model,
        request.baseline,
        compare(scores, baseline),
        len(scores),
        int(mine.tokens.sum()),
        tuple(notes),
        _compare_sets(sets, scores, baseline),
        unit="pairs",
    )


def _evaluate_marked(request: EvalRequest, objective: DocumentObjective, folder: Path, base: Path | None) -> EvalReport:
    """Score a language model on marked answers, by the metrics of training; the baseline is the reference model."""
    _check_preference(request, objective)
    assert base is not None
    tokenizer = load_tokenizer(str(folder))
    sets, notes = held_out_sets(request, folder, tokenizer, read_marked)
    answers = list(chain.from_iterable(sets.values()))
    documents = [*(answer.document for answer in answers), *(answer.mismatched for answer in answers)]
    check_generates(base)
    notes += _check_same_tokens(folder, base, tokenizer, documents)
    mine, reference = (_score(each, documents, request, tokenizer, None) for each in (folder, base))
    scores = MarkedScores.of(objective, list(sets.values()), mine, reference)
    return EvalReport(
        request.model,
        request.baseline,
        compare(scores, None),
        len(scores),
        int(mine.tokens[: len(scores)].sum()),
        tuple(notes),
        _compare_sets(sets, scores, None),
        unit="answers",
    )


def _check_preference(request: EvalRequest, objective: DocumentObjective) -> None:
    if request.extract is not None:
        raise ConfigError(
            f"--extract {request.extract} with objective {objective.name}, whose answers are not compared with right "
            "ones",
            hint="leave one of them out",
        )
    check_reference(objective, request.baseline)


def _compare_sets(
    sets: Mapping[str, Sequence[AnyDocument]], scores: AnyScores, baseline: AnyScores | None
) -> dict[str, Mapping[str, Metric]]:
    """Metrics of each set that has a name; the scores are of the documents of all sets, in their order."""
    ends = accumulate(len(documents) for documents in sets.values())
    parts = {name: slice(end - len(documents), end) for (name, documents), end in zip(sets.items(), ends, strict=True)}
    return {
        name: compare(scores.part(part), None if baseline is None else baseline.part(part))
        for name, part in parts.items()
        if name
    }


def _model_folder(name: str) -> Path:
    folder = resolve_folder(name)
    check_loadable(folder)
    return folder


def _check_same_tokens(
    folder: Path, base: Path, tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document | LabelledDocument]
) -> list[str]:
    """Check that token ids mean the same to the baseline, else DataError; a note where it has no tokenizer."""
    size = int(AutoConfig.from_pretrained(base, trust_remote_code=False).vocab_size)
    largest = max(max(document.ids) for document in documents)
    if largest >= size:
        raise DataError(
            f"the rows have token ids up to {largest} and `{base}` a vocabulary of {size}",
            hint="name the base model of the export",
        )
    if not (base / "tokenizer_config.json").is_file() and not (base / "tokenizer.json").is_file():
        return [f"`{base}` has no tokenizer to compare; the token ids of `{folder}` are used"]
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(str(base)).get_vocab()
    differ = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    used = {tokenizer.convert_ids_to_tokens(number) for number in {i for document in documents for i in document.ids}}
    if used & set(differ):
        some = ", ".join(sorted(used & set(differ))[:5])
        raise DataError(
            f"the tokenizers of `{folder}` and `{base}` differ in {len(used & set(differ))} tokens that the rows "
            f"use: {some}",
            hint="losses of different tokens cannot be compared; score each model alone",
        )
    return []


def _references(extract: str, documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """The answers that `extract` finds in the rows' own answers; DataError where it finds none in a row."""
    references = [
        EXTRACTORS[extract](tokenizer.decode(document.answer, skip_special_tokens=True)) for document in documents
    ]
    absent = [number for number, answer in enumerate(references) if answer is None]
    if absent:
        text = tokenizer.decode(documents[absent[0]].answer, skip_special_tokens=True)
        raise DataError(
            f"`--extract {extract}` finds no answer in {len(absent)} of {len(references)} rows, the first number "
            f"{absent[0]}: {text!r:.80}",
            hint=f"name another of {', '.join(EXTRACTORS)}, --long-rows drop if rows are cut, or correct the rows",
        )
    return [*references]


def _score(
    folder: Path,
    documents: Sequence[Document],
    request: EvalRequest,
    tokenizer: PreTrainedTokenizerBase,
    references: list[object] | None,
) -> Scores:
    model = load_model(folder)
    scores = score_documents(model, documents, batch_tokens=request.batch_tokens, drafter=load_drafter(folder, model))
    if references is None or request.extract is None:
        return scores
    stop_ids = _stop_ids(model, tokenizer)
    answers = generate_answers(
        model, documents, max_new_tokens=request.max_new_tokens, stop_ids=stop_ids, batch_tokens=request.batch_tokens
    )
    extract = EXTRACTORS[request.extract]
    exact = [
        extract(tokenizer.decode(ids, skip_special_tokens=True)) == reference
        for ids, reference in zip(answers, references, strict=True)
    ]
    return replace(scores, exact=np.array(exact, dtype=np.float64))


def _stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end an answer: those of the model's generation config, and the tokenizer's eos token."""
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({int(number) for number in (*ids, tokenizer.eos_token_id) if number is not None})


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
