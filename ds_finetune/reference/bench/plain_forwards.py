"""The rows of a batch as transformers' model takes them: packed as they are, or each document in a row of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from ds_finetune.data.batches import Batch, MicroBatch
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import TopLogProbs

PADDED_DOCUMENTS = 8
"""Documents in one forward of the padded loop."""


@dataclass(frozen=True)
class PlainForward:
    """Inputs of one forward of transformers' model, and the labels of its tokens.

    `index` int64 [rows, tokens] is the number of each token's document, -1 for padding; `targets` and `reference` fp64
    [documents] belong to the documents. `top` has a teacher's stored distributions.
    """

    inputs: dict[str, torch.Tensor]
    labels: torch.Tensor
    index: torch.Tensor
    targets: torch.Tensor
    reference: torch.Tensor
    top: TopLogProbs | None = None


def packed_forwards(batch: Batch) -> list[PlainForward]:
    """The engine's own rows, with positions that restart at each document."""
    return [_packed(micro) for micro in batch.micro]


def _packed(micro: MicroBatch) -> PlainForward:
    inputs = {"input_ids": micro.input_ids, "position_ids": micro.position_ids}
    if micro.examples is None:
        none = torch.zeros(0, dtype=torch.float64)
        return PlainForward(inputs, micro.labels, torch.full_like(micro.labels, -1), none, none)
    examples = micro.examples
    return PlainForward(inputs, micro.labels, examples.index, examples.targets, examples.reference, examples.top)


def padded_forwards(batch: Batch) -> list[PlainForward]:
    """Documents of a batch in rows of their own, `PADDED_DOCUMENTS` to a forward, padded to the longest."""
    documents = [document for micro in batch.micro for document in _documents(micro)]
    return [
        _padded(documents[start : start + PADDED_DOCUMENTS]) for start in range(0, len(documents), PADDED_DOCUMENTS)
    ]


class _PlainDocument(NamedTuple):
    """Ids and labels [tokens]; a target and a reference log-probability; stored distributions [tokens, ...]; and 1 for
    the tokens of a second text [tokens].
    """

    ids: torch.Tensor
    labels: torch.Tensor
    target: float = 0.0
    reference: float = 0.0
    top: TopLogProbs | None = None
    token_types: torch.Tensor | None = None


def _documents(micro: MicroBatch) -> Iterator[_PlainDocument]:
    """The documents of a forward, without padding."""
    for number, (ids, labels) in enumerate(zip(micro.input_ids, micro.labels, strict=True)):
        lengths = micro.documents[number] if micro.documents else (len(ids),)
        if micro.examples is None:
            whole = zip(ids.split(lengths), labels.split(lengths), strict=True)
            yield from (_PlainDocument(*document) for document in whole if bool((document[1] != IGNORE_INDEX).any()))
            continue
        examples, index = micro.examples, micro.examples.index[number]
        for document in index[index >= 0].unique_consecutive().tolist():
            here = index == document
            top, types = examples.top, micro.token_types
            yield _PlainDocument(
                ids[here],
                labels[here],
                examples.targets[document].item(),
                examples.reference[document].item(),
                None if top is None else TopLogProbs(top.ids[number, here], top.log_probs[number, here]),
                None if types is None else types[number, here],
            )


def _padded(documents: list[_PlainDocument]) -> PlainForward:
    ids, labels, targets, reference, _, types = zip(*documents, strict=True)
    mask = pad_sequence([torch.ones_like(one) for one in ids], batch_first=True)
    rows = torch.arange(len(ids))[:, None].expand_as(mask)
    inputs = {"input_ids": pad_sequence(list(ids), batch_first=True), "attention_mask": mask}
    if all(each is not None for each in types) and any(each.any() for each in types):
        inputs["token_type_ids"] = pad_sequence(list(types), batch_first=True)
    return PlainForward(
        inputs,
        pad_sequence(list(labels), batch_first=True, padding_value=IGNORE_INDEX),
        torch.where(mask.bool(), rows, -1),
        torch.tensor(targets, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
        _padded_top([document.top for document in documents if document.top is not None]),
    )


def _padded_top(tops: list[TopLogProbs]) -> TopLogProbs | None:
    if not tops:
        return None
    ids, log_probs = ([getattr(top, name) for top in tops] for name in ("ids", "log_probs"))
    return TopLogProbs(pad_sequence(ids, batch_first=True), pad_sequence(log_probs, batch_first=True))
