"""Makes a training batch from the answers that the model sampled in a step."""

from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.data.batches import Batch, BatchPlan, MicroBatch, Position, count_rows, indices_of_rank, make_batch
from ds_finetune.data.prepared_rows import Row, next_token_labels, pack
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import UNKNOWN_EXPERTS, AnswerNumbers

LogProbs = NDArray[np.float32] | None
"""Log-probability of each token of an answer in nats, fp32 [tokens]; None where it is not known."""


@dataclass(frozen=True, eq=False)
class ScoredAnswer:
    """An answer sampled from the model, with its advantage and what is known of its tokens before the training step.

    `sampled`, `old` and `reference` are log-probabilities of its tokens: as the sampler reported them, under the
    weights that sampled, and under the reference model. `experts` are the MoE experts that computed each token (see
    `AnswerNumbers`).
    """

    prompt_ids: Sequence[int]
    ids: Sequence[int] | NDArray[np.int64]
    """Token ids of the answer, at least one; the end token is included unless the answer was truncated."""
    advantage: float
    number: int
    sampled: LogProbs = None
    old: LogProbs = None
    reference: LogProbs = None
    experts: NDArray[np.int16] | None = None


def answer_batch(answers: Sequence[ScoredAnswer], plan: BatchPlan) -> Batch:
    """Make this rank's training batch of a step from all sampled `answers`, which are the same on every rank.

    Prompts with their answers are packed from the longest to the shortest, each into the fullest row with room. Empty
    rows are added so that all ranks run the same number of forward passes.
    """
    answer_rows = _rows(answers, plan)
    rows = [*answer_rows, *[None] * (-len(answer_rows) % (plan.micro_batch_size * plan.dp))]
    rows = rows or [None] * (plan.micro_batch_size * plan.dp)
    costs = None if plan.streamed_row_cost is None else [plan.streamed_row_cost(row) for row in answer_rows]
    indices = indices_of_rank(costs, len(rows), plan)
    batch = make_batch([rows[index] for index in indices], plan, Position(0, 0), (), is_filled=False)
    by_number = {answer.number: answer for answer in answers}
    assert len(by_number) == len(answers), "two answers of a step have the same number"
    return replace(
        batch,
        micro=tuple(_with_numbers(micro, by_number) for micro in batch.micro),
        global_counts=count_rows(answer_rows, plan.documents_per_unit),
    )


def _rows(answers: Sequence[ScoredAnswer], plan: BatchPlan) -> list[Row]:
    if plan.row_len is None:
        return [_row([[answer]]) for answer in answers]
    if plan.shares_prompts:
        return [_row(groups) for groups in _share_prompts(answers, plan.row_len)]
    lengths = np.array([len(answer.prompt_ids) + len(answer.ids) for answer in answers], dtype=np.int64)
    return [_row([[answers[index]] for index in row]) for row in pack(lengths, plan.row_len)]


def _share_prompts(answers: Sequence[ScoredAnswer], row_len: int) -> list[list[list[ScoredAnswer]]]:
    """Pack answers into rows. Answers to one prompt in the same row share the tokens of that prompt.

    Returns the groups of answers of each row, one group for each prompt. An answer goes into the fullest row with room
    for it, preferably into a row that already has its prompt.
    """
    groups = defaultdict[tuple[int, ...], list[ScoredAnswer]](list)
    for answer in answers:
        groups[tuple(answer.prompt_ids)].append(answer)
    rows: list[list[list[ScoredAnswer]]] = []
    spaces: list[tuple[int, int]] = []
    for prompt, group in groups.items():
        group_of_row: dict[int, list[ScoredAnswer]] = {}
        for answer in sorted(group, key=lambda each: -len(each.ids)):
            # A packed row that already has the prompt needs room for the answer and a copy of the prompt's last token.
            length = len(answer.ids) + 1
            space_and_row = next(
                (each for each in spaces[bisect(spaces, (length,)) :] if each[1] in group_of_row), None
            )
            if space_and_row is None:
                length = len(prompt) + len(answer.ids)
                at = bisect(spaces, (length,))
                space_and_row = spaces[at] if at < len(spaces) else (row_len, len(rows))
            space, row = space_and_row
            if row == len(rows):
                rows.append([])
            else:
                spaces.remove(space_and_row)
            insort(spaces, (space - length, row))
            if row not in group_of_row:
                group_of_row[row] = []
                rows[row].append(group_of_row[row])
            group_of_row[row].append(answer)
    return rows


def _row(groups: Sequence[Sequence[ScoredAnswer]]) -> Row:
    """Make one packed row from groups of answers; the answers of a group have the same prompt.

    The first answer of a group follows the whole prompt. Each further answer is a document that begins with a copy of
    the prompt's last token, at that token's position, because that token predicts the answer's first token.
    """
    answers, parts = [answer for group in groups for answer in group], []
    for group in groups:
        for at, answer in enumerate(group):
            begin = 0 if at == 0 else len(answer.prompt_ids) - 1
            ids = np.array([*answer.prompt_ids[begin:], *answer.ids], dtype=np.int32)
            positions = np.arange(begin, begin + len(ids))
            parts.append((ids, positions, next_token_labels(ids, positions >= len(answer.prompt_ids))))
    numbers = np.array([answer.number for answer in answers], dtype=np.int64)
    return Row.of(parts, numbers, np.array([answer.advantage for answer in answers]))


def _with_numbers(micro: MicroBatch, answers: dict[int, ScoredAnswer]) -> MicroBatch:
    """Add the log-probabilities of sampled answers to a micro-batch, with NaN at unsupervised tokens."""
    assert micro.examples is not None
    # No answer is split, and answers are in the order of the micro-batch's rows, so their values can be concatenated.
    of_batch = [answers[number] for number in micro.examples.numbers.tolist()]
    is_supervised = (micro.labels != IGNORE_INDEX).numpy()

    def spread(name: str) -> torch.Tensor:
        numbers = np.full(is_supervised.shape, np.nan, dtype=np.float32)
        parts = ((len(answer.ids), getattr(answer, name)) for answer in of_batch)
        filled = [np.full(length, np.nan) if part is None else part for length, part in parts]
        numbers[is_supervised] = np.concatenate(filled or [[]])
        return torch.from_numpy(numbers)

    experts = None
    if of_batch and all(answer.experts is not None for answer in of_batch):
        marks = np.concatenate([answer.experts for answer in of_batch])
        experts = torch.full((*is_supervised.shape, marks.shape[1]), UNKNOWN_EXPERTS, dtype=torch.int16)
        experts[torch.from_numpy(is_supervised)] = torch.from_numpy(marks)
    numbers = AnswerNumbers(spread("old"), spread("reference"), spread("sampled"), experts)
    return replace(micro, examples=replace(micro.examples, answers=numbers))
