"""Scores pairs, labelled answers and labelled texts by the loss and the metrics of their training objective.

It also makes the documents of pairs and of labelled answers, which a language model scores first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.evaluation.model_scores import Document, Scores
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import DocumentLogProbs, DocumentObjective, ScoreObjective

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class ObjectiveScores:
    """Sums of an objective for each pair, labelled answer or labelled text (unit), from which its metrics follow."""

    objective: DocumentObjective | ScoreObjective
    sums: Numbers
    """Sums of the loss of each pair, answer or text, fp64 [units, sums]; `objective.sum_names` names the columns."""
    chosen_tokens: Numbers
    """Number of tokens of the chosen answer of each pair, fp64 [units]; zeros for labelled answers and texts."""
    outputs: Numbers
    """Score and target of each text or pair, fp64 [units, 2], for classifier metrics that need all units at once."""

    @classmethod
    def of_pairs(cls, objective: DocumentObjective, scores: Scores, reference: Scores | None) -> Self:
        """Scores of pairs from the model's `scores` of documents, which are alternately chosen and rejected answers.
        `reference` has the reference model's scores; None for objectives without a reference model.
        """
        assert (reference is not None) == objective.needs_reference
        logps, zeros = -scores.loss, np.zeros(len(scores))
        columns = (logps, scores.tokens, zeros, zeros if reference is None else -reference.loss)
        pairs = zip(*(torch.from_numpy(column).split(2) for column in columns), strict=True)
        sums = _document_sums(objective, (DocumentLogProbs(*pair) for pair in pairs), baseline=0.0)
        return cls(objective, np.stack(sums), scores.tokens[::2], np.zeros((len(sums), 2)))

    @classmethod
    def of_labelled_answers(
        cls, objective: DocumentObjective, targets: Sequence[Sequence[float]], scores: Scores, reference: Scores
    ) -> Self:
        """Scores of the labelled answers of several held-out sets. For KTO each set has a baseline z0 of its own.

        `targets` of each set are 1 for a good and 0 for a bad answer. `scores` are by the model and `reference` by the
        reference model. Both have the answers of all sets, then the `mismatched` documents of all answers.
        """
        logps, references = (torch.from_numpy(-each.loss).view(2, -1) for each in (scores, reference))
        sums: list[Numbers] = []
        for of_set in targets:
            part = slice(len(sums), len(sums) + len(of_set))
            mismatched = (logps[1] - references[1])[part]
            columns = (logps[0][part], torch.ones(len(of_set)), torch.tensor(of_set).double(), references[0][part])
            answers = zip(*(column.split(1) for column in columns), strict=True)
            z0 = objective.baseline(float(mismatched.sum()), len(of_set))
            sums += _document_sums(objective, (DocumentLogProbs(*answer) for answer in answers), baseline=z0)
        return cls(objective, np.stack(sums), np.zeros(len(sums)), np.zeros((len(sums), 2)))

    @classmethod
    def of_classifier(cls, objective: ScoreObjective, scores: Numbers, targets: Numbers) -> Self:
        """Scores of labelled texts or pairs from a classifier's `scores` [documents, outputs] and `targets`."""
        weights, size = torch.ones(len(objective.terms), dtype=torch.float64), objective.documents_per_unit
        units = zip(torch.from_numpy(scores).split(size), torch.from_numpy(targets).split(size), strict=True)
        sums = [objective.loss(of_unit, target, weights).sums.numpy() for of_unit, target in units]
        outputs = np.stack([scores[::size, 0], targets[::size]], axis=1)
        return cls(objective, np.stack(sums), np.zeros(len(sums)), outputs)

    def __len__(self) -> int:
        return len(self.sums)

    def part(self, units: slice) -> Self:
        """Scores of a slice of the pairs, labelled answers or texts."""
        return type(self)(self.objective, self.sums[units], self.chosen_tokens[units], self.outputs[units])

    def metrics(self, counts: Numbers) -> dict[str, Numbers]:
        """Training metrics of bootstrap samples, [samples] each; sample s contains pair, answer or text u `counts[s,
        u]` times. A metric is NaN where it is undefined, e.g. KTO's reward of good answers if a sample has none.
        """
        totals = zip(counts, counts @ self.sums, (counts @ self.chosen_tokens).tolist(), strict=True)
        results = [self._metrics_of(*sample) for sample in totals]
        names = dict.fromkeys(name for each in results for name in each)
        return {name: np.array([each.get(name, np.nan) for each in results]) for name in names}

    def _metrics_of(self, counts: Numbers, totals: Numbers, chosen_tokens: float) -> dict[str, float]:
        sums, units = dict(zip(self.objective.sum_names, totals.tolist(), strict=True)), float(counts.sum())
        metrics = self.objective.metrics(sums, {"pairs": units, "examples": units, "chosen_tokens": chosen_tokens})
        if not self.objective.gathers_scores:
            return metrics
        outputs = np.repeat(self.outputs, counts.astype(np.int64), axis=0)
        return metrics | self.objective.score_metrics(outputs[:, 0], outputs[:, 1])


def _document_sums(
    objective: DocumentObjective, units: Iterable[DocumentLogProbs], *, baseline: float
) -> list[Numbers]:
    weights, z0 = torch.ones(len(objective.terms), dtype=torch.float64), torch.tensor(baseline, dtype=torch.float64)
    return [objective.loss(unit, weights, z0).sums.numpy() for unit in units]


def sides_of(rows: PreparedRows, limit: int | None) -> list[Document]:
    """Make documents of the first `limit` pairs: of each pair the chosen one, then the rejected one."""
    number = 2 * min(rows.num_units, limit or rows.num_units)
    return [Document(*rows.document(index), [], []) for index in range(number)]


class LabelledAnswer(NamedTuple):
    """A labelled answer, whose `target` is 1 for good or 0 for bad. `mismatched` has its prompt and the answer to
    another prompt, for KTO's z0.
    """

    document: Document
    mismatched: Document
    target: float


def labelled_answers(rows: PreparedRows, limit: int | None, *, max_seq_len: int) -> list[LabelledAnswer]:
    """Make the first `limit` labelled answers; DataError if all prompts are equal."""
    mismatched = MismatchedAnswers(rows, seed=0, max_seq_len=max_seq_len, is_packed=False)
    mismatched.check("the held-out rows")
    answers = []
    for number in range(min(rows.num_units, limit or rows.num_units)):
        ids, labels = mismatched.document(number)
        other = Document(ids.tolist(), [False, *(labels[:-1] != IGNORE_INDEX).tolist()], [], [])
        target = float(rows.documents.targets[number])
        answers.append(LabelledAnswer(Document(*rows.document(number), [], []), other, target))
    return answers
