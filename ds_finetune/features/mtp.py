"""Multi-token prediction as a feature: its loss, computed by the layer that `model/mtp/layer.py` builds."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Self

import torch
from transformers import PretrainedConfig, PreTrainedModel

from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.model.attention.by_document import Documents, mask_context
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.model.build.skeleton import head_of
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.model.mtp.layer import is_mtp_tensor, mtp_layer_inputs, mtp_layers, run_mtp_layer
from ds_finetune.model.mtp.mtp_plan import MtpPlan
from ds_finetune.model.parallel.pipeline import MissingLayer, ReceiveHiddenStates
from ds_finetune.objectives.labels import IGNORE_INDEX
from ds_finetune.objectives.objective import LossAndSums, Term
from ds_finetune.plan.plan import Plan

DocumentArguments = Callable[[tuple[Documents, ...] | None, torch.device], dict[str, Any]]
"""What tells attention where documents begin, from the lengths of the documents of each row."""


class MtpLoss(ExtraLoss):
    """The cross entropy of the token after the next, at each position where both are in the document and the second is
    supervised; with `detach` its gradient reaches only the layer.

    Its sum is divided by the number of supervised tokens, as in DeepSeek-V3's report (arXiv 2412.19437, eq. 24), not
    by its own smaller number: a document of n supervised tokens has n - 1 such predictions, or n where a prompt comes
    first.
    """

    name = "mtp"
    sum_names = ("mtp_loss", "mtp_correct", "mtp_tokens")

    def __init__(self, lm: PreTrainedModel, arguments: DocumentArguments, *, weight: float, detach: bool) -> None:
        self.terms = (Term("supervised_tokens", weight),)
        self.trains_embedding = not detach
        self._lm, self._arguments, self._detach = lm, arguments, detach

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Mean loss in nats over its own predictions, and the share of them that are the text's tokens.

        A server accepts those that are the model's own choice, which are others where the model differs from the text.
        """
        tokens = max(sums["mtp_tokens"], 1)
        return {"mtp_loss": sums["mtp_loss"] / tokens, "mtp_accuracy": sums["mtp_correct"] / tokens}

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


class MtpFeature(Feature):
    """Trains the prediction layer that the model is published with."""

    name = "mtp"

    def __init__(self, plan: MtpPlan, hf_config: PretrainedConfig) -> None:
        self._plan, self._hf_config = plan, hf_config
        self.own_loss = MtpLoss.name if plan.detach else ""

    @classmethod
    def of(cls, model: ModelPlan, plan: Plan) -> Self | None:
        """With `mtp.train`."""
        return None if model.mtp is None else cls(model.mtp, model.hf_config)

    def lines(self) -> list[tuple[str, str]]:
        """Which layer is trained, and what its loss trains."""
        return self._plan.lines(self._hf_config)

    def owns(self, name: str) -> bool:
        """With `mtp.detach`, the layer's parameters."""
        return bool(self.own_loss) and is_mtp_tensor(name, self._hf_config)

    def extra_loss(self, trained: TrainedModel, parts: RankParts) -> ExtraLoss:
        """The loss of the token after the next."""
        plan = self._plan
        return MtpLoss(trained.lm, trained.document_arguments, weight=plan.weight, detach=plan.detach)
