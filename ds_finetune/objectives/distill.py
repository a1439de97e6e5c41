"""Distillation: the divergence from a teacher's distribution of the next token, mixed with the loss of the labels."""

from collections.abc import Mapping

from ds_finetune.config.objectives import DistillObjective
from ds_finetune.objectives.objective import Objective, Term


class Distillation(Objective):
    """Mean over supervised tokens of label_weight x cross entropy + (1 - label_weight) x T^2 x KL(teacher || model)."""

    name = "distill"
    head = "tokens"
    terms = (Term("supervised_tokens"),)
    sum_names = ("loss", "divergence", "label_loss", "correct", "tokens_of_teacher")

    def __init__(self, section: DistillObjective) -> None:
        self.section = section
        # Stored log-probabilities are found by the numbers of the documents.
        self.documents_per_unit = 1 if section.scores is not None else 0

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The loss, the divergence and the cross entropy of the labels in nats per supervised token, and the share of
        tokens that are predicted right.

        Rows without a teacher's distribution, which are held-out rows beside stored log-probabilities, have no
        divergence: their loss is the cross entropy of the labels.
        """
        tokens = max(counts["supervised_tokens"], 1)
        found = {name: sums[name] / tokens for name in ("loss", "divergence", "label_loss")}
        if not sums["tokens_of_teacher"]:
            del found["divergence"]
        return found | {"accuracy": sums["correct"] / tokens}
