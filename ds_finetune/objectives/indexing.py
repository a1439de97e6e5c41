"""The loss of indexers of DeepSeek sparse attention (DeepSeek-V3.2's report, section 2.1)."""

from collections.abc import Mapping

from ds_finetune.objectives.extra import Extra
from ds_finetune.objectives.objective import Term


class Indexing(Extra):
    """The divergence D_KL(p || softmax(I)) of a query, summed over indexers, as a mean over all tokens.

    I are an indexer's scores of the tokens that the query may attend to. p are the weights that attention gives them,
    summed over heads and divided by their sum; they get no gradient. An indexer whose choice several layers share gets
    the mean over those layers (arXiv 2603.12201).
    """

    name = "indexer"
    sum_names = ("indexer",)

    def __init__(self, weight: float, *, indexers: int) -> None:
        self.terms = (Term("tokens", weight),)
        self._indexers = indexers

    def metrics(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """`indexer_loss`: the mean over tokens and indexers in nats, without the weight."""
        return {"indexer_loss": sums["indexer"] / max(counts["tokens"], 1) / self._indexers}
