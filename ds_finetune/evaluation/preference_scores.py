"""Makes documents of pairs and of labelled answers, to be scored by a preference objective or by KTO."""

from typing import NamedTuple

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.errors import ConfigError
from ds_finetune.evaluation.model_scores import Document
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import DocumentObjective, make_objective


def preference_of(section: ObjectiveConfig) -> DocumentObjective | None:
    """The preference or KTO objective of the run file's section `objective`; None for other objectives."""
    objective = make_objective(section)
    return objective if isinstance(objective, DocumentObjective) else None


def check_reference(objective: DocumentObjective, baseline: str | None) -> None:
    """ConfigError where an objective needs a reference model and no baseline is given."""
    if objective.needs_reference and baseline is None:
        raise ConfigError(
            f"objective {objective.name} compares with a reference model, and there is no baseline",
            hint="name the model that training began from as the baseline (--baseline)",
        )


def sides_of(rows: PreparedRows, limit: int | None) -> list[Document]:
    """Documents of the first `limit` pairs, for each the chosen one, then the rejected one."""
    number = 2 * min(rows.num_units, limit or rows.num_units)
    return [Document(*rows.document(index), [], []) for index in range(number)]


class LabelledAnswer(NamedTuple):
    """A labelled answer, its prompt with another example's answer (for KTO's z0), and 1 for good or 0 for bad."""

    document: Document
    mismatched: Document
    target: float


def labelled_answers(rows: PreparedRows, limit: int | None, *, max_seq_len: int) -> list[LabelledAnswer]:
    """The first `limit` labelled answers; DataError where all have the same prompt, so that none can be mismatched."""
    mismatched = MismatchedAnswers(rows, seed=0, max_seq_len=max_seq_len, is_packed=False)
    mismatched.check("the held-out rows")
    answers = []
    for number in range(min(rows.num_units, limit or rows.num_units)):
        ids, labels = mismatched.document(number)
        other = Document(ids.tolist(), [False, *(labels[:-1] != IGNORE_INDEX).tolist()], [], [])
        target = float(rows.documents.targets[number])
        answers.append(LabelledAnswer(Document(*rows.document(number), [], []), other, target))
    return answers
