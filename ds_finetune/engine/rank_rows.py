"""A micro-batch as one rank computes with it: its tokens of the rows, on its device."""

from dataclasses import replace

import torch

from ds_finetune.data.batches import MicroBatch
from ds_finetune.model.forward_rows import ForwardRows, find_supervised
from ds_finetune.model.parallel.sequence import SequenceParallelGroup


def rank_rows(micro: MicroBatch, sequence: SequenceParallelGroup | None, device: torch.device) -> ForwardRows:
    """The rows of a micro-batch on `device`; a rank of `sequence` gets its tokens of each row."""

    def place(rows: torch.Tensor) -> torch.Tensor:
        return (rows if sequence is None else sequence.shard(rows)).to(device, non_blocking=True)

    def place_supervised(labels: torch.Tensor) -> torch.Tensor:
        mine = labels if sequence is None else sequence.shard(labels)
        return find_supervised(mine).to(device, non_blocking=True)

    examples = micro.examples
    if examples is not None:
        index = examples.index if sequence is None else sequence.shard(examples.index)
        examples = replace(examples, index=index).to(device)
    return ForwardRows(
        input_ids=place(micro.input_ids),
        position_ids=place(micro.position_ids),
        labels=place(micro.labels),
        documents=micro.documents,
        examples=examples,
        next_ids=None if micro.ahead is None else place(micro.ahead.input_ids),
        next_labels=None if micro.ahead is None else place(micro.ahead.labels),
        token_types=None if micro.token_types is None else micro.token_types.to(device),
        lengths=micro.lengths,
        supervised=place_supervised(micro.labels),
        next_supervised=None if micro.ahead is None else place_supervised(micro.ahead.labels),
    )
