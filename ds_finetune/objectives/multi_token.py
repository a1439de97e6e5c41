"""Multi-token prediction as an auxiliary loss."""

from collections.abc import Mapping

from ds_finetune.objectives.extra import Extra
from ds_finetune.objectives.objective import Term


class MultiTokenPrediction(Extra):
    """The cross entropy of the token after the next, at each position where both are in the document and the second is
    supervised.

    Its sum is divided by the number of supervised tokens, as in DeepSeek-V3's report (arXiv 2412.19437, eq. 24), not
    by its own smaller number: a document of n supervised tokens has n - 1 such predictions, or n where a prompt comes
    first.
    """

    name = "mtp"
    sum_names = ("mtp_loss", "mtp_correct", "mtp_tokens")

    def __init__(self, weight: float) -> None:
        self.terms = (Term("supervised_tokens", weight),)

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Mean loss in nats over its own predictions, and the share of them that are the text's tokens.

        A server accepts those that are the model's own choice, which are others where the model differs from the text.
        """
        tokens = max(sums["mtp_tokens"], 1)
        return {"mtp_loss": sums["mtp_loss"] / tokens, "mtp_accuracy": sums["mtp_correct"] / tokens}
