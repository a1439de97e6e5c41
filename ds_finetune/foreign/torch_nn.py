"""torch.nn: how modules are constructed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ds_finetune.foreign.guard import Foreign, replaced

_LINEAR = Foreign("torch", "nn/modules/linear.py")


@contextmanager
def linears_without_memory() -> Iterator[None]:
    """While this is open linear modules are made on the meta device.

    A model whose linear modules are quantised one by one is then never on the device in full width, while its other
    modules are made where `torch.device` says.
    """
    constructor = nn.Linear.__init__
    _LINEAR.parameters(constructor, "in_features", "out_features", "bias", "device", "dtype")

    def init(self: nn.Linear, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - torch's own
        constructor(self, *args, **kwargs | {"device": "meta"})

    with replaced(nn.Linear, "__init__", init):
        yield
