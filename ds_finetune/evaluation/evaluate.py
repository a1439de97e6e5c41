"""Evaluates a model, then its baseline, on held-out rows that are tokenised as in training."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ds_finetune.config.sections import DataConfig
from ds_finetune.config.units import share_text
from ds_finetune.data.documents import Counts
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.prompt_format import end_ids, template_settings, trained_ends
from ds_finetune.data.row_kind import DIALOGUE, RowKind
from ds_finetune.data.row_report import row_notes
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.errors import ConfigError, DataError
from ds_finetune.evaluation.classifier_scores import (
    LabelledDocument,
    check_baseline,
    kind_of,
    labelled_documents,
    score_labelled,
)
from ds_finetune.evaluation.compare import METHOD, AnyScores, Metric, compare
from ds_finetune.evaluation.model_scores import Document, Scores, generate_answers, load_drafter, score_documents
from ds_finetune.evaluation.objective_scores import LabelledAnswer, ObjectiveScores, labelled_answers, sides_of
from ds_finetune.export.load import check_generates, check_loadable, holds_classifier
from ds_finetune.export.safetensors_format import load_model
from ds_finetune.foreign.auto_configs import AutoConfig
from ds_finetune.model.build.encoder import max_positions
from ds_finetune.model.build.skeleton import resolve_folder
from ds_finetune.model.build.text_config import text_config
from ds_finetune.objectives.grpo import pass_shares
from ds_finetune.objectives.objective import DocumentObjective
from ds_finetune.objectives.rewards.extractors import EXTRACTORS

AnyDocument = TypeVar("AnyDocument", Document, LabelledDocument, LabelledAnswer)


@dataclass(frozen=True)
class EvalRequest:
    """What to evaluate and how: the models, and at most `limit` documents of each held-out set.

    `extract` is the name of an extractor. With it, the model generates answers of at most `max_new_tokens` tokens: a
    greedy one, and `samples` answers sampled at temperature 1. Results that the extractor finds in them are compared
    with the results in the rows' own answers.
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
    """Objective whose metrics score pairs of answers or labelled answers; None for other rows."""
    samples: int = 0


