"""How far two ways to compute the same sums may differ: what a limit is made of instead of what one CPU printed."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig


def rounding(magnitude: float, additions: int, dtype: torch.dtype = torch.float32) -> float:
    """Limit of the difference between two sums of the same numbers, taken in other orders.

    Args:
        magnitude: Sum of the absolute values, or the largest result where nothing cancels.
        additions: How many numbers are added, over all sums that lie one behind the other.
        dtype: What partial sums are rounded to.

    Each addition rounds by at most half an eps of a partial sum, which is at most `magnitude`. The roundings of a sum
    are independent, so that they grow with the root of their number; the limit is four times that.
    """
    return 4 * additions**0.5 * torch.finfo(dtype).eps / 2 * magnitude


def rounding_of_outputs(config: PreTrainedConfig, wanted: torch.Tensor, *, tokens: int) -> float:
    """Limit for fp32 outputs of a model: in every layer they pass about eight products with weights, each a sum over
    columns, and a sum over the tokens of the document.
    """
    additions = config.num_hidden_layers * (8 * config.hidden_size + tokens)
    return rounding(float(wanted.detach().abs().max()), additions)


def differing_gradients(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, additions: int
) -> dict[str, float]:
    """Names whose gradients differ by more than rounding, with the difference relative to the norm.

    A gradient whose terms cancel keeps the rounding of what cancels, which an eps of the norm of all gradients bounds.
    """
    assert found.keys() == wanted.keys()
    floor = torch.finfo(torch.float32).eps * float(torch.nn.utils.get_total_norm(list(wanted.values())))
    norms = {name: (float((found[name] - each).norm()), float(each.norm())) for name, each in wanted.items()}
    return {
        name: apart / max(norm, floor)
        for name, (apart, norm) in norms.items()
        if apart > rounding(norm, additions) + floor
    }
