"""Losses and greedy answers of documents by plain transformers, in batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_finetune.quiet import show_loading_as_phase

Sums = NDArray[np.float64]


@dataclass(frozen=True)
class Document:
    """Token ids of a document and which of them are supervised; `prompt` ids and `answer` ids of its last supervised
    stretch.
    """

    ids: list[int]
    mask: list[bool]
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Scores:
    """Sums over the supervised tokens of each document, [documents] each: loss in nats, tokens, tokens predicted;
    whether its answer is right.

    `exact` is None where no answers were asked for.
    """

    loss: Sums
    tokens: Sums
    correct: Sums
    exact: Sums | None = None


def load_model(folder: Path) -> PreTrainedModel:
    """The model of a folder as transformers loads it, on a GPU where there is one."""
    show_loading_as_phase()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False).eval()
    return model.cuda() if torch.cuda.is_available() else model


def score_documents(model: PreTrainedModel, documents: Sequence[Document], *, batch_tokens: int) -> Scores:
    """Sums of each document; padding on the right with a mask, at most `batch_tokens` tokens a forward where a document
    is not longer.
    """
    found = np.zeros((3, len(documents)))
    lengths = [len(document.ids) for document in documents]
    for numbers in length_batches(lengths, batch_tokens):
        longest = max(lengths[number] for number in numbers)
        ids, attended, labels = (np.full((len(numbers), longest), fill) for fill in (0, 0, -100))
        for row, number in enumerate(numbers):
            document, end = documents[number], lengths[number]
            ids[row, :end], attended[row, :end] = document.ids, 1
            labels[row, : end - 1] = np.where(document.mask[1:], document.ids[1:], -100)
        inputs, mask, targets = (torch.from_numpy(part).to(model.device) for part in (ids, attended, labels))
        with torch.no_grad():
            logits = model(input_ids=inputs, attention_mask=mask, use_cache=False).logits
        for row, number in enumerate(numbers):
            places = targets[row] != -100
            scores, wanted = logits[row, places].float(), targets[row, places]
            found[:, number] = (
                cross_entropy(scores, wanted, reduction="sum").item(),
                len(wanted),
                int((scores.argmax(-1) == wanted).sum()),
            )
    return Scores(*found)


def generate_answers(
    model: PreTrainedModel,
    documents: Sequence[Document],
    *,
    max_new_tokens: int,
    stop_ids: list[int],
    batch_tokens: int,
) -> list[list[int]]:
    """Greedy answers to the prompts, ids without the stop token; padding on the left with a mask."""
    answers: list[list[int]] = [[] for _ in documents]
    lengths = [len(document.prompt) for document in documents]
    for numbers in length_batches([length + max_new_tokens for length in lengths], batch_tokens):
        longest = max(lengths[number] for number in numbers)
        ids, attended = (np.zeros((len(numbers), longest), dtype=np.int64) for _ in range(2))
        for row, number in enumerate(numbers):
            begin = longest - lengths[number]
            ids[row, begin:], attended[row, begin:] = documents[number].prompt, 1
        inputs, mask = (torch.from_numpy(part).to(model.device) for part in (ids, attended))
        with torch.no_grad():
            out = model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=stop_ids,
                pad_token_id=stop_ids[0],
            )
        for number, row in zip(numbers, out[:, longest:].tolist(), strict=True):
            end = next((place for place, token in enumerate(row) if token in stop_ids), len(row))
            answers[number] = row[:end]
    return answers


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of sequences of like lengths, longest first, so that rows x longest is at most `batch_tokens`; one that
    is longer goes alone.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