@dataclass(frozen=True)
class EvalReport:
    """Metrics of an evaluation by name, the models, and how many documents and tokens were scored.

    `sets` has the metrics of each named held-out set; `metrics` are those of all documents.
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
    counts_all_tokens: bool = False
    """Whether `tokens` counts all tokens, as for classifiers, instead of supervised ones."""

    @property
    def counted(self) -> str:
        """Text with the numbers of documents and tokens that were scored."""
        kind = "tokens" if self.counts_all_tokens else "supervised tokens"
        return f"{self.tokens:,} {kind} of {self.documents:,} {self.unit}"

    def as_json(self) -> dict[str, Any]:
        """All fields of the report as plain values."""
        return asdict(self)


def evaluate_model(request: EvalRequest) -> EvalReport:
    """Score the model and the baseline of `request` on the same token ids.

    DataError or ExportError where rows or models cannot be read, or the models cannot be compared.
    """
    scoring = _Scoring(request)
    if holds_classifier(scoring.folder):
        return scoring.of_classifier()
    if request.preference is None:
        return scoring.of_documents()
    if request.extract is not None:
        raise ConfigError(
            f"--extract {request.extract} generates answers, but objective {request.preference.name} scores the "
            "answers in the rows",
            hint="leave out either --extract or the objective",
        )
    if request.preference.needs_reference and request.baseline is None:
        raise ConfigError(
            f"objective {request.preference.name} compares with a reference model, and there is no baseline",
            hint="set --baseline to the model that training began from",
        )
    if request.kind.name == "marked":
        return scoring.of_labelled_answers(request.preference)
    return scoring.of_pairs(request.preference)


class _Scoring:
    def __init__(self, request: EvalRequest) -> None:
        self.request = request
        self.folder = _model_folder(request.model)
        self.base = None if request.baseline is None else _model_folder(request.baseline)
        self.notes: list[str] = []

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(str(self.folder))

    def of_documents(self) -> EvalReport:
        request, base = self.request, self.base

        def take(rows: PreparedRows, _: int) -> list[Document]:
            number = min(rows.counts.documents, request.limit or rows.counts.documents)
            prompts = rows.prompts_and_answers(number)
            return [Document(*rows.document(index), *prompt) for index, prompt in enumerate(prompts)]

        sets = self._read(take, "documents")
        documents = list(chain.from_iterable(sets.values()))
        self._check_base(documents)
        if request.kind.objective == "distill":
            self.notes.append("objective distill: the loss is that of the labels, which is eval/label_loss of a run")
        references = None if request.extract is None else _references(request.extract, documents, self.tokenizer)
        scores, baseline = self._score(documents, references)
        if base is not None and baseline is not None and (scores.drafts is None) != (baseline.drafts is None):
            without = self.folder if scores.drafts is None else base
            self.notes.append(f"`{without}` has no multi-token prediction layer, so drafts are not compared")
            scores, baseline = replace(scores, drafts=None), replace(baseline, drafts=None)
        return self._report(sets, scores, baseline, tokens=int(scores.tokens.sum()))

    def of_classifier(self) -> EvalReport:
        request, folder, base = self.request, self.folder, self.base
        if request.extract is not None:
            raise ConfigError(
                f"--extract {request.extract} needs answers, and `{folder}` holds a classifier",
                hint="leave --extract out",
            )
        if request.preference is not None:
            raise ConfigError(
                f"objective {request.preference.name} compares answers of language models, and `{folder}` holds a "
                "classifier",
                hint="leave objective out: a reward model is scored on pairs, a classifier on labelled texts",
            )
        kind = kind_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))
        sets = self._read(lambda rows, _: labelled_documents(rows, request.limit), kind.unit, kind)
        documents = list(chain.from_iterable(sets.values()))
        if base is not None:
            check_baseline(folder, base)
            self._check_same_tokens(base, documents)
        scores = score_labelled(folder, documents, batch_tokens=request.batch_tokens)
        baseline = None if base is None else score_labelled(base, documents, batch_tokens=request.batch_tokens)
        tokens = sum(len(document.ids) for document in documents)
        return replace(self._report(sets, scores, baseline, tokens=tokens), unit=kind.unit, counts_all_tokens=True)

    def of_pairs(self, objective: DocumentObjective) -> EvalReport:
        """Score a language model on pairs of answers by the metrics of its training. The baseline is the reference
        model if the objective needs one, else a second model to compare with.
        """
        sets = self._read(lambda rows, _: sides_of(rows, self.request.limit), "pairs")
        documents = list(chain.from_iterable(sets.values()))
        self._check_base(documents)
        scored, second = self._score(documents)
        reference, other = (second, None) if objective.needs_reference else (None, second)
        scores = ObjectiveScores.of_pairs(objective, scored, reference)
        baseline = None if other is None else ObjectiveScores.of_pairs(objective, other, None)
        return replace(self._report(sets, scores, baseline, tokens=int(scored.tokens.sum())), unit="pairs")

    def of_labelled_answers(self, objective: DocumentObjective) -> EvalReport:
        limit = self.request.limit
        sets = self._read(lambda rows, length: labelled_answers(rows, limit, max_seq_len=length), "answers")
        answers = list(chain.from_iterable(sets.values()))
        documents = [*(answer.document for answer in answers), *(answer.mismatched for answer in answers)]
        self._check_base(documents)
        scored, reference = self._score(documents)
        assert reference is not None
        targets = [[answer.target for answer in of_set] for of_set in sets.values()]
        scores = ObjectiveScores.of_labelled_answers(objective, targets, scored, reference)
        tokens = int(scored.tokens[: len(scores)].sum())
        return replace(self._report(sets, scores, None, tokens=tokens), unit="answers")

    def _read(
        self, take: Callable[[PreparedRows, int], list[AnyDocument]], unit: str, kind: RowKind | None = None
    ) -> dict[str, list[AnyDocument]]:
        """Read the held-out sets by name; a set without a name has the name "". `take` makes the documents of a
        set from its tokenised rows, given the maximum number of tokens of a document.
        """
        config, request = text_config(AutoConfig.from_pretrained(self.folder, trust_remote_code=False)), self.request
        length = min(request.max_seq_len, max_positions(config) or request.max_seq_len)
        limits, kind = TokenLimits(length, config.vocab_size), kind or request.kind
        sets: dict[str, list[AnyDocument]] = {}
        for key, paths in request.data.held_out_sets.items():
            name = key.removeprefix("eval").removeprefix("/")
            with tempfile.TemporaryDirectory() as cache:
                data = request.data.model_copy(update={"eval": paths, "cache_dir": cache})
                rows = prepare_rows(data, "eval", tokenizer=self.tokenizer, limits=limits, kind=kind)
                sets[name] = take(rows, length)
                counts: Counts = rows.counts
            scored = f"{len(sets[name]) // max(kind.documents_per_unit, 1)} {unit} scored"
            cut = f"{counts.read} rows read, {counts.truncated} truncated to {length} tokens"
            dropped = f"{counts.too_long_dropped} too long"
            if unit == "documents":
                cut += f" ({share_text(counts.truncated_ratio, 2)} of all tokens cut off), {counts.split} split"
                dropped += f", {counts.nothing_supervised} without supervised tokens"
            elif request.preference is not None and unit == "pairs":
                cut += " of both sides"
            lines = [f"{cut}, {dropped}, {scored}", *row_notes(counts)]
            self.notes += [f"{name}: {line}" if name else line for line in lines]
        return sets

    def _check_base(self, documents: Sequence[Document]) -> None:
        if self.base is not None:
            check_generates(self.base)
            self._check_same_tokens(self.base, documents)

    def _score(
        self, documents: Sequence[Document], references: list[object] | None = None
    ) -> tuple[Scores, Scores | None]:
        scores = self._score_model(self.folder, documents, references)
        return scores, None if self.base is None else self._score_model(self.base, documents, references)

    def _score_model(self, folder: Path, documents: Sequence[Document], references: list[object] | None) -> Scores:
        request, tokenizer, model = self.request, self.tokenizer, load_model(folder, "")
        drafter = load_drafter(folder, model)
        scores = score_documents(model, documents, batch_tokens=request.batch_tokens, drafter=drafter)
        if references is None or request.extract is None:
            return scores
        trained = trained_ends(tokenizer, template_settings(request.data, tokenizer))
        limits = SamplingLimits(request.max_new_tokens, tuple(end_ids(folder, model.config, tokenizer, trained)))
        extract = EXTRACTORS[request.extract]

        def count_right(samples: int) -> list[int]:
            answers = generate_answers(model, documents, limits, batch_tokens=request.batch_tokens, samples=samples)
            return [
                sum(extract(tokenizer.decode(ids, skip_special_tokens=True)) == reference for ids in of_prompt)
                for of_prompt, reference in zip(answers, references, strict=True)
            ]

        answers = {"exact_match": np.array(count_right(0), dtype=np.float64)}
        if request.samples:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                answers |= pass_shares(count_right(request.samples), samples=request.samples)
        return replace(scores, answers=answers)

    def _check_same_tokens(self, base: Path, documents: Sequence[Document | LabelledDocument]) -> None:
        """DataError if token ids of `documents` mean other tokens in `base`; add a note if `base` has no tokenizer."""
        size = int(text_config(AutoConfig.from_pretrained(base, trust_remote_code=False)).vocab_size)
        largest = max(max(document.ids) for document in documents)
        if largest >= size:
            raise DataError(
                f"the rows have token ids up to {largest} and `{base}` a vocabulary of {size}",
                hint="set --baseline to the model that training began from",
            )
        if not (base / "tokenizer_config.json").is_file() and not (base / "tokenizer.json").is_file():
            self.notes.append(f"`{base}` has no tokenizer to compare; the token ids of `{self.folder}` are used")
            return
        ours, theirs = self.tokenizer.get_vocab(), load_tokenizer(str(base)).get_vocab()
        differ = {token for token, number in ours.items() if theirs.get(token) != number}
        numbers = {number for document in documents for number in document.ids}
        used = sorted({self.tokenizer.convert_ids_to_tokens(number) for number in numbers} & differ)
        if used:
            raise DataError(
                f"the tokenizers of `{self.folder}` and `{base}` differ in {len(used)} tokens that the rows use: "
                f"{', '.join(used[:5])}",
                hint="losses of different tokens cannot be compared; score each model by itself",
            )

    def _report(
        self, sets: Mapping[str, Sequence[AnyDocument]], scores: AnyScores, baseline: AnyScores | None, *, tokens: int
    ) -> EvalReport:
        per_unit = sum(map(len, sets.values())) // len(scores)
        ends = accumulate(len(documents) // per_unit for documents in sets.values())
        compared: dict[str, Mapping[str, Metric]] = {}
        for (name, documents), end in zip(sets.items(), ends, strict=True):
            part = slice(end - len(documents) // per_unit, end)
            if name:
                compared[name] = compare(scores.part(part), None if baseline is None else baseline.part(part))
        metrics, names = compare(scores, baseline), (self.request.model, self.request.baseline)
        return EvalReport(*names, metrics, len(scores), tokens, tuple(self.notes), compared)


def _model_folder(name: str) -> Path:
    folder = resolve_folder(name)
    check_loadable(folder)
    return folder


def _references(extract: str, documents: Sequence[Document], tokenizer: PreTrainedTokenizerBase) -> list[object]:
    """Results that the extractor `extract` finds in the rows' own answers; DataError where it finds none in a row."""
    texts = [str(tokenizer.decode(document.answer, skip_special_tokens=True)) for document in documents]
    references: list[object] = [EXTRACTORS[extract](text) for text in texts]
    absent = [number for number, answer in enumerate(references) if answer is None]
    if absent:
        raise DataError(
            f"`--extract {extract}` finds no answer in {len(absent)} of {len(references)} rows, the first number "
            f"{absent[0]}: {texts[absent[0]]!r:.80}",
            hint="correct the rows, set --long-rows drop if rows are cut, or use another --extract: "
            + ", ".join(EXTRACTORS),
        )
    return references
