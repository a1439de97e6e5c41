"""The rows of all objectives say what their losses are."""

import pytest

from ds_finetune.config.objectives import OBJECTIVES, read_objective
from ds_finetune.data.row_kind import RowKind
from ds_finetune.objectives.objective import make_objective


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_row_says_what_its_loss_is(name: str) -> None:
    section = read_objective(name)
    objective, row = make_objective(section), OBJECTIVES[name]
    # make_objective asserts that the objective has the name, the head and the unit of its row.
    assert objective.is_per_token == row.is_cross_entropy
    assert objective.num_outputs == section.num_outputs
    assert (section.num_outputs > 0) == (row.head == "scores")
    assert (section.reference_source is not None) == ("reference" in row.needs)
    # That of sampled answers is known by token, and computed with them.
    assert hasattr(section, "reference") == ("reference" in row.needs or row.head == "answers")
    assert RowKind.of(section).documents_per_unit == objective.documents_per_unit
