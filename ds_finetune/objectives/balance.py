"""The balance loss of experts (DeepSeek-V2, arXiv 2405.04434, eq. 23-25; DeepSeek-V3, arXiv 2412.19437, eq. 17-20;
Switch Transformer, arXiv 2101.03961, eq. 4-6).
"""

from collections.abc import Mapping

from ds_finetune.objectives.extra import Extra
from ds_finetune.objectives.objective import Term


class Balance(Extra):
    """The sum over layers of `sum_i f_i P_i` of a document, as a mean over documents.

    f_i is the share of its choices that fall on expert i, times the number of experts; P_i is the mean share of expert
    i in its scores. Where all experts are chosen alike it is 1 for each layer.
    """

    name = "balance"
    sum_names = ("balance",)

    def __init__(self, weight: float, *, layers: int) -> None:
        self.terms = (Term("documents", weight),)
        self._layers = layers

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """`balance_loss`: the mean over documents and layers, without the weight."""
        return {"balance_loss": sums["balance"] / max(counts["documents"], 1) / self._layers}
