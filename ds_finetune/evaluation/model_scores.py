"""Scores documents by a plain transformers model, and generates answers to their prompts.

transformers does not load multi-token prediction (MTP) layers, so this module loads and scores the MTP layer of a
folder.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from ds_finetune.engine.sampling.answers import SamplingLimits
from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.mtp import PREDICTION_LAYERS, add_mtp_modules, more_layers, mtp_layer_inputs, run_mtp_layer
from ds_finetune.model.weights.names import hub_pieces
from ds_finetune.objectives.labels import IGNORE_INDEX

Sums = NDArray[np.float64]


class Drafter:
    """A multi-token prediction (MTP) layer, with the model whose tokens it predicts."""

    def __init__(self, model: PreTrainedModel, layer: Any, embedding: torch.Tensor, head: torch.Tensor) -> None:  # noqa: ANN401 - a decoder layer
        self._model, self._layer, self._embedding, self._head = model, layer, embedding, head

    def score(
        self, hidden: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor, *, chosen: torch.Tensor
    ) -> NDArray[np.float64]:
        """Score the layer's predictions. Returns sums of each row, [rows, 4]: loss in nats, and the numbers of all, of
        right and of accepted predictions. The model accepts a prediction that equals its own greedy choice.

        `hidden` [rows, tokens, width] are the model's states after the final norm. `ids` and `labels` [rows, tokens]
        have one document per row, padded on the right; the label of a token is the next token, or IGNORE_INDEX.
        `chosen` [rows, tokens] are the next tokens that the model finds most likely.
        """
        embedded = functional.embedding(ids[:, 1:], self._embedding)
        joined = mtp_layer_inputs(self._layer, embedded, hidden[:, :-1])
        positions = torch.arange(joined.shape[1], device=joined.device)[None]
        # Attention needs no mask, since it is causal and padding follows the document.
        states = run_mtp_layer(self._model, self._layer, joined, positions)
        logits = functional.linear(states, self._head)
        return np.array([_row_sums(*row) for row in zip(logits, labels[:, 1:], chosen[:, 1:], strict=True)])


def _row_sums(logits: torch.Tensor, labels: torch.Tensor, *others: torch.Tensor) -> tuple[float, ...]:
    """Sums over the supervised tokens of a row: the loss in nats, the number of tokens, how many predictions equal
    `labels`, and how many equal each of `others`.
    """
    is_supervised = labels != IGNORE_INDEX
    scores, targets = logits[is_supervised].float(), labels[is_supervised]
    loss, predicted = functional.cross_entropy(scores, targets, reduction="sum").item(), scores.argmax(-1)
    return loss, len(targets), *(int((predicted == each[is_supervised]).sum()) for each in (labels, *others))


def load_drafter(folder: Path, model: PreTrainedModel) -> Drafter | None:
    """Load the multi-token prediction layer in `folder` for its `model`; None unless the folder has exactly one.

    As in an inference server, the layer uses its own embedding and head where these differ from the model's.
    """
    family = family_of(model.config.model_type)
    tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not family.has_mtp or tree.get(PREDICTION_LAYERS) != 1:
        return None
    hub, number = HubFolder(folder), model.config.num_hidden_layers
    prefix = f"model.layers.{number}."
    if f"{prefix}eh_proj.weight" not in hub.shapes:
        return None
    layer = _load_layer(hub, model, family, prefix)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return Drafter(
        model,
        layer,
        _own(hub, f"{prefix}embed_tokens.weight", "model.embed_tokens.weight", embedding),
        _own(hub, f"{prefix}shared_head.head.weight", "lm_head.weight", head),
    )


def _own(hub: HubFolder, copy: str, original: str, weight: torch.Tensor) -> torch.Tensor:
    if copy not in hub.shapes or hub.is_same(copy, original):
        return weight
    return hub.full_tensor(copy).to(weight)


def _load_layer(hub: HubFolder, model: PreTrainedModel, family: Family, prefix: str) -> torch.nn.Module:
    own_layers: Any = model.base_model.layers
    with more_layers(model.config, 1):
        layer: torch.nn.Module = type(own_layers[-1])(model.config, len(own_layers))
    add_mtp_modules(layer, model.config)
    layer = layer.to(dtype=model.dtype).eval()
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            for piece in hub_pieces(prefix + name, tuple(tensor.shape), family):
                tensor[piece.index] = hub.full_tensor(piece.key)
        for name, buffer in list(layer.named_buffers()):
            if name.rpartition(".")[2] in family.fp32_buffers:
                owner = layer.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], hub.full_tensor(prefix + name).float().to(buffer.device))
    return layer.to(model.device)


@contextmanager
def last_hidden_states(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Context with a list to which each forward pass appends its final hidden states [rows, tokens, width]."""
    states: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(lambda _, __, out: states.append(out.last_hidden_state))
    try:
        yield states
    finally:
        handle.remove()


