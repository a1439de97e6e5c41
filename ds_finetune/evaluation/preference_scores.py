"""Evaluation of answers under a language model: pairs with a preference objective, labelled answers with KTO."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.errors import ConfigError
from ds_finetune.evaluation.model_scores import Document, Scores
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import DocumentLogProbs, DocumentObjective, is_of_documents, make_objective

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class PreferenceScores:
    """Sums of a preference objective for each pair, [pairs, sums], and the tokens of chosen answers [pairs]."""

    objective: DocumentObjective
    sums: Numbers
    chosen_tokens: Numbers

    @classmethod
    def of(cls, objective: DocumentObjective, scores: Scores, reference: Scores | None) -> "PreferenceScores":
        """Computed from the scores of both sides of each pair, and the reference model's where needed."""
        assert (reference is not None) == objective.needs_reference
        logps = -scores.loss
        columns = (
            logps,
            scores.tokens,
            np.zeros_like(logps),
            np.zeros_like(logps) if reference is None else -reference.loss,
        )
        pairs = zip(*(torch.from_numpy(column).split(2) for column in columns), strict=True)
        weights, baseline = torch.ones(len(objective.terms), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        sums = [objective.loss(DocumentLogProbs(*pair), weights, baseline).sums.numpy() for pair in pairs]
        return cls(objective, np.stack(sums), scores.tokens[::2])

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.sums)

    def part(self, documents: slice) -> "PreferenceScores":
        """The scores of the pairs within a slice of the documents; each pair has two documents."""
        pairs = slice(documents.start // 2, documents.stop // 2)
        return replace(self, sums=self.sums[pairs], chosen_tokens=self.chosen_tokens[pairs])

    def metrics(self, counts: Numbers) -> dict[str, Numbers]:
        """Training metrics of bootstrap samples, [samples] each; sample s contains pair p `counts[s, p]` times."""
        totals, tokens = counts @ self.sums, counts @ self.chosen_tokens
        found = [
            self.objective.metrics(
                dict(zip(self.objective.sum_names, sums.tolist(), strict=True)),
                {"pairs": pairs, "chosen_tokens": chosen},
            )
            for sums, pairs, chosen in zip(totals, counts.sum(axis=1).tolist(), tokens.tolist(), strict=True)
        ]
        return {name: np.array([each[name] for each in found]) for name in found[0]}


def preference_of(section: ObjectiveConfig) -> DocumentObjective | None:
    """The preference or KTO objective of the run file's section; None for other objectives."""
    objective = make_objective(section)
    return objective if is_of_documents(objective) else None


def check_reference(objective: DocumentObjective, baseline: str | None) -> None:
    """ConfigError where an objective needs a reference model and no baseline is given."""
    if objective.needs_reference and baseline is None:
        raise ConfigError(
            f"objective {objective.name} compares with a reference model, and there is no baseline",
            hint="name the model that training began from as the baseline (--baseline)",
        )


def sides_of(rows: PreparedRows, limit: int | None) -> list[Document]:
    """Both documents of each of the first `limit` pairs, the chosen one first."""
    number = 2 * min(rows.num_units, limit or rows.num_units)
    return [Document(*rows.document(index), [], []) for index in range(number)]


@dataclass(frozen=True)
class MarkedDocument:
    """A labelled answer; its prompt with another example's answer, for KTO's z0; and 1 for good or 0 for bad."""

    document: Document
    mismatched: Document
    target: float


@dataclass(frozen=True)
class MarkedScores:
    """Sums of the KTO objective for each labelled answer, [answers, sums]."""

    objective: DocumentObjective
    sums: Numbers

    @classmethod
    def of(
        cls, objective: DocumentObjective, sets: Sequence[Sequence[MarkedDocument]], scores: Scores, reference: Scores
    ) -> Self:
        """Computed from the scores, under the model and the reference, of all answers of all sets followed by all
        mismatched answers. Each set has a z0 of its own.
        """
        logps, references = (torch.from_numpy(-each.loss).view(2, -1) for each in (scores, reference))
        targets = torch.tensor([answer.target for answers in sets for answer in answers], dtype=torch.float64)
        columns = (logps[0], torch.ones_like(targets), targets, references[0])
        weights, done, sums = torch.ones(1, dtype=torch.float64), 0, []
        for answers in sets:
            here = slice(done, done + len(answers))
            ratios = (logps[1] - references[1])[here]
            z0 = torch.tensor(objective.baseline(float(ratios.sum()), len(ratios)), dtype=torch.float64)
            for number in range(here.start, here.stop):
                one = (column[number : number + 1] for column in columns)
                sums.append(objective.loss(DocumentLogProbs(*one), weights, z0).sums.numpy())
            done = here.stop
        return cls(objective, np.stack(sums))

    def __len__(self) -> int:
        """Number of answers."""
        return len(self.sums)

    def part(self, answers: slice) -> Self:
        """The scores of a slice of the answers."""
        return replace(self, sums=self.sums[answers])

    def metrics(self, counts: Numbers) -> dict[str, Numbers]:
        """Training metrics of bootstrap samples, [samples] each; sample s contains answer a `counts[s, a]` times. z0 is
        that of all answers. NaN where a sample has no good or no bad answer.
        """
        names = self.objective.sum_names
        found = [
            self.objective.metrics(dict(zip(names, sums.tolist(), strict=True)), {"examples": number})
            for sums, number in zip(counts @ self.sums, counts.sum(axis=1).tolist(), strict=True)
        ]
        every = dict.fromkeys(name for each in found for name in each)
        return {name: np.array([each.get(name, np.nan) for each in found]) for name in every}


def marked_answers(rows: PreparedRows, limit: int | None, *, max_seq_len: int) -> list[MarkedDocument]:
    """The first `limit` labelled answers; DataError where all have the same prompt, so that none can be mismatched."""
    mismatched = MismatchedAnswers(rows, seed=0, max_seq_len=max_seq_len, is_packed=False)
    mismatched.check("the held-out rows")
    return [
        MarkedDocument(
            Document(*rows.document(number), [], []),
            _document(*mismatched.document(number)),
            float(rows.documents.targets[number]),
        )
        for number in range(min(rows.num_units, limit or rows.num_units))
    ]


def _document(ids: NDArray[np.int32], labels: NDArray[np.int32]) -> Document:
    return Document(ids.tolist(), [False, *(labels[:-1] != IGNORE_INDEX).tolist()], [], [])
