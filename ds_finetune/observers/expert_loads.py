"""Numbers that say how evenly the tokens of a step were spread over experts.

`counts` int64 [layers, experts] are the tokens that were sent to each expert. Without any token every number is 0.
"""

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]
Layers = NDArray[np.float64]


def max_violations(counts: Counts) -> Layers:
    """MaxVio of each layer (Wang et al., arXiv 2408.15664, eq. 4): load of the busiest expert over the mean load, less
    1; fp64 [layers].
    """
    mean = counts.mean(axis=1)
    return np.divide(counts.max(axis=1) - mean, mean, out=np.zeros_like(mean), where=mean > 0)


def effective_experts(counts: Counts) -> Layers:
    """How many experts with equal loads have the entropy of each layer's load; fp64 [layers]."""
    total = counts.sum(axis=1, keepdims=True)
    share = counts / np.maximum(total, 1)
    nats = -(share * np.log(np.where(counts > 0, share, 1.0))).sum(axis=1)
    return np.where(total[:, 0] > 0, np.exp(nats), 0.0)


def num_dead_experts(counts: Counts) -> int:
    """Experts without a token, in all layers together."""
    return int((counts[counts.any(axis=1)] == 0).sum())


def busiest_rank_ratio(counts: Counts, ep: int) -> float:
    """Load of the busiest of `ep` expert parallel ranks over the mean rank's, as a mean over layers.

    Rank i holds the i-th of equal shards of each layer's experts. All ranks wait for the busiest one in each layer, so
    the ratio is that of the time of experts to the time with even loads.
    """
    of_ranks = counts.reshape(len(counts), ep, -1).sum(axis=2)
    return float((max_violations(of_ranks) + of_ranks.any(axis=1)).mean())
