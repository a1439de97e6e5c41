"""Divides training rows into batches, and each batch among the data parallel ranks.

The order of rows depends only on the seed and the epoch, so that a run resumes at any position without reading earlier
rows. The rows of a global batch are divided among ranks and forward passes by their cost, so that all ranks take about
the same time. This does not change which rows are in a global batch: its loss and gradient change only by rounding. A
thread prefetches batches.
"""

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from queue import Empty, Queue
from threading import Event, Thread
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ds_finetune.data.mismatched import MismatchedAnswers
from ds_finetune.data.mixture import Mixture
from ds_finetune.data.prepared_rows import Ints, PreparedRows, Row, Rows, document_starts, empty_row
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import Examples

_PAD_MULTIPLE = 8
"""Unpacked rows are padded to a multiple of this number of tokens, so that tensors have few distinct shapes."""


class Ahead(NamedTuple):
    """Inputs and targets of a multi-token prediction layer: int64 [rows, tokens] each.

    At each position, `input_ids` has the next token, and `labels` the token after the next. At the last token of a
    document the label is IGNORE_INDEX, and the id is arbitrary.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass on one rank.

    `input_ids`, `position_ids` and `labels` are int64 [rows, tokens]. The label at a position is the next token.
    `lengths` int64 [rows] are the lengths of the rows without padding; an empty row that fills the batch has 0.
    `documents` are the lengths of the documents in each row, with the padding as last document, or None where each row
    is one document. `shared` is, for each document, the number of prompt tokens that it reads from an earlier document
    of its row, or None where no document shares a prompt. `token_types` int64 [rows, tokens], for encoders, is 1 in the
    second text of a pair, else 0.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    lengths: torch.Tensor
    documents: tuple[tuple[int, ...], ...] | None = None
    shared: tuple[tuple[int, ...], ...] | None = None
    examples: Examples | None = None
    token_types: torch.Tensor | None = None
    ahead: Ahead | None = None


@dataclass(frozen=True)
class Position:
    """Position in the training data at which a run resumes: the next row is row `index` of the epoch `epoch`.

    Streamed data is read in chunks of records: the next row is row `row` of this rank's chunk `index` in the pass
    `epoch` over the sources.
    """

    epoch: int
    index: int
    row: int = 0


@dataclass(frozen=True)
class Batch:
    """One rank's batch of an optimizer step. `num_tokens` and `counts` cover only this rank, without padding."""

    micro: tuple[MicroBatch, ...]
    position: Position
    row_ids: tuple[int, ...]
    num_tokens: int
    counts: Mapping[str, int]
    """Numbers of tokens, documents, pairs and so on in this rank's rows, with the keys of `count_rows`."""
    global_counts: Mapping[str, int] | None = None
    """`counts` summed over all ranks; None if the ranks must still sum them."""
    baseline: tuple[MicroBatch, ...] = ()
    """Micro-batches of this rank, from which KTO's baseline z0 is computed before the loss."""

    @property
    def num_supervised_tokens(self) -> int:
        """Number of tokens with a label in this rank's batch."""
        return self.counts["supervised_tokens"]


@dataclass(frozen=True)
class BatchPlan:
    """How training rows are divided among ranks and padded.

    `rank` and `dp` are the data parallel rank and size. Tensor, sequence and pipeline parallel ranks of the same data
    parallel rank get the same rows. Packed rows are padded to `row_len` tokens. If `row_len` is None, rows are not
    packed, and are padded to the longest row of a forward pass.
    """

    global_batch_size: int
    micro_batch_size: int
    rank: int
    dp: int
    seed: int
    shuffle: bool
    pad_token_id: int
    row_len: int | None
    multiple: int = 1
    """Unpacked rows are padded to a multiple of this number, itself a multiple of the sequence parallel size."""
    documents_per_unit: int = 0
    """Number of documents in an example of the loss: 2 for pairs, 0 for a loss that sums over tokens, else 1."""
    reference: NDArray[np.float64] | None = None
    """Log-probability of each document under the reference model, by document index; None without a reference model."""
    mixture: Mixture | None = None
    """Weighted mixture of the training sources; None where an epoch has every row once."""
    looks_ahead: bool = False
    """Whether micro-batches have inputs and targets of multi-token prediction (`Ahead`)."""
    separates_padding: bool = False
    """Whether padding counts as a document of its own, so that bidirectional attention does not reach it."""
    row_cost: Callable[[int], float] | None = None
    """Function from a training row's index to its estimated cost, which balances ranks; None keeps the rows' order."""
    streamed_row_cost: Callable[[Row], float] | None = None
    """Function from a row to its estimated cost. It sorts the rows that a rank streams in a step, and balances rows of
    sampled answers over ranks. With None, rows keep their order.
    """
    meets_each_forward: bool = False
    """Whether data parallel ranks wait for each other in every forward or backward pass, not only once per step."""
    shares_prompts: bool = False
    """Whether sampled answers to one prompt share the prompt's tokens in a packed row."""


