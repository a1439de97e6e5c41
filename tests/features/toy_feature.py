"""A feature of another package: it scales the embedding, and adds the mean square of the last hidden states as a loss."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ds_finetune.features.feature import Feature, RankParts
from ds_finetune.model.adapters.lora import AdapterPlacement
from ds_finetune.model.loss.extra_loss import ExtraLoss
from ds_finetune.model.loss.forward_rows import ForwardRows
from ds_finetune.model.loss.token_loss import TrainedModel
from ds_finetune.objectives.objective import LossAndSums, Term

SETTINGS = {"scale": 1.5, "weight": 0.25}


class ToyLoss(ExtraLoss):
    """The mean over all tokens of the mean square of their hidden states before the head."""

    name = "toy"
    sum_names = ("toy",)

    def __init__(self, weight: float) -> None:
        self.terms = (Term("tokens", weight),)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        return {"toy_loss": sums["toy"] / max(counts["tokens"], 1)}

    def loss(self, rows: ForwardRows, hidden: torch.Tensor, weights: torch.Tensor) -> LossAndSums:
        assert rows.real is not None
        each = hidden.float().square().mean(-1).reshape(-1)
        total = each.masked_fill(~rows.real.is_real, 0.0).sum()
        return LossAndSums(total * weights[0].to(total.dtype), total.detach().double()[None])


class ToyFeature(Feature):
    name = "toy"

    def lines(self) -> list[tuple[str, str]]:
        return [("toy", f"embedding times {self.settings['scale']:g}")]

    def install(self, lm: PreTrainedModel, placement: AdapterPlacement) -> None:
        lm.get_input_embeddings().register_forward_hook(lambda _, __, embedded: embedded * self.settings["scale"])

    def extra_loss(self, trained: TrainedModel, parts: RankParts) -> ExtraLoss:
        return ToyLoss(self.settings["weight"])
