"""Rows divided over ranks by their cost."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ds_finetune.data.batches import Batch, BatchPlan, divide_rows, training_batches
from ds_finetune.data.documents import Documents, TokenisedDocument
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.families.configs import VOCAB
from ds_finetune.plan.model_shape import RowCost
from ds_finetune.reference.selftest.cells import TINY_MODELS
from tests.described import described_tree

LONG_TAIL = np.random.default_rng(3).lognormal(0.0, 1.0, size=256)


ROW_LEN, BATCH, TOTAL = 64, 8, 30
"""30 rows: the last of four batches has two empty rows."""


def prepared() -> PreparedRows:
    """30 packed rows of one to three documents."""
    rng = np.random.default_rng(5)
    per_row = rng.integers(1, 4, size=TOTAL)
    documents = []
    for length in rng.integers(2, 21, size=per_row.sum()).tolist():
        documents.append(TokenisedDocument(list(range(1, length + 1)), (rng.random(length) < 0.5).tolist()))
    kept = Documents.of(documents)
    return PreparedRows(kept, np.arange(per_row.sum()), np.concatenate([[0], np.cumsum(per_row)]), kept.counts)


def batches(
    rows: PreparedRows, *, dp: int, micro: int, meets: bool, start: int = 0, is_balanced: bool = True
) -> list[list[Batch]]:
    """The batches of every rank from step `start` on."""
    cost = RowCost.of(described_tree(TINY_MODELS["llama"]), "none")
    plan = BatchPlan(BATCH, micro, 0, dp, 1, shuffle=True, pad_token_id=0, row_len=ROW_LEN, meets_each_forward=meets)
    if is_balanced:
        plan = replace(plan, row_cost=lambda number: cost.of_row(*rows.sizes(number), row_len=ROW_LEN))
    make = partial(training_batches, rows, start_step=start, total_rows=TOTAL)
    return [list(make(replace(plan, rank=rank))) for rank in range(dp)]


def waiting(costs: np.ndarray, shares: list[list[int]], forwards: int, *, meets: bool) -> float:
    """How much longer than the mean rank a step takes."""
    sums = np.array([costs[share].reshape(forwards, -1).sum(1) for share in shares])
    slowest = sums.max(0).sum() if meets else sums.sum(1).max()
    return float(slowest / sums.sum(1).mean()) - 1


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize(("dp", "micro"), [(1, 4), (2, 1), (2, 4), (8, 1), (8, 2)])
def test_every_row_is_in_one_place(dp: int, micro: int, meets: bool) -> None:
    forwards = len(LONG_TAIL) // dp // micro
    shares = divide_rows(LONG_TAIL, dp, forwards, meets_each_forward=meets)
    assert [len(share) for share in shares] == [micro * forwards] * dp
    assert sorted(itertools.chain(*shares)) == list(range(len(LONG_TAIL)))
    assert divide_rows(LONG_TAIL, dp, forwards, meets_each_forward=meets) == shares


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize(("dp", "micro"), [(2, 1), (2, 4), (8, 1), (8, 4)])
def test_ranks_wait_less_than_in_the_order_of_rows(dp: int, micro: int, meets: bool) -> None:
    forwards = len(LONG_TAIL) // dp // micro
    in_order = np.arange(len(LONG_TAIL)).reshape(dp, -1).tolist()
    divided = divide_rows(LONG_TAIL, dp, forwards, meets_each_forward=meets)
    found = waiting(LONG_TAIL, divided, forwards, meets=meets)
    assert found < 0.2 * waiting(LONG_TAIL, in_order, forwards, meets=meets)
    if not meets:
        assert found < 1e-3


def test_rows_of_similar_cost_share_a_forward() -> None:
    costs = np.array([1.0, 9.0, 2.0, 8.0, 1.0, 9.0, 2.0, 8.0])
    for meets in (False, True):
        for share in divide_rows(costs, 2, 2, meets_each_forward=meets):
            assert costs[share].tolist() == [9, 8, 2, 1]


def test_equal_rows_stay_in_order() -> None:
    assert divide_rows(np.ones(4), 1, 2, meets_each_forward=False) == [[0, 1, 2, 3]]


def test_cost_of_a_row_is_that_of_its_documents() -> None:
    cost = RowCost.of(described_tree(TINY_MODELS["llama"]), "none")
    lengths = np.array([20, 30])
    # Positions without a label skip the head, of VOCAB x hidden weights.
    skipped = cost.of_row(lengths, 50, row_len=None) - cost.of_row(lengths, 10, row_len=None)
    assert skipped == 3 * 40 * VOCAB * TINY_MODELS["llama"]["hidden_size"]
    # Padding is a document of its own.
    padded = cost.of_row(lengths, 50, row_len=64)
    assert padded == cost.of_row(np.array([20, 30, 14]), 50, row_len=None)


def test_layers_run_twice_where_they_are_recomputed() -> None:
    model = described_tree(TINY_MODELS["deepseek_v3"])
    once, twice = (RowCost.of(model, value) for value in ("none", "full"))
    lengths = np.array([48])
    assert twice.of_row(lengths, 0, row_len=None) == pytest.approx(once.of_row(lengths, 0, row_len=None) * 4 / 3)
    assert twice.per_supervised_token == once.per_supervised_token


def test_a_window_limits_what_a_token_attends_to() -> None:
    cost = RowCost(per_token=0, per_supervised_token=0, per_pair=1, limits=(None, 4, 4))
    # Ten tokens: 50 pairs in the first layer; 8 + 6 x 4 in the others.
    assert cost.of_row(np.array([10]), 0, row_len=None) == 50 + 2 * 32


def test_a_model_of_unknown_shape_costs_its_tokens() -> None:
    model = described_tree(TINY_MODELS["llama"] | {"model_type": "stablelm"})
    assert RowCost.of(model, "full").of_row(np.array([3, 4]), 7, row_len=None) == 7


def test_sizes_are_those_of_the_row() -> None:
    rows = prepared()
    for number in range(len(rows)):
        row = rows[number]
        lengths, supervised = rows.sizes(number)
        assert supervised == row.supervised
        assert lengths.tolist() == np.diff([*np.flatnonzero(row.position_ids == 0), len(row.input_ids)]).tolist()


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize(("dp", "micro"), [(1, 2), (2, 2), (4, 1), (4, 2)])
def test_a_step_has_the_same_rows_however_they_are_divided(dp: int, micro: int, meets: bool) -> None:
    rows = prepared()
    (in_order,) = batches(rows, dp=1, micro=micro, meets=meets, is_balanced=False)
    balanced = batches(rows, dp=dp, micro=micro, meets=meets)
    for step, whole in enumerate(in_order):
        parts = [rank[step] for rank in balanced]
        assert sorted(itertools.chain(*(part.row_ids for part in parts))) == sorted(whole.row_ids)
        assert sum(part.num_supervised_tokens for part in parts) == whole.num_supervised_tokens
        assert {len(part.micro) for part in parts} == {BATCH // dp // micro}
        assert {part.position for part in parts} == {whole.position}


def test_a_resumed_run_divides_rows_as_before() -> None:
    rows = prepared()
    every = batches(rows, dp=2, micro=2, meets=False)
    later = batches(rows, dp=2, micro=2, meets=False, start=2)
    assert [[batch.row_ids for batch in rank] for rank in later] == [[b.row_ids for b in rank[2:]] for rank in every]


def test_ranks_of_packed_rows_cost_nearly_the_same() -> None:
    rows = prepared()
    cost = RowCost.of(described_tree(TINY_MODELS["llama"]), "none")

    def spread(is_balanced: bool) -> float:
        ranks = batches(rows, dp=2, micro=1, meets=False, is_balanced=is_balanced)
        costs = [
            [sum(cost.of_row(*rows.sizes(number), row_len=ROW_LEN) for number in batch.row_ids) for batch in rank[:3]]
            for rank in ranks
        ]
        return float(np.mean(np.max(costs, axis=0) / np.mean(costs, axis=0))) - 1

    assert spread(True) < 0.1 * spread(False)
