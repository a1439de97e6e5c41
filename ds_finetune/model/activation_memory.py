"""Less memory for activations: the inputs of recomputed layers in host memory, and MLPs that take some tokens at
a time.

With recomputation the inputs of layers, [rows, tokens, width] for each layer, are all that a forward keeps of its
layers. They leave the device in forward and come back in backward. Weights and all other tensors stay where they are.
Copies have the same bits, so results do not change.

MLPs take the tokens of a forward tile by tile, so that what lies between their matrices is never held for all. Forward
keeps only the inputs. Backward computes each tile again, and sums its gradients of the weights in fp32. All tiles use
the weights of one gather under ZeRO-3. Tokens do not depend on each other within an MLP, nor do the rows of routed
experts, so outputs are the same but for the order in which kernels add up.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_finetune.families.table import family_of
from ds_finetune.model.kept_outputs import selective_contexts
from ds_finetune.model.parallel.expert import ExpertParallelExperts


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

    def __init__(self, transfer: PlainTransfer, recompute: Callable[..., Any], *, layers: int) -> None:
        self._transfer, self._recompute, self._last = transfer, recompute, layers - 1
        # Autograd owns what is stored, so that it is freed with the graph of its forward.
        self._latest: weakref.ref[_StoredInput] | None = None

    def checkpoint(self, layer: int, forward: Callable[..., Any], hidden: torch.Tensor, *others: Any) -> Any:  # noqa: ANN401
        """`forward(hidden, *others)`, recomputed in backward; torch's `checkpoint` for layer number `layer`."""
        with saved_tensors_hooks(partial(self._store, layer, hidden), self._fetch):
            return self._recompute(forward, hidden, *others)

    def _store(self, layer: int, hidden: torch.Tensor, saved: torch.Tensor) -> "torch.Tensor | _StoredInput":
        """What autograd keeps in place of `saved`, a tensor argument of the layer; `hidden` is the layer's input."""
        if saved.data_ptr() != hidden.data_ptr() or saved.shape != hidden.shape:
            return saved
        is_on_host, given = layer != self._last, saved.detach()
        kept = self._transfer.to_host(given) if is_on_host else given
        stored = _StoredInput(kept, self._latest if layer else None, is_on_host=is_on_host)
        self._latest = weakref.ref(stored)
        return stored

    def _fetch(self, stored: "torch.Tensor | _StoredInput") -> torch.Tensor:
        if isinstance(stored, torch.Tensor):
            return stored
        arrival = self._arrival_of(stored)
        arrival.wait()
        stored.arrival = None
        before = stored.previous() if stored.previous is not None else None
        if before is not None:
            before.arrival = self._arrival_of(before)
        return arrival.tensor

    def _arrival_of(self, stored: _StoredInput) -> Arrival:
        if not stored.is_on_host:
            return Arrival(stored.tensor, lambda: None)
        return stored.arrival or self._transfer.to_device(stored.tensor)


