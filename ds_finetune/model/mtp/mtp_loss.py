"""The loss of multi-token prediction, computed by the layer that `model/mtp/layer.py` builds."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from ds_finetune.model.attention.by_document import Documents, mask_context
from ds_finetune.model.build.skeleton import head_of
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.mtp.layer import mtp_layer_inputs, mtp_layers, run_mtp_layer
from ds_finetune.model.parallel.pipeline import MissingLayer, ReceiveHiddenStates
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.multi_token import MultiTokenPrediction
from ds_finetune.objectives.objective import LossAndSums

DocumentArguments = Callable[[tuple[Documents, ...] | None, torch.device], dict[str, Any]]
"""What tells attention where documents begin, from the lengths of the documents of each row."""


class MtpLoss(ExtraLoss):
    """Predicts the token after the next; with `detach` its gradient reaches the layer alone."""

    def __init__(
        self, extra: MultiTokenPrediction, lm: PreTrainedModel, arguments: DocumentArguments, *, detach: bool
    ) -> None:
        super().__init__(extra, trains_embedding=not detach)
        self._lm, self._arguments, self._detach = lm, arguments, detach

    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums | None:
        """The contribution of a forward; `hidden` [rows, tokens, width] are states after the final norm."""
        (number,) = mtp_layers(self._lm.config)
        layer = self._lm.base_model.layers[number]
        if isinstance(layer, MissingLayer):
            return None
        assert rows.next_ids is not None, "the batch does not look ahead; set looks_ahead in its BatchPlan"
        assert rows.next_labels is not None
        with torch.no_grad() if self._detach else nullcontext():
            embedded = self._embed(rows.next_ids)
        joined = mtp_layer_inputs(layer, embedded, hidden.detach() if self._detach else hidden)
        arguments = self._arguments(rows.documents, joined.device)
        with mask_context(self._lm):
            states = run_mtp_layer(self._lm, layer, joined, rows.position_ids, **arguments)
        found = {"supervised": rows.next_supervised, "is_trained": not self._detach}
        out: LossAndSums = head_of(self._lm)(states, rows.next_labels, **found)
        number_of = (rows.next_labels != IGNORE_INDEX).sum(dtype=torch.float64)[None]
        return LossAndSums(out.loss * weights[0].to(out.loss.dtype), torch.cat([out.sums, number_of]))

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedding = self._lm.get_input_embeddings()
        if isinstance(embedding, ReceiveHiddenStates):
            return embedding.embed(input_ids)
        embedded: torch.Tensor = embedding(input_ids)
        return embedded
