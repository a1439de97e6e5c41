"""State groups made of plain tensors."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch

from ds_finetune.engine.state.state import Slice, StateGroup


def reading(held: Mapping[Slice, torch.Tensor]) -> StateGroup:
    """A group of slices with their elements."""
    by_key = {part.key: values for part, values in held.items()}
    return StateGroup(tuple(held), lambda write: nullcontext(by_key.__getitem__))


def group_of(tensors: Mapping[str, tuple[torch.Tensor, tuple[int, ...], int]]) -> StateGroup:
    """A group of flat pieces: key to (elements, global shape, first element)."""
    return reading(
        {
            Slice(key, shape, start, values.numel(), values.dtype): values
            for key, (values, shape, start) in tensors.items()
        }
    )