def recompute_layers(lm: PreTrainedModel, *, is_selective: bool) -> None:
    """Compute the layers of `lm` again in backward, in place; `is_selective` keeps some outputs (kept_outputs.py).

    Without dropout nothing in a layer is random, and the state of the random numbers is not kept: torch would read it
    from the device for each layer, and the host would wait.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": is_random(lm.config)}
    lm.gradient_checkpointing_enable(options | ({"context_fn": selective_contexts} if is_selective else {}))
    # transformers gives outputs of frozen embeddings a gradient, for which layers before the first adapter would be
    # computed again; only reentrant checkpoints need it.
    lm.disable_input_require_grads()


def is_random(hf_config: PretrainedConfig) -> bool:
    """Whether layers of a model draw random numbers in training: dropout of any kind, or noise in routers."""
    values = {key: value for key, value in hf_config.to_dict().items() if "drop" in key or "jitter" in key}
    return family_of(hf_config.model_type).is_generic or any(values.values())


def offload_layer_inputs(lm: PreTrainedModel, transfer: PlainTransfer) -> LayerInputOffload:
    """Keep the inputs of the layers of `lm` on the host; recomputation must have been turned on, for all alike."""
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers
    assert all(layer.gradient_checkpointing for layer in layers)
    offload = LayerInputOffload(transfer, layers[0]._gradient_checkpointing_func, layers=len(layers))
    for number, layer in enumerate(layers):
        layer._gradient_checkpointing_func = partial(offload.checkpoint, number)
    return offload


_MLP, _EXPERTS = ".mlp", ".experts"
_SHARED = (".shared_experts", ".shared_expert")


class _TokensInTiles(torch.autograd.Function):
    """`forward(*tensors)` over parts of the first dimension of all tensors, which its result has too."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        forward: Callable[..., torch.Tensor],
        tiles: int,
        num_tensors: int,
        *tensors_and_weights: torch.Tensor,
    ) -> torch.Tensor:
        tensors = tensors_and_weights[:num_tensors]
        ctx.forward, ctx.tiles = forward, tiles
        # Under ZeRO-3 a weight has other contents when backward has gathered it: autograd must not compare versions.
        ctx.weights = tensors_and_weights[num_tensors:]
        ctx.save_for_backward(*tensors)
        out: torch.Tensor | None = None
        begin = 0
        for part in _tiles(tensors, tiles):
            done = forward(*part)
            out = tensors[0].new_empty(len(tensors[0]), *done.shape[1:], dtype=done.dtype) if out is None else out
            out[begin : begin + len(done)] = done
            begin += len(done)
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[3:]
        d_tensors = [torch.empty_like(tensor) if need else None for tensor, need in zip(tensors, needs, strict=False)]
        trained = [weight for weight, need in zip(ctx.weights, needs[len(tensors) :], strict=True) if need]
        sums = [torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for weight in trained]
        begin = 0
        for *part, d_part in _tiles((*tensors, d_out), ctx.tiles):
            inputs = [t.detach().requires_grad_(d is not None) for t, d in zip(part, d_tensors, strict=True)]
            with torch.enable_grad():
                out = ctx.forward(*inputs)
            wanted = [tensor for tensor in inputs if tensor.requires_grad]
            grads = torch.autograd.grad(out, [*wanted, *trained], d_part)
            for total, grad in zip((d for d in d_tensors if d is not None), grads, strict=False):
                total[begin : begin + len(d_part)] = grad
            for total, grad in zip(sums, grads[len(wanted) :], strict=True):
                total += grad
            begin += len(d_part)
        rounded = iter(total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True))
        d_weights = [next(rounded) if need else None for need in needs[len(tensors) :]]
        return None, None, None, *d_tensors, *d_weights


def _tiles(tensors: Sequence[torch.Tensor], tiles: int) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.tensor_split(tiles) for tensor in tensors), strict=True)


def _run_in_tiles(module: nn.Module, tiles: int, *tensors: torch.Tensor) -> torch.Tensor:
    """The forward of an MLP [..., width] or of routed experts, whose tensors have a row for each token.

    Without gradients nothing within it is kept, and all tokens are computed at once.
    """
    forward = partial(type(module).forward, module)
    if not torch.is_grad_enabled():
        return forward(*tensors)
    rows = [tensor.flatten(0, -2) for tensor in tensors]
    # Expert parallel ranks communicate in each tile, and those with few tokens have empty ones.
    number = tiles if isinstance(module, ExpertParallelExperts) else min(tiles, len(rows[0]))
    out: torch.Tensor = _TokensInTiles.apply(forward, number, len(rows), *rows, *module.parameters())
    return out.view(*tensors[0].shape[:-1], out.shape[-1])


def tiled_modules(lm: PreTrainedModel) -> list[nn.Module]:
    """Dense MLPs, shared experts and routed experts of all layers."""
    found = []
    for name, module in lm.named_modules():
        is_dense = name.endswith(_MLP) and not hasattr(module, "experts")
        if is_dense or (_MLP in name and name.endswith((_EXPERTS, *_SHARED))):
            found.append(module)
    return found


def install_tiled_mlps(lm: PreTrainedModel, *, tiles: int) -> list[nn.Module]:
    """Let the MLPs of `lm` take tokens in this number of tiles, in place; returns them.

    The number is the same on all ranks, since tensor and expert parallel ranks communicate in each tile.
    """
    modules = tiled_modules(lm)
    for module in modules:
        module.forward = partial(_run_in_tiles, module, tiles)
    return modules
