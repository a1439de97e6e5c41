"""Predictions of the multi-token prediction layer of a folder, for a model of plain transformers, which has none."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from transformers import PreTrainedModel

from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of
from ds_finetune.model.build.hub_folder import HubFolder
from ds_finetune.model.mtp.layer import PREDICTION_LAYERS, add_mtp_modules, more_layers, mtp_layer_inputs, run_mtp_layer
from ds_finetune.model.weights.names import hub_pieces
from ds_finetune.objectives.labels import IGNORE_INDEX


class Drafter:
    """A multi-token prediction layer with the model that it drafts for."""

    def __init__(self, model: PreTrainedModel, layer: Any, embedding: torch.Tensor, head: torch.Tensor) -> None:  # noqa: ANN401 - a decoder layer
        self._model, self._layer, self._embedding, self._head = model, layer, embedding, head

    def score(
        self, hidden: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor, *, chosen: torch.Tensor
    ) -> NDArray[np.float64]:
        """Loss (nats) and number of the predictions of each row, how many are right, and how many the model accepts
        because they are what it chooses itself, [rows, 4].

        `hidden` [rows, tokens, width] are states after the final norm. `ids` and `labels` [rows, tokens] are those of
        one document a row, padded on the right; the label of a token is the next one, or IGNORE_INDEX. `chosen` [rows,
        tokens] are the next tokens that the model finds most likely.
        """
        embedded = functional.embedding(ids[:, 1:], self._embedding)
        joined = mtp_layer_inputs(self._layer, embedded, hidden[:, :-1])
        positions = torch.arange(joined.shape[1], device=joined.device)[None]
        # Padding is behind a document, where causal attention does not see it.
        states = run_mtp_layer(self._model, self._layer, joined, positions)
        logits = functional.linear(states, self._head)
        return np.array([_row_sums(*row) for row in zip(logits, labels[:, 1:], chosen[:, 1:], strict=True)])


def _row_sums(logits: torch.Tensor, labels: torch.Tensor, chosen: torch.Tensor) -> tuple[float, int, int, int]:
    is_supervised = labels != IGNORE_INDEX
    scores, targets = logits[is_supervised].float(), labels[is_supervised]
    loss, drafts = functional.cross_entropy(scores, targets, reduction="sum").item(), scores.argmax(-1)
    return loss, len(targets), int((drafts == targets).sum()), int((drafts == chosen[is_supervised]).sum())


def load_drafter(folder: Path, model: PreTrainedModel) -> Drafter | None:
    """The layer of `folder` for its `model`, as a server uses it: with embedding and head of its own where they differ
    from the model's. None where the folder has none, or another number than one.
    """
    family, tree = (
        family_of(model.config.model_type),
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
    )
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
    """The layer's own tensor where there is one that differs from the model's `weight`."""
    if copy not in hub.shapes or hub.is_same(copy, original):
        return weight
    return hub.whole(copy).to(weight)


def _load_layer(hub: HubFolder, model: PreTrainedModel, family: Family, prefix: str) -> torch.nn.Module:
    own_layers: Any = model.base_model.layers
    with more_layers(model.config, 1):
        layer: torch.nn.Module = type(own_layers[-1])(model.config, len(own_layers))
    add_mtp_modules(layer, model.config)
    layer = layer.to(dtype=model.dtype).eval()
    with torch.no_grad():
        for name, tensor in layer.state_dict().items():
            for piece in hub_pieces(prefix + name, tuple(tensor.shape), family):
                tensor[piece.index] = hub.whole(piece.key)
        for name, buffer in list(layer.named_buffers()):
            if name.rpartition(".")[2] in family.fp32_buffers:
                owner = layer.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], hub.whole(prefix + name).float().to(buffer.device))
    return layer.to(model.device)


@contextmanager
def last_hidden_states(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Collects the states after the final norm of each forward inside, [rows, tokens, width]."""
    kept: list[torch.Tensor] = []
    handle = model.base_model.register_forward_hook(lambda _, __, out: kept.append(out.last_hidden_state))
    try:
        yield kept
    finally:
        handle.remove()