def training_batches(
    rows: Rows, plan: BatchPlan, *, start_step: int, total_rows: int, mismatched: MismatchedAnswers | None = None
) -> Iterator[Batch]:
    """Batches of the steps from `start_step` (0-based) on, until `total_rows` rows are used.

    Step s has rows [s x global_batch_size, (s + 1) x global_batch_size) of the concatenated epochs. An epoch is a
    permutation of all rows, or the rows chosen by a mixture. The last batch is filled with empty rows, so that all
    ranks run the same number of forward passes and no row is used more often than others. `plan.row_cost` decides which
    rank and forward pass gets a row. With `mismatched`, each batch also has micro-batches for KTO's baseline.
    """
    steps, per_epoch = -(-total_rows // plan.global_batch_size), rows_per_epoch(rows, plan)
    for step in range(start_step, steps):
        first = step * plan.global_batch_size
        after = min(first + plan.global_batch_size, total_rows)
        row_ids = [row_id(number, per_epoch, plan) for number in range(first, after)]
        costs = None if plan.row_cost is None else [plan.row_cost(number) for number in row_ids]
        indices = indices_of_rank(costs, plan.global_batch_size, plan)
        ids = [row_ids[index] if index < len(row_ids) else None for index in indices]
        batch = _batch(rows, ids, plan, Position(*divmod(after, per_epoch)))
        counts = batch.counts
        if plan.dp > 1 and isinstance(rows, PreparedRows):
            counts = rows.count_units(row_ids, plan.documents_per_unit)
        elif plan.dp > 1:
            counts = count_rows([rows[number] for number in row_ids], plan.documents_per_unit)
        batch = replace(batch, global_counts=counts)
        yield batch if mismatched is None else replace(batch, baseline=_baseline(mismatched, row_ids, plan))


def rows_per_epoch(rows: Rows, plan: BatchPlan) -> int:
    """Number of training rows in an epoch: all rows, or the rows that the mixture chooses."""
    return len(rows) if plan.mixture is None else plan.mixture.rows_per_epoch


def eval_batches(rows: Rows, plan: BatchPlan, *, limit: int = 0) -> Iterator[Batch]:
    """Batches of one evaluation pass over all rows in order, or over the first `limit` rows (0: no limit).

    The last batch is filled with empty rows, so that all ranks run the same number of forward passes.
    """
    per_round, end = plan.micro_batch_size * plan.dp, num_eval_rows(rows, limit)
    for first in range(0, end, per_round):
        begin, position = first + plan.rank * plan.micro_batch_size, Position(0, min(first + per_round, end))
        ids = [number if number < end else None for number in range(begin, begin + plan.micro_batch_size)]
        yield _batch(rows, ids, plan, position)


def eval_baseline(mismatched: MismatchedAnswers, plan: BatchPlan, *, limit: int = 0) -> Iterator[MicroBatch]:
    """Micro-batches of this rank for KTO's baseline z0 of an evaluation; `limit` rows are evaluated (0: all)."""
    end, size = num_eval_rows(mismatched.rows, limit), plan.global_batch_size
    for first in range(0, end, size):
        yield from _baseline(mismatched, range(first, min(first + size, end)), plan)


def num_eval_rows(rows: Rows, limit: int) -> int:
    """Number of rows in an evaluation limited to `limit` rows (0: no limit)."""
    return min(len(rows), limit or len(rows))


def _baseline(mismatched: MismatchedAnswers, row_ids: Sequence[int], plan: BatchPlan) -> tuple[MicroBatch, ...]:
    rows, size = mismatched.rows_for(row_ids), plan.micro_batch_size
    rows += [empty_row(plan.pad_token_id)] * (-len(rows) % (size * plan.dp))
    of_rank = rows[len(rows) // plan.dp * plan.rank :][: len(rows) // plan.dp]
    return tuple(_stack(of_rank[start : start + size], plan) for start in range(0, len(of_rank), size))


def indices_of_rank(costs: Sequence[float] | None, num_rows: int, plan: BatchPlan) -> Sequence[int]:
    """Choose the rows of a step that this rank computes; returns their indices among the `num_rows` rows of the step.

    `costs` are the costs of the first rows; all later rows are empty. The ranks' total costs are balanced. Without
    `costs`, each rank has a contiguous range.
    """
    rows_of_rank = num_rows // plan.dp
    if costs is None:
        return range(plan.rank * rows_of_rank, (plan.rank + 1) * rows_of_rank)
    all_costs = np.array([*costs, *[0.0] * (num_rows - len(costs))])
    forwards = rows_of_rank // plan.micro_batch_size
    return divide_rows(all_costs, plan.dp, forwards, meets_each_forward=plan.meets_each_forward)[plan.rank]


def row_id(number: int, num_rows: int, plan: BatchPlan) -> int:
    """Index in the data of the run's row `number`, which counts training rows over all epochs of `num_rows` rows."""
    epoch, index = divmod(number, num_rows)
    if plan.mixture is None and not plan.shuffle:
        return index
    return int(_order(plan.mixture, plan.seed, epoch, num_rows, shuffle=plan.shuffle)[index])


@lru_cache(maxsize=2)
def _order(mixture: Mixture | None, seed: int, epoch: int, num_rows: int, *, shuffle: bool) -> NDArray[np.int64]:
    if mixture is not None:
        return mixture.order(seed=seed, epoch=epoch, shuffle=shuffle)
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def _batch(rows: Rows, ids: Sequence[int | None], plan: BatchPlan, position: Position) -> Batch:
    rank_rows = [rows[i] if i is not None else None for i in ids]
    return make_batch(rank_rows, plan, position, tuple(i for i in ids if i is not None))


def make_batch(
    rows: Sequence[Row | None], plan: BatchPlan, position: Position, row_ids: tuple[int, ...], *, is_filled: bool = True
) -> Batch:
    """Make one rank's batch of a step from `rows`, in which None stands for an empty row.

    If `is_filled` is false, empty rows are left out of each forward pass that has other rows.
    """
    filled, size = [row or empty_row(plan.pad_token_id) for row in rows], plan.micro_batch_size
    forwards = [filled[start : start + size] for start in range(0, len(filled), size)]
    if not is_filled:
        forwards = [[row for row in of_forward if not row.is_filler] or of_forward[:1] for of_forward in forwards]
    return Batch(
        micro=tuple(_stack(of_forward, plan) for of_forward in forwards),
        position=position,
        row_ids=row_ids,
        num_tokens=sum(row.num_tokens for row in filled),
        counts=count_rows(filled, plan.documents_per_unit),
    )


def count_rows(rows: Sequence[Row], documents_per_unit: int) -> dict[str, int]:
    """Count supervised tokens, pairs, examples, documents and tokens in `rows`, without filler rows."""
    lengths = [row.documents.lengths for row in rows if row.documents is not None]
    examples = sum(map(len, lengths)) // documents_per_unit if documents_per_unit else 0
    return {
        "supervised_tokens": sum(row.supervised for row in rows),
        "chosen_tokens": sum(map(_chosen_tokens, rows)) if documents_per_unit == 2 else 0,
        "pairs": examples if documents_per_unit == 2 else 0,
        "examples": examples,
        "documents": sum(row.num_documents for row in rows),
        "tokens": sum(row.num_tokens for row in rows),
    }


def _chosen_tokens(row: Row) -> int:
    if row.documents is None:
        return 0
    is_chosen = np.repeat(np.arange(len(row.documents.lengths)) % 2 == 0, row.documents.lengths)
    return int((row.labels[is_chosen] != IGNORE_INDEX).sum())


def _stack(rows: Sequence[Row], plan: BatchPlan) -> MicroBatch:
    longest = max(len(row.input_ids) for row in rows)
    multiple = math.lcm(_PAD_MULTIPLE, plan.multiple)
    length = plan.row_len or -(-longest // multiple) * multiple
    restarts = plan.row_len is not None or plan.documents_per_unit > 1 or plan.separates_padding
    # If positions restart, as in packed rows, padding is a separate document that starts at position 0. Otherwise they
    # continue through the padding after a single document, so that attention needs only the causal mask.
    positions: NDArray[np.int64] = np.empty((len(rows), length), dtype=np.int64)
    for line, row in zip(positions, rows, strict=True):
        end = len(row.position_ids)
        line[:end] = row.position_ids
        line[end:] = np.arange(length - end) + (0 if restarts else end)
    has_examples = plan.documents_per_unit > 0
    starts = [document_starts(row) for row in positions] if restarts else []
    shared = tuple(tuple(row[begins].tolist()) for row, begins in zip(positions, starts, strict=False))
    input_ids = _pad([row.input_ids for row in rows], length, plan.pad_token_id)
    labels = _pad([row.labels for row in rows], length, IGNORE_INDEX)
    ahead = None
    if plan.looks_ahead:
        is_last = torch.from_numpy(np.pad(positions[:, 1:], ((0, 0), (0, 1)))) == 0
        ahead = Ahead(input_ids.roll(-1, dims=1), labels.roll(-1, dims=1).masked_fill(is_last, IGNORE_INDEX))
    return MicroBatch(
        input_ids=input_ids,
        position_ids=torch.from_numpy(positions),
        labels=labels,
        lengths=torch.tensor([row.num_tokens for row in rows]),
        documents=tuple(tuple(np.diff(row, append=length).tolist()) for row in starts) if restarts else None,
        shared=shared if any(map(any, shared)) else None,
        examples=_examples(rows, length, plan.reference) if has_examples else None,
        token_types=_token_types(rows, length) if has_examples else None,
        ahead=ahead,
    )


def _examples(rows: Sequence[Row], length: int, reference: NDArray[np.float64] | None) -> Examples:
    parts = [(number, row.documents) for number, row in enumerate(rows) if row.documents is not None]
    index = np.full((len(rows), length), -1, dtype=np.int64)
    starts, done = [np.zeros(0, dtype=np.int64)], 0
    for number, documents in parts:
        tokens = int(documents.lengths.sum())
        index[number, :tokens] = np.repeat(np.arange(done, done + len(documents.lengths)), documents.lengths)
        starts.append(number * length + np.cumsum(documents.lengths) - documents.lengths)
        done += len(documents.lengths)
    lengths, numbers, targets = (
        np.concatenate([np.zeros(0, dtype=kind), *(getattr(documents, name) for _, documents in parts)]).astype(kind)
        for name, kind in (("lengths", np.int64), ("numbers", np.int64), ("targets", np.float64))
    )
    begins = np.concatenate(starts)
    logps = np.zeros(len(numbers)) if reference is None else reference[numbers]
    assert np.isfinite(logps).all(), "a document has no reference log-probability"
    return Examples(
        index=torch.from_numpy(index),
        starts=torch.from_numpy(begins),
        ends=torch.from_numpy(begins + lengths - 1),
        numbers=torch.from_numpy(numbers),
        targets=torch.from_numpy(targets),
        reference=torch.from_numpy(logps),
    )


def _token_types(rows: Sequence[Row], length: int) -> torch.Tensor:
    types = np.zeros((len(rows), length), dtype=np.int64)
    for line, row in zip(types, rows, strict=True):
        if row.documents is not None:
            lengths, end = row.documents.lengths, int(row.documents.lengths.sum())
            line[:end] = row.position_ids >= np.repeat(row.documents.second, lengths)
    return torch.from_numpy(types)


def _pad(parts: Sequence[Ints], length: int, value: int) -> torch.Tensor:
    out = np.full((len(parts), length), value, dtype=np.int64)
    for row, part in zip(out, parts, strict=True):
        row[: len(part)] = part
    return torch.from_numpy(out)


_MOST_SWAPS = 200
_NEARLY_EVEN = 1e-3
"""Swapping rows between two ranks stops when their total costs differ by less than this fraction of the mean."""


def divide_rows(costs: NDArray[np.float64], dp: int, forwards: int, *, meets_each_forward: bool) -> list[list[int]]:
    """Divide rows among `dp` ranks; returns the indices of each rank's rows in the order of its forward passes.

    The division depends only on the `costs` of the rows, so every rank computes the same division. Rows of similar cost
    share a forward pass, which also limits the padding of unpacked rows. Forward passes run in descending order of
    cost.

    With `meets_each_forward`, ranks wait for each other in every forward pass, so the n-th passes of all ranks get rows
    of nearly equal cost. Otherwise the total costs of the ranks are balanced: the costliest remaining row goes to the
    rank with the lowest total (Graham's LPT rule, with equal numbers of rows), then swaps reduce the remaining
    difference.
    """
    assert len(costs) % (dp * forwards) == 0
    order = np.argsort(-costs, kind="stable")
    if not meets_each_forward:
        of_ranks = _even_out(order.tolist(), costs, dp)
        return [sorted(of_rank, key=lambda index: (-costs[index], index)) for of_rank in of_ranks]
    ranks: list[list[int]] = [[] for _ in range(dp)]
    totals = np.zeros(dp)
    for chunk in order.reshape(forwards, -1):
        parts = _even_out(chunk.tolist(), costs, dp)
        parts.sort(key=lambda part: -costs[part].sum())
        for rank, part in zip(np.argsort(totals, kind="stable").tolist(), parts, strict=True):
            ranks[rank] += part
            totals[rank] += costs[part].sum()
    return ranks


def _even_out(descending: Sequence[int], costs: NDArray[np.float64], number: int) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(number)]
    size = len(descending) // number
    heap = [(0.0, part) for part in range(number)]
    for index in descending:
        total, part = heapq.heappop(heap)
        parts[part].append(index)
        if len(parts[part]) < size:
            heapq.heappush(heap, (total + float(costs[index]), part))
    if size > 1:
        _swap(parts, costs)
    return parts


def _swap(parts: list[list[int]], costs: NDArray[np.float64]) -> None:
    totals = np.array([costs[part].sum() for part in parts])
    for _ in range(_MOST_SWAPS):
        most, least = int(totals.argmax()), int(totals.argmin())
        gap = float(totals[most] - totals[least])
        if gap <= _NEARLY_EVEN * totals.mean():
            return
        # The best swap gives a row that costs gap / 2 more than the received one.
        targets, cheap = costs[parts[most]] - gap / 2, costs[parts[least]]
        order = np.argsort(cheap, kind="stable")
        right = np.searchsorted(cheap[order], targets).clip(1, len(cheap) - 1)
        near = np.stack([order[right - 1], order[right]])
        misses = np.abs(cheap[near] - targets)
        side, given = np.unravel_index(int(misses.argmin()), misses.shape)
        received = near[side, given]
        difference = float(costs[parts[most][given]] - costs[parts[least][received]])
        # A swap of rows whose costs differ by d changes the gap between two totals to |gap - 2 d|.
        if not 0 < difference < gap:
            return
        parts[most][given], parts[least][received] = parts[least][received], parts[most][given]
        totals[most] -= difference
        totals[least] += difference


Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
_Queued = tuple[tuple[object, ...], BaseException | None]
"""Item in the prefetching thread's queue: a tuple with a prepared value (empty at the end), and an error or None."""
_SECONDS = 10.0
"""Seconds to wait for the prefetching thread when it is closed. If it is blocked longer, it ends with the process."""


@contextmanager
def prefetched(
    items: Iterable[Item], prepare: Callable[[Item], Prepared], *, begin: Callable[[], None] = lambda: None
) -> Iterator[Iterator[Prepared]]:
    """Context manager that computes `prepare(item)` for each item in a background thread, and gives an iterator over
    the results in order.

    The thread calls `begin` first and prepares at most two items in advance. If preparing an item fails, the iterator
    raises the error after the results before it. The thread ends when the context closes.
    """
    ready: Queue[_Queued] = Queue(maxsize=1)
    is_closed = Event()

    def fill() -> None:
        try:
            begin()
            for item in items:
                ready.put(((prepare(item),), None))
                if is_closed.is_set():
                    break
            ready.put(((), None))
        except BaseException as error:  # noqa: BLE001 - the thread that reads the batches raises it
            ready.put(((), error))

    thread = Thread(target=fill, name="prefetch", daemon=True)
    thread.start()
    try:
        yield _read(ready)
    finally:
        is_closed.set()
        until = time.monotonic() + _SECONDS
        while thread.is_alive() and time.monotonic() < until:
            # The prefetching thread may be blocked on a full queue; taking items lets it end.
            with suppress(Empty):
                ready.get(timeout=0.05)


def _read(ready: Queue[_Queued]) -> Iterator[Prepared]:
    while True:
        values, error = ready.get()
        if error is not None:
            raise error
        if not values:
            return
        yield values[0]  # type: ignore[misc]
