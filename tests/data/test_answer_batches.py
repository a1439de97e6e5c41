"""Batches of sampled answers: the same rows on any number of ranks, and what is known of tokens at their labels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ds_finetune.data.answer_batches import ScoredAnswer, answer_batch
from ds_finetune.data.batches import Batch, BatchPlan, Position
from ds_finetune.objectives.labels import IGNORE_INDEX

ROW_LEN = 64
PLAN = BatchPlan(
    global_batch_size=24,
    micro_batch_size=2,
    rank=0,
    dp=1,
    seed=0,
    shuffle=False,
    pad_token_id=0,
    row_len=ROW_LEN,
    documents_per_unit=1,
)


def answers(number: int = 24) -> list[ScoredAnswer]:
    rng = np.random.default_rng(7)
    found = []
    for each in range(number):
        ids = rng.integers(1, 90, size=int(rng.integers(1, 40)))
        logps = [-rng.random(len(ids)).astype(np.float32) for _ in range(3)]
        found.append(
            ScoredAnswer(
                prompt_ids=rng.integers(1, 90, size=int(rng.integers(1, 20))).tolist(),
                ids=ids,
                advantage=float(rng.normal()),
                number=100 + each,
                sampled=logps[0],
                old=logps[1] if each % 3 else None,
                reference=None,
            )
        )
    return found


def documents(batch: Batch) -> dict[int, tuple[list[int], list[int], float, list[list[float]]]]:
    """Of each document of a batch by its number: ids, labels, advantage, and old, reference and sampled numbers."""
    found = {}
    for micro in batch.micro:
        examples = micro.examples
        assert examples is not None
        assert examples.answers is not None
        known = [examples.answers.old, examples.answers.reference, examples.answers.sampled]
        for place, number in enumerate(examples.numbers.tolist()):
            here = examples.index == place
            assert micro.position_ids[here].tolist() == list(range(int(here.sum())))
            labels = micro.labels[here]
            values = [rows[here][labels != IGNORE_INDEX].tolist() for rows in known]
            found[number] = (micro.input_ids[here].tolist(), labels.tolist(), examples.targets[place].item(), values)
        outside = micro.labels == IGNORE_INDEX
        assert all(rows[outside].isnan().all() for rows in known)
    return found


@pytest.mark.parametrize("row_len", [ROW_LEN, None])
@pytest.mark.parametrize("has_costs", [False, True])
@pytest.mark.parametrize("meets", [False, True])
def test_a_batch_does_not_depend_on_ranks(row_len: int | None, has_costs: bool, meets: bool) -> None:
    given = answers()
    plan = replace(PLAN, row_len=row_len, meets_each_forward=meets)
    if has_costs:
        plan = replace(plan, streamed_row_cost=lambda row: float(row.num_tokens**2))
    for dp in (1, 2, 3):
        shares = [answer_batch(given, replace(plan, dp=dp, rank=rank)) for rank in range(dp)]
        assert len({len(share.micro) for share in shares}) == 1
        assert all(len(micro.input_ids) == plan.micro_batch_size for share in shares for micro in share.micro)
        together = {number: document for share in shares for number, document in documents(share).items()}
        assert sum(len(documents(share)) for share in shares) == len(given)
        for answer in given:
            ids, labels, advantage, (old, reference, sampled) = together[answer.number]
            whole = [*answer.prompt_ids, *answer.ids.tolist()]  # type: ignore[union-attr]
            prompt = len(answer.prompt_ids)
            assert ids == whole
            assert labels == [*[IGNORE_INDEX] * (prompt - 1), *whole[prompt:], IGNORE_INDEX]
            assert advantage == answer.advantage
            assert answer.sampled is not None
            assert sampled == answer.sampled.tolist()
            assert np.isnan(reference).all()
            assert np.isnan(old).all() if answer.old is None else old == answer.old.tolist()
        counts = shares[0].global_counts
        assert counts is not None
        assert {**counts} == {name: sum(share.counts[name] for share in shares) for name in counts}
        assert counts["supervised_tokens"] == sum(len(answer.ids) for answer in given)
        assert counts["examples"] == len(given)


def test_packing_needs_fewer_forwards() -> None:
    """As many as the answers need, whatever their number is; none of them is a forward of empty rows."""
    packed, unpacked = answer_batch(answers(), PLAN), answer_batch(answers(), replace(PLAN, row_len=None))
    assert len(packed.micro) < len(unpacked.micro) == 12
    few = answer_batch(answers(2), PLAN, position=Position(1, 5))
    assert (len(few.micro), few.position) == (1, Position(1, 5))
    none = answer_batch([], PLAN)
    assert (len(none.micro), none.counts["examples"], none.counts["supervised_tokens"]) == (1, 0, 0)
    assert torch.equal(none.micro[0].lengths, torch.zeros(2, dtype=torch.int64))