@dataclass(frozen=True)
class Document:
    """Token ids and supervised mask of a document; `answer` is its last supervised span, `prompt` all ids before."""

    ids: list[int]
    mask: list[bool]
    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Scores:
    """Scores of documents by a language model: sums over the supervised tokens of each document, [documents] each.
    `loss` is in nats, `tokens` the number of tokens, and `correct` the number of tokens that the model predicts.
    """

    loss: Sums
    tokens: Sums
    correct: Sums
    answers: Mapping[str, Sums] = field(default_factory=dict)
    """Scores of generated answers. `exact_match` is 1 if the greedy answer is right, else 0. `pass_at_K` is the
    probability that at least one of K sampled answers is right; for K = 1 it is named `sampled_pass_at_1`.
    """
    drafts: Sums | None = None
    """Sums over each document's tokens of how well a multi-token prediction layer drafts them (`Drafter.score`); None
    without such a layer."""

    def __len__(self) -> int:
        return len(self.tokens)

    def metrics(self, counts: Sums) -> dict[str, Sums]:
        """Metrics of bootstrap samples by name, [samples] each; sample s contains document d `counts[s, d]` times.

        They are `loss` (nats per supervised token), `perplexity`, `token_accuracy`, and means of the scores of
        generated answers. A multi-token prediction layer has `mtp_loss`, `mtp_accuracy` and `mtp_acceptance`.
        """
        tokens = counts @ self.tokens
        loss = counts @ self.loss / tokens
        metrics = {"loss": loss, "perplexity": np.exp(loss), "token_accuracy": counts @ self.correct / tokens}
        metrics |= {name: counts @ fractions / counts.sum(axis=1) for name, fractions in self.answers.items()}
        if self.drafts is not None:
            loss, tokens, correct, accepted = (counts @ self.drafts).T
            predicted = np.maximum(tokens, 1)
            fractions = {"mtp_accuracy": correct / predicted, "mtp_acceptance": accepted / predicted}
            metrics |= {"mtp_loss": loss / predicted, **fractions}
        return metrics

    def part(self, documents: slice) -> Self:
        """Scores of a slice of the documents."""
        answers = {name: fractions[documents] for name, fractions in self.answers.items()}
        drafts = None if self.drafts is None else self.drafts[documents]
        return type(self)(self.loss[documents], self.tokens[documents], self.correct[documents], answers, drafts)


def score_documents(
    model: PreTrainedModel, documents: Sequence[Document], *, batch_tokens: int, drafter: Drafter | None = None
) -> Scores:
    """Score documents in padded batches of at most `batch_tokens` tokens; a longer document is a batch by itself. With
    a `drafter`, the predictions of its layer are scored too.
    """
    sums, drafts = np.zeros((3, len(documents))), np.zeros((len(documents), 4))
    lengths = [len(document.ids) for document in documents]
    for numbers in length_batches(lengths, batch_tokens):
        longest = max(lengths[number] for number in numbers)
        ids, attended, labels = (np.full((len(numbers), longest), fill) for fill in (0, 0, IGNORE_INDEX))
        for row, number in enumerate(numbers):
            document, end = documents[number], lengths[number]
            ids[row, :end], attended[row, :end] = document.ids, 1
            labels[row, : end - 1] = np.where(document.mask[1:], document.ids[1:], IGNORE_INDEX)
        inputs, mask, targets = (torch.from_numpy(part).to(model.device) for part in (ids, attended, labels))
        with torch.no_grad(), last_hidden_states(model) as hidden:
            logits = model(input_ids=inputs, attention_mask=mask, use_cache=False).logits
            if drafter is not None:
                drafts[numbers] = drafter.score(hidden[0], inputs, targets, chosen=logits.argmax(-1))
        for row, number in enumerate(numbers):
            sums[:, number] = _row_sums(logits[row], targets[row])
    return Scores(sums[0], sums[1], sums[2], drafts=None if drafter is None else drafts)


def generate_answers(
    model: PreTrainedModel,
    documents: Sequence[Document],
    limits: SamplingLimits,
    *,
    batch_tokens: int,
    samples: int = 0,
) -> list[list[list[int]]]:
    """Generate answers to each prompt: the greedy answer, or `samples` answers sampled at temperature 1 from torch's
    generator. Returns their token ids without the stop token. Prompts are padded on the left.
    """
    answers: list[list[list[int]]] = [[] for _ in documents]
    draws = {"do_sample": True, "num_return_sequences": samples, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    lengths, rows = [len(document.prompt) for document in documents], max(samples, 1)
    for numbers in length_batches([length + limits.max_new_tokens for length in lengths], batch_tokens // rows):
        prompts = [torch.tensor(documents[number].prompt, dtype=torch.int64) for number in numbers]
        inputs, mask = (
            pad_sequence(tensors, batch_first=True, padding_side="left").to(model.device)
            for tensors in (prompts, [torch.ones_like(prompt) for prompt in prompts])
        )
        with torch.no_grad():
            out = model.generate(  # type: ignore[operator]
                inputs,
                attention_mask=mask,
                **(draws if samples else {"do_sample": False}),
                max_new_tokens=limits.max_new_tokens,
                eos_token_id=list(limits.stop_ids),
                pad_token_id=limits.stop_ids[0],
            )
        for at, row in enumerate(out[:, inputs.shape[1] :].tolist()):
            end = next((index for index, token in enumerate(row) if token in limits.stop_ids), len(row))
            answers[numbers[at // rows]].append(row[:end])
    return answers


def length_batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield batches of sequence indices, longest sequences first, so that lengths in a batch are similar. Padded, a
    batch has at most `batch_tokens` tokens. A sequence longer than `batch_tokens` is a batch by itself.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > batch_tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
