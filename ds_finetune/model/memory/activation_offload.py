"""The inputs of recomputed layers in host memory: they leave the device in forward and come back in backward.

With recomputation these inputs, [rows, tokens, width] for each layer, are all that a forward keeps of its layers.
Weights and all other tensors stay where they are. Copies have the same bits, so results do not change.
"""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


class Arrival(NamedTuple):
    """A tensor on its way to the device; `wait` makes the work that follows wait for it."""

    tensor: torch.Tensor
    wait: Callable[[], object]


class PlainTransfer:
    """Copies between a device and host memory; here at once, in the same memory, as a CPU does in tests."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin a copy of `tensor`; its memory may be used again by what the device does after the copy."""
        return tensor.clone()

    def to_device(self, host: torch.Tensor) -> Arrival:
        """Begin the copy back."""
        return Arrival(host.clone(), lambda: None)


class CudaTransfer(PlainTransfer):
    """Copies on a stream of their own, from and to pinned memory, which torch keeps for the next step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin a copy of `tensor` after the work that computes it."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        with self._after_the_others():
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)
        return host

    def to_device(self, host: torch.Tensor) -> Arrival:
        """Begin the copy back."""
        tensor = torch.empty_like(host, device=self._device, pin_memory=False)
        with self._after_the_others():
            tensor.copy_(host, non_blocking=True)
            arrived = self._stream.record_event()
        tensor.record_stream(self._stream)
        # Backward has threads of its own, so the stream is that of whoever waits.
        return Arrival(tensor, lambda: torch.cuda.current_stream(self._device).wait_event(arrived))

    def _after_the_others(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


class _StoredInput:
    """The input of one layer in one forward: in host memory, or on the device where backward needs it first."""

    def __init__(self, tensor: torch.Tensor, previous: "weakref.ref[_StoredInput] | None", *, is_on_host: bool) -> None:
        self.tensor, self.previous, self.is_on_host = tensor, previous, is_on_host
        self.arrival: Arrival | None = None


class LayerInputOffload:
    """Recomputes layers with their inputs kept on the host, but that of the last one, which backward needs first.

    While backward computes a layer, the input of the layer before is on its way.
    """

    def __init__(self, transfer: PlainTransfer, *, layers: int) -> None:
        self._transfer, self._last = transfer, layers - 1
        # Autograd owns what is stored, so that it is freed with the graph of its forward.
        self._latest: weakref.ref[_StoredInput] | None = None
        self.num_stored = self.num_fetched = 0
        """Inputs that were copied to the host and back, since the start."""

    def checkpoint(self, layer: int, forward: Callable[..., Any], hidden: torch.Tensor, *others: Any) -> Any:  # noqa: ANN401
        """`forward(hidden, *others)`, recomputed in backward; the `checkpoint` of torch for layer number `layer`."""
        with saved_tensors_hooks(partial(self._store, layer, hidden), self._fetch):
            return checkpoint(forward, hidden, *others, use_reentrant=False)

    def _store(self, layer: int, hidden: torch.Tensor, saved: torch.Tensor) -> "torch.Tensor | _StoredInput":
        """What autograd keeps in place of `saved`, a tensor argument of the layer; `hidden` is the layer's input."""
        if saved.data_ptr() != hidden.data_ptr() or saved.shape != hidden.shape:
            return saved
        is_on_host, given = layer != self._last, saved.detach()
        kept = self._transfer.to_host(given) if is_on_host else given
        stored = _StoredInput(kept, self._latest if layer else None, is_on_host=is_on_host)
        self._latest = weakref.ref(stored)
        self.num_stored += is_on_host
        return stored

    def _fetch(self, stored: "torch.Tensor | _StoredInput") -> torch.Tensor:
        if isinstance(stored, torch.Tensor):
            return stored
        arrival = self._arrival_of(stored)
        arrival.wait()
        stored.arrival = None
        self.num_fetched += stored.is_on_host
        before = stored.previous() if stored.previous is not None else None
        if before is not None:
            before.arrival = self._arrival_of(before)
        return arrival.tensor

    def _arrival_of(self, stored: _StoredInput) -> Arrival:
        if not stored.is_on_host:
            return Arrival(stored.tensor, lambda: None)
        return stored.arrival or self._transfer.to_device(stored.tensor)


def offload_layer_inputs(lm: PreTrainedModel, transfer: PlainTransfer) -> LayerInputOffload:
    """Keep the inputs of the layers of `lm` on the host; recomputation must have been turned on."""
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers
    assert all(layer.gradient_checkpointing for layer in layers)
    offload = LayerInputOffload(transfer, layers=len(layers))
    for number, layer in enumerate(layers):
        layer._gradient_checkpointing_func = partial(offload.checkpoint, number)
    return offload
