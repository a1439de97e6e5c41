"""Prompts with answers of other examples: a pure function of data and seed, the same for every split of a batch."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from ds_finetune.data.batches import Batch, BatchPlan, MicroBatch, eval_baseline, training_batches
from ds_finetune.data.documents import Documents, TokenisedDocument
from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.prepared_rows import PreparedRows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.errors import DataError
from ds_finetune.objectives.labels import IGNORE_INDEX

MAX_SEQ_LEN = 16
Example = tuple[list[int], list[int]]
"""Ids of a prompt, and of its answer."""


def examples(per_row: int = 1, number: int = 40, prompts: int = 20) -> list[Example]:
    """Prompts with two answers each, `per_row` of which fit a row; an id of an answer says whose it is."""
    rng, longest = np.random.default_rng(3), MAX_SEQ_LEN // per_row
    every = [[900 + prompt, *rng.integers(1, 90, size=prompt % (longest - 4)).tolist()] for prompt in range(prompts)]
    found = []
    for example in range(number):
        prompt = every[example % prompts]
        found.append((prompt, [1000 + example] * min(1 + int(rng.integers(9)), longest - len(prompt))))
    return found


def prepared(parts: Sequence[Example], per_row: int = 1) -> PreparedRows:
    documents = Documents.of([TokenisedDocument([*p, *a], [False] * len(p) + [True] * len(a)) for p, a in parts])
    offsets = np.arange(0, len(parts) + per_row, per_row).clip(max=len(parts))
    return PreparedRows(documents, np.arange(len(parts)), offsets, documents.counts, kind=RowKind("marked", "kto"))


def mismatched(rows: PreparedRows, seed: int = 5) -> MismatchedAnswers:
    is_packed = len(rows) < rows.counts.documents
    return MismatchedAnswers(rows, seed=seed, max_seq_len=MAX_SEQ_LEN, is_packed=is_packed)


def plan(rank: int = 0, dp: int = 1, micro: int = 4, *, is_packed: bool = True) -> BatchPlan:
    return BatchPlan(
        global_batch_size=8,
        micro_batch_size=micro,
        rank=rank,
        dp=dp,
        seed=1,
        shuffle=True,
        pad_token_id=0,
        row_len=MAX_SEQ_LEN if is_packed else None,
        documents_per_unit=1,
    )


Found = dict[int, tuple[list[int], list[int]]]


def found(micros: Sequence[MicroBatch]) -> Found:
    """Ids and targets of the supervised tokens of each document by its number."""
    out: Found = {}
    for micro in micros:
        assert micro.examples is not None
        ids, labels, index = (part.reshape(-1) for part in (micro.input_ids, micro.labels, micro.examples.index))
        for place, number in enumerate(micro.examples.numbers.tolist()):
            here = labels[index == place]
            out[number] = (ids[index == place].tolist(), here[here != IGNORE_INDEX].tolist())
    return out


def merged(parts: Sequence[Found]) -> Found:
    whole = {number: text for part in parts for number, text in part.items()}
    assert len(whole) == sum(map(len, parts)), "no document is on two ranks"
    return whole


def first_batches(rows: PreparedRows, dp: int, micro: int, *, step: int = 0, seed: int = 5) -> list[Batch]:
    other, packed = mismatched(rows, seed), len(rows) < rows.counts.documents
    return [
        next(
            training_batches(
                rows, plan(rank, dp, micro, is_packed=packed), start_step=step, total_rows=len(rows), mismatched=other
            )
        )
        for rank in range(dp)
    ]


@pytest.mark.parametrize("per_row", [1, 2])
def test_each_prompt_gets_the_answer_to_another_one(per_row: int) -> None:
    parts = examples(per_row)
    (batch,) = first_batches(prepared(parts, per_row), dp=1, micro=4)
    trained = sorted(found(batch.micro))
    baseline = found(batch.baseline)
    assert sorted(baseline) == [number + len(parts) for number in trained]
    for number, (ids, answer) in baseline.items():
        prompt = parts[number - len(parts)][0]
        other = answer[0] - 1000
        assert parts[other][0] != prompt
        assert ids == [*prompt, *parts[other][1]][:MAX_SEQ_LEN]
        assert answer == ids[len(prompt) :]
    lengths = [len(parts[number - 40][0]) + len(parts[ids[1][0] - 1000][1]) for number, ids in baseline.items()]
    assert per_row == 2 or max(lengths) > MAX_SEQ_LEN, "some are cut"


@pytest.mark.parametrize("per_row", [1, 2])
@pytest.mark.parametrize("step", [0, 2])
def test_the_baseline_is_the_same_for_every_split(per_row: int, step: int) -> None:
    """Also of the last, short batch."""
    rows = prepared(examples(per_row), per_row)
    expected = found(first_batches(rows, dp=1, micro=8, step=step)[0].baseline)
    for dp, micro in ((1, 1), (2, 4), (2, 2), (4, 2), (8, 1)):
        ranks = first_batches(rows, dp=dp, micro=micro, step=step)
        assert len({len(batch.baseline) for batch in ranks}) == 1, "every rank runs as many forwards"
        assert merged([found(batch.baseline) for batch in ranks]) == expected


def test_partners_depend_on_the_seed_alone() -> None:
    rows = prepared(examples())
    partners = [mismatched(rows).partner(number) for number in range(40)]
    assert partners == [mismatched(prepared(examples(), 5)).partner(number) for number in range(40)]
    assert partners != [mismatched(rows, seed=6).partner(number) for number in range(40)]
    assert len(set(partners)) > 30, "answers are used about equally often"


def test_rows_are_filled() -> None:
    rows = prepared(examples(2), 2)
    filled = mismatched(rows).rows_for(range(20))
    lengths = [len(row.input_ids) for row in filled]
    assert max(lengths) <= MAX_SEQ_LEN
    assert sum(lengths) > 0.75 * MAX_SEQ_LEN * len(filled)
    assert torch.tensor(lengths).sum() == sum(row.documents.lengths.sum() for row in filled if row.documents)


def test_held_out_rows_have_one_baseline_for_all() -> None:
    rows = prepared(examples(2), 2)
    expected = {number + 40 for number in range(40)}
    for dp in (1, 2):
        ranks = [found(list(micros(rows, rank, dp, limit=0))) for rank in range(dp)]
        assert set(merged(ranks)) == expected
    assert set(found(list(micros(rows, 0, 1, limit=3)))) == {number + 40 for number in range(6)}


def micros(rows: PreparedRows, rank: int, dp: int, *, limit: int) -> Iterator[MicroBatch]:
    return eval_baseline(mismatched(rows), plan(rank, dp, 2), limit=limit)


def test_one_prompt_alone_is_refused() -> None:
    rows = prepared([([7, 8], [9]), ([7, 8], [10]), ([7, 8], [11])])
    with pytest.raises(DataError, match="the 3 examples of data\\.train have one prompt") as caught:
        mismatched(rows).check("data.train")
    assert "dpo" in caught.value.hint
    mismatched(prepared([([7, 8], [9]), ([7, 9], [10])])).check("data.train")
