"""Scores of pairs of answers by a language model, as a preference objective computes them."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.errors import ConfigError
from ds_finetune.evaluation.model_scores import Document, Scores
from ds_finetune.objectives.objective import DocumentLogProbs, DocumentObjective, is_of_documents, make_objective

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class PreferenceScores:
    """What an objective adds up over pairs: `sums` [pairs, sums], and the tokens of chosen answers [pairs]."""

    objective: DocumentObjective
    sums: Numbers
    chosen_tokens: Numbers

    @classmethod
    def of(cls, objective: DocumentObjective, scores: Scores, reference: Scores | None) -> "PreferenceScores":
        """From the scores of both sides of each pair, and those of a reference model where the objective needs one."""
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
        """The scores of the pairs of some documents, of which each pair has two."""
        pairs = slice(documents.start // 2, documents.stop // 2)
        return replace(self, sums=self.sums[pairs], chosen_tokens=self.chosen_tokens[pairs])

    def metrics(self, counts: Numbers) -> dict[str, Numbers]:
        """The metrics of training, of samples that contain each pair `counts` [samples, pairs] times, [samples]
        each.
        """
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
    """The objective of a section of the run file where it compares the answers of a language model, else None."""
    objective = make_objective(section)
    return objective if is_of_documents(objective) else None


def check_reference(objective: DocumentObjective, baseline: str | None) -> None:
    """ConfigError where an objective compares with a reference model and there is none."""
    if objective.needs_reference and baseline is None:
        raise ConfigError(
            f"objective {objective.name} compares with a reference model, and there is no baseline",
            hint="name the model that training began from as the baseline (--baseline)",
        )


def sides_of(rows: PreparedRows, limit: int | None) -> list[Document]:
    """Both sides of each of the first `limit` pairs, the chosen one first."""
    number = 2 * min(rows.num_units, limit or rows.num_units)
    return [Document(*rows.document(index), [], []) for index in range(number)]
