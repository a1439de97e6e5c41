"""pass@k: the probability that at least one of k sampled answers is right."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pass_at(k: int, *, samples: int, right: int) -> float:
    """Unbiased estimate of the probability that one of k answers is right, if `right` of `samples` answers are: 1 -
    C(samples - right, k) / C(samples, k) (Chen et al., arXiv 2107.03374, equation 1).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def pass_shares(right: Sequence[int], *, samples: int) -> dict[str, NDArray[np.float64]]:
    """Metrics `sampled_pass_at_1` and `pass_at_K` for each prompt, [prompts] each, from its number of right answers. K
    is each power of two up to `samples`, and `samples` itself.
    """
    ks = {1, samples} | {2**power for power in range(samples.bit_length())}
    return {
        f"pass_at_{k}" if k > 1 else "sampled_pass_at_1": np.array(
            [pass_at(k, samples=samples, right=each) for each in right]
        )
        for k in sorted(ks)
    }
