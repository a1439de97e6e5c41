"""Multi-token prediction in the plain loop, with transformers' own module and one document at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ds_finetune.config.sections import MtpConfig
from ds_finetune.families.table import family_of
from ds_finetune.model.mtp.layer import set_mtp_layers
from ds_finetune.model.weights.names import hub_pieces
from ds_finetune.objectives.labels import IGNORE_INDEX


def add_layer(model: PreTrainedModel) -> nn.Module:
    """Add a multi-token prediction layer to `model` under its published names; its weights are unset.

    Returns transformers' module of it, which computes with these weights. The model's own forward does not run it.
    """
    config: Any = model.config
    # transformers 5.23 has these keys only for some model types.
    config.num_mtp_layers = 1
    for key in ("layer_types", "mlp_layer_types"):
        if getattr(config, key, None):
            setattr(config, f"mtp_{key}", getattr(config, key)[-1:])
    # It reads the kinds of indexers of the first layer, which has one.
    layer: Any = MtpModel(model, 1).layers[0]
    block = layer.mtp_block
    # Layers of glm_moe_dsa return their chosen tokens too, which the module would pass on.
    block.register_forward_hook(lambda _, __, out: out[0] if isinstance(out, tuple) else out)
    block.enorm, block.hnorm, block.eh_proj = layer.enorm, layer.hnorm, layer.eh_proj
    block.shared_head = nn.Module()
    block.shared_head.norm = layer.post_norm
    model.get_decoder().layers.append(block)
    return layer  # type: ignore[no-any-return]


def add_random_layer(model: PreTrainedModel) -> None:
    """Add such a layer with random weights, for a tiny model."""
    add_layer(model)
    block = model.get_decoder().layers[-1]
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        nn.init.normal_(tensor, mean=float("norm" in name), std=0.1)


class PlainMtp:
    """The multi-token prediction layer of a transformers model, with the weights of the model's folder.

    Each forward of the model has one unpadded document.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, section: MtpConfig) -> None:
        self._model: Any = model
        self._section, self._sum, self._tokens = section, 0.0, 0
        self._layer = add_layer(model)
        self.prefix = f"model.layers.{model.config.num_hidden_layers}."
        self._load(folder)
        # Adapters of the layer are planned and named as those of the others.
        set_mtp_layers(model.config, 1)
        model.get_decoder().register_forward_hook(self._keep)

    def _load(self, folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        family, block = family_of(self._model.config.model_type), self._model.get_submodule(self.prefix[:-1])
        with torch.no_grad():
            for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
                for piece in hub_pieces(self.prefix + name, tuple(tensor.shape), family):
                    tensor[piece.index] = stored[piece.key]

    def parameters_apart(self) -> Iterator[nn.Parameter]:
        """The parameters that only this loss trains and whose gradients are clipped by their own norm."""
        if self._section.detach:
            yield from self._model.get_submodule(self.prefix[:-1]).parameters()

    def loss(self, ids: np.ndarray, labels: np.ndarray) -> torch.Tensor:
        """The weighted loss of the document of the model's latest forward, summed over its tokens (scalar).

        It is the cross entropy of the token after the next (DeepSeek-V3, arXiv 2412.19437, eq. 24).
        """
        logits = self.logits(torch.from_numpy(ids).long())
        wanted = torch.from_numpy(labels).long()[1:]
        out = functional.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
        self._sum, self._tokens = self._sum + out.item(), self._tokens + int((wanted != IGNORE_INDEX).sum())
        return self._section.weight * out

    def take_loss(self) -> float:
        """The mean loss in nats over all predictions since the last call, without the weight."""
        mean, self._sum, self._tokens = self._sum / self._tokens, 0.0, 0
        return mean

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens after the next, [tokens - 1, vocabulary], of the model's latest forward, of `ids`."""
        head = self._model.lm_head.weight
        return functional.linear(self.states(ids), head.detach() if self._section.detach else head)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """States of the layer before the head, [tokens - 1, width], of the model's latest forward, of `ids`."""
        embedded, hidden = self._model.get_input_embeddings()(ids[None, 1:]), self._hidden[:, :-1]
        if self._section.detach:
            embedded, hidden = embedded.detach(), hidden.detach()
        positions = torch.arange(len(ids) - 1)[None]
        # An indexer reads the mask.
        mask = torch.ones(len(ids) - 1, len(ids) - 1, dtype=torch.bool).tril()[None, None]
        out: torch.Tensor = self._layer(
            inputs_embeds=embedded,
            previous_hidden_state=hidden,
            position_embeddings=self._model.get_decoder().rotary_emb(embedded, positions),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=None,
        )
        return out[0]

    def _keep(self, _: nn.Module, __: object, output: Any) -> None:  # noqa: ANN401 - of transformers
        self._hidden: torch.Tensor = output.last_hidden_state
