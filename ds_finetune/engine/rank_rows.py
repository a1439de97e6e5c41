"""Batches as one rank uses them: its own tokens of each row, ready to be copied to its device.

All numbers of tokens and documents are computed on the host before the copy, because reading them from a GPU would make
the host wait.
"""

from dataclasses import dataclass, replace

import torch

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.model.loss.forward_rows import ForwardRows, RealTokens, find_real_tokens, find_supervised, with_tensors
from ds_finetune.model.parallel.sequence import SequenceParallelGroup
from ds_finetune.objectives.objective import AnswerNumbers


@dataclass(frozen=True)
class RankBatch(Batch):
    """A batch with the rows of each forward, of which this rank has its own tokens under sequence parallelism."""

    rows: tuple[ForwardRows, ...] = ()
    """The rows of each forward, one entry for each micro-batch in `micro`."""
    baseline_rows: tuple[ForwardRows, ...] = ()
    """Rows for the objective's baseline (KTO's z0), one entry for each micro-batch in `baseline`."""


def rank_batch(batch: Batch, sequence: SequenceParallelGroup | None, device: torch.device) -> RankBatch:
    """Prepare the rows of `batch` on the host, in pinned memory if `device` is a GPU."""

    def ready(micro: MicroBatch) -> ForwardRows:
        rows = host_rows(micro, sequence)
        return with_tensors(rows, torch.Tensor.pin_memory) if device.type == "cuda" else rows

    return RankBatch(
        **vars(batch), rows=tuple(map(ready, batch.micro)), baseline_rows=tuple(map(ready, batch.baseline))
    )


def copy_to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to `device`, asynchronously to a GPU, for which it is put into pinned memory first."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def rows_on_device(rows: ForwardRows, device: torch.device) -> ForwardRows:
    """Copy `rows` to `device`. Copies from pinned memory are asynchronous."""
    return with_tensors(rows, lambda tensor: tensor.to(device, non_blocking=True))


def host_rows(micro: MicroBatch, sequence: SequenceParallelGroup | None) -> ForwardRows:
    """The rows of a micro-batch, in host memory. With sequence parallelism they have this rank's tokens only."""

    def shard(rows: torch.Tensor) -> torch.Tensor:
        return rows if sequence is None else sequence.shard(rows).contiguous()

    examples, answers = micro.examples, None if micro.examples is None else micro.examples.answers
    if answers is not None:
        experts = None if answers.experts is None else shard(answers.experts)
        answers = AnswerNumbers(shard(answers.old), shard(answers.reference), shard(answers.sampled), experts)
    if examples is not None:
        examples = replace(examples, index=shard(examples.index), answers=answers)
    ahead, labels = micro.ahead, shard(micro.labels)
    numbers, lengths = find_real_tokens(micro.lengths.tolist(), micro.documents, micro.input_ids.shape[1])
    return ForwardRows(
        input_ids=shard(micro.input_ids),
        position_ids=shard(micro.position_ids),
        labels=labels,
        documents=micro.documents,
        shared=micro.shared,
        examples=examples,
        next_ids=None if ahead is None else shard(ahead.input_ids),
        next_labels=None if ahead is None else shard(ahead.labels),
        token_types=micro.token_types,
        real=RealTokens(shard(numbers).reshape(-1), lengths),
        supervised=find_supervised(labels),
        next_supervised=None if ahead is None else find_supervised(shard(ahead.labels)),
    )
