"""Saves activation memory: inputs of recomputed layers are offloaded to host memory, and MLPs compute tokens in tiles.

Under activation checkpointing a forward saves only each layer's input [rows, tokens, width]. Offloading copies it to
host memory in the forward and back in backward, bit for bit.

A tiled MLP computes one tile of tokens after another, so that intermediate activations exist for one tile only. Its
forward saves the input. Backward recomputes each tile, and sums the tiles' weight gradients in fp32. Under ZeRO-3 the
weights are gathered once for all tiles. Only the order in which kernels sum may change results.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_finetune.families.table import family_of
from ds_finetune.model.kept_outputs import keep_choices, layer_contexts
from ds_finetune.model.parallel.expert import ExpertParallelExperts


def recompute_layers(lm: PreTrainedModel, *, is_selective: bool) -> None:
    """Turn on activation checkpointing for the layers of `lm`, in place. Recomputation uses the experts chosen in the
    forward. With `is_selective`, outputs of some operations are saved instead of recomputed (kept_outputs.py).

    The random state is saved only if layers use random numbers, because reading it makes the host wait for the device.
    """
    drops = is_random(lm.config) or any(getattr(module, "lora_dropout", 0) for module in lm.modules())
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": drops}
    lm.gradient_checkpointing_enable(options | {"context_fn": partial(layer_contexts, is_selective=is_selective)})
    for module in _choosing_modules(lm):
        keep_choices(module)
    # transformers makes outputs of frozen embeddings require a gradient, for reentrant checkpointing. This would make
    # backward recompute the layers before the first adapter.
    lm.disable_input_require_grads()


def _choosing_modules(lm: PreTrainedModel) -> list[nn.Module]:
    router = family_of(lm.config.model_type).router
    if router is not None:
        return [module for name, module in lm.named_modules() if name.endswith(f".{router.module}")]
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    sparse = [layer for layer in layers if any(hasattr(module, "has_gate") for module in layer.modules())]
    return [part for layer in sparse for part in layer.children()]


def is_random(hf_config: PretrainedConfig) -> bool:
    """Whether training uses random numbers in the layers of a model: dropout, or noise in routers."""
    values = {key: value for key, value in hf_config.to_dict().items() if "drop" in key or "jitter" in key}
    return family_of(hf_config.model_type).is_generic or any(values.values())


def offload_layer_inputs(lm: PreTrainedModel) -> None:
    """Offload the inputs of the layers of `lm` to pinned host memory. The last layer's input stays, because backward
    needs it first. All layers must use activation checkpointing.
    """
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers
    assert all(layer.gradient_checkpointing for layer in layers)
    for layer in layers[:-1]:
        layer._gradient_checkpointing_func = partial(_checkpoint_on_host, layer._gradient_checkpointing_func)


def _checkpoint_on_host(
    recompute: Callable[..., Any],
    forward: Callable[..., Any],
    hidden: torch.Tensor,
    *others: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Run a layer under torch's `checkpoint`, with its input `hidden` offloaded by torch's `save_on_cpu`. Copies run in
    the stream of the computation, so that no copy is read before it is complete.
    """
    copies = save_on_cpu(pin_memory=True)
    # Autograd keeps these hooks until backward. With a reference to the layer's input they would keep it in memory.
    host_copy = _identity(hidden)

    def pack(saved: torch.Tensor) -> Any:  # noqa: ANN401
        is_input = _identity(saved) == host_copy
        return copies.pack_hook(saved) if is_input else saved

    def unpack(packed: Any) -> torch.Tensor:  # noqa: ANN401
        return packed if isinstance(packed, torch.Tensor) else copies.unpack_hook(packed)

    with saved_tensors_hooks(pack, unpack):
        return recompute(forward, hidden, *others)


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


_MLP, _EXPERTS = ".mlp", ".experts"
_SHARED = (".shared_experts", ".shared_expert")


class _TokensInTiles(torch.autograd.Function):
    """Computes `forward(*tensors)` in tiles of tokens, the first dimension of all tensors and of the result."""

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
        # `save_for_backward` would report weights as changed in place, because ZeRO-3 gathers them again for backward.
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
            needing_grad = [tensor for tensor in inputs if tensor.requires_grad]
            grads = torch.autograd.grad(out, [*needing_grad, *trained], d_part)
            for total, grad in zip((d for d in d_tensors if d is not None), grads, strict=False):
                total[begin : begin + len(d_part)] = grad
            for total, grad in zip(sums, grads[len(needing_grad) :], strict=True):
                total += grad
            begin += len(d_part)
        rounded = iter(total.to(weight.dtype) for total, weight in zip(sums, trained, strict=True))
        d_weights = [next(rounded) if need else None for need in needs[len(tensors) :]]
        return None, None, None, *d_tensors, *d_weights


def _tiles(tensors: Sequence[torch.Tensor], tiles: int) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(tensor.tensor_split(tiles) for tensor in tensors), strict=True)


def _run_in_tiles(module: nn.Module, tiles: int, *tensors: torch.Tensor) -> torch.Tensor:
    forward = partial(type(module).forward, module)
    if not torch.is_grad_enabled():
        return forward(*tensors)
    rows = [tensor.flatten(0, -2) for tensor in tensors]
    # Expert parallel ranks communicate in each tile, so all need the same number of tiles, even if some are empty.
    number = tiles if isinstance(module, ExpertParallelExperts) else min(tiles, len(rows[0]))
    out: torch.Tensor = _TokensInTiles.apply(forward, number, len(rows), *rows, *module.parameters())
    return out.view(*tensors[0].shape[:-1], out.shape[-1])


def tiled_modules(lm: PreTrainedModel) -> list[nn.Module]:
    """All modules whose tokens can be computed in tiles: dense MLPs, shared experts and routed experts."""
    tiled = []
    for name, module in lm.named_modules():
        is_dense = name.endswith(_MLP) and not hasattr(module, "experts")
        if is_dense or (_MLP in name and name.endswith((_EXPERTS, *_SHARED))):
            tiled.append(module)
    return tiled


def install_tiled_mlps(lm: PreTrainedModel, *, tiles: int) -> list[nn.Module]:
    """Make the MLPs of `lm` compute their tokens in `tiles` tiles, in place. Returns these MLPs.

    `tiles` must be equal on all ranks, because tensor and expert parallel ranks communicate in each tile.
    """
    modules = tiled_modules(lm)
    for module in modules:
        module.forward = partial(_run_in_tiles, module, tiles)
    return modules
