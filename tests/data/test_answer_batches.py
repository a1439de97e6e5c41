"""Batches of sampled answers: the same rows on any number of ranks, and what is known of tokens at their labels."""

from dataclasses import replace

import numpy as np
import pytest

from ds_finetune.data.answer_batches import ScoredAnswer, answer_batch
from ds_finetune.data.batches import Batch, BatchPlan
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
        for micro in (micro for share in shares for micro in share.micro):
            assert len(micro.lengths) == max(1, int((micro.lengths > 0).sum())) <= plan.micro_batch_size
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
    few = answer_batch(answers(2), PLAN)
    assert [len(micro.lengths) for micro in few.micro] == [2]
    assert [len(micro.lengths) for micro in answer_batch(answers(1), PLAN).micro] == [1]
    none = answer_batch([], PLAN)
    assert (len(none.micro), none.counts["examples"], none.counts["supervised_tokens"]) == (1, 0, 0)
    assert none.micro[0].lengths.tolist() == [0]


def groups() -> list[ScoredAnswer]:
    """Four groups of six answers, one of whose prompts is a single token."""
    prompts = [[7], [5, 6, 7, 8], list(range(20, 35)), list(range(40, 49))]
    return [replace(answer, prompt_ids=prompts[number // 6]) for number, answer in enumerate(answers())]


def test_answers_share_their_prompt() -> None:
    """Every answer is predicted at the same positions as beside a prompt of its own, and rows have fewer tokens."""
    given, plan = groups(), replace(PLAN, shares_prompts=True)
    shared, own = answer_batch(given, plan), answer_batch(given, PLAN)
    assert shared.counts["tokens"] < own.counts["tokens"]
    kept = ("supervised_tokens", "examples", "documents")
    assert {name: shared.counts[name] for name in kept} == {name: own.counts[name] for name in kept}
    found = set()
    for micro in shared.micro:
        assert micro.documents is not None
        none = [(0,) * len(lengths) for lengths in micro.documents]
        for row, (lengths, continued) in enumerate(zip(micro.documents, micro.shared or none, strict=True)):
            assert sum(lengths) == ROW_LEN
            ids, labels, positions = (of[row].tolist() for of in (micro.input_ids, micro.labels, micro.position_ids))
            begin = origin = 0
            for length, more in zip(lengths, continued, strict=True):
                origin = origin if more else begin
                end = begin + length
                assert positions[begin:end] == list(range(more, more + length))
                whole = ids[origin : origin + more] + ids[begin:end]
                answer = [label for label in labels[begin:end] if label != IGNORE_INDEX]
                places = [place + more for place, label in enumerate(labels[begin:end]) if label != IGNORE_INDEX]
                if answer:
                    assert [whole[place + 1] for place in places] == answer
                    found.add((tuple(whole[: places[0] + 1]), tuple(answer), len(whole)))
                begin = end
    assert found == {
        (tuple(each.prompt_ids), tuple(map(int, each.ids)), len(each.prompt_ids) + len(each.ids)) for each in given
    }


def test_rows_of_one_answer_share_nothing() -> None:
    for plan in (replace(PLAN, row_len=None, shares_prompts=True), PLAN):
        assert all(micro.shared is None for micro in answer_batch(groups(), plan).micro)


@pytest.mark.parametrize(("row_len", "rows"), [(13, 1), (12, 2)])
def test_an_answer_needs_one_token_of_a_prompt_that_is_there(row_len: int, rows: int) -> None:
    """Prompt and answer have 9 tokens; the other answer has 3 after the last token of the prompt."""
    given = [ScoredAnswer([1, 2, 3, 4, 5, 6], [7, 8, 9], 1.0, number, None, None, None) for number in range(2)]
    batch = answer_batch(given, replace(PLAN, row_len=row_len, shares_prompts=True))
    assert sum(len(micro.lengths) for micro in batch.micro) == rows
