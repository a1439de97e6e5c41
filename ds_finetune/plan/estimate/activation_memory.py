"""Bytes of activations of all layers of a rank, and of its head, from the config.json of a model."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ds_finetune.families.table import family_of
from ds_finetune.plan.estimate.layer_activations import WIDE, LayerBytes, Widths, layer_bytes, norm_bytes
from ds_finetune.plan.head_chunk import CPU_BLOCK_NUMBERS, head_chunk, logits_bytes

_MOST_TOKENS = 2**30


class HeadBytes(NamedTuple):
    """What the last norm and a language-model head hold, with the loss of tokens in this program's kernel."""

    by_token: int
    """Kept by the last norm for each token."""
    by_supervised: int
    """For each supervised token: its hidden state, and the gradient of it."""
    chunk: int
    """Tokens of a chunk at most."""
    columns: int
    """Of the vocabulary on this rank."""
    logits: int
    """The logits of a token in it."""
    gradient: int
    """The fp32 gradient of the head's weight."""
    rounded: int
    """The same in the run's precision, which backward makes of it when the logits are gone."""
    block: int = 0
    """The logits that a CPU has in fp32 at a time at most, where products are 16 bits."""

    def logits_of(self, tokens: int) -> int:
        """The logits that exist at a time, of so many supervised tokens."""
        products = self.logits * min(tokens, self.chunk)
        return products + min(self.block, 2 * products)


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations for each token of a rank; with sequence parallelism a rank has its part of the tokens."""

    layer_input: int
    """One hidden state."""
    layers: tuple[LayerBytes, ...]
    head: HeadBytes
    last_norm: int
    """At most in the backward of the last norm, which computes in fp32."""
    keeps_inputs: bool
    """Whether layers that are not recomputed keep their inputs; norms in 16 bits keep an fp32 copy instead."""

    @cached_property
    def kinds(self) -> tuple[LayerBytes, ...]:
        """Each kind of layers once."""
        return tuple({id(layer): layer for layer in self.layers}.values())

    def inputs(self) -> int:
        """The inputs of all layers, which recomputation keeps: on the device, or on the host where they are
        offloaded.
        """
        return self.layer_input * len(self.layers)

    def working_set(self, tokens: int, *, is_tiled: bool = False) -> int:
        """What the backward of one recomputed layer, or of the last norm, holds at most beside the inputs of layers."""
        return max(self.last_norm * tokens, *(layer.most(tokens, is_tiled=is_tiled) for layer in self.kinds))

    def peak(self, tokens: int, *, recomputes: bool = True, is_offloaded: bool = False, is_tiled: bool = False) -> int:
        """Bytes on the device at most in layers. Without recomputation all layers are kept."""
        if not recomputes:
            return self.kept_at_most(tokens, is_tiled=is_tiled)
        inputs = self.inputs_on_device() if is_offloaded else self.inputs()
        return inputs * tokens + self.working_set(tokens, is_tiled=is_tiled)

    def inputs_on_device(self) -> int:
        """The inputs of layers that stay where they are offloaded: one that is used, and two that are copied."""
        return min(3, len(self.layers)) * self.layer_input

    def by_token_at_most(self, *, is_tiled: bool = False) -> int:
        """What the backward of one layer holds at most for each token, without what is fixed."""
        return max(held.by_token for layer in self.kinds for held in (layer.tiled if is_tiled else layer.moments))

    def tile_sums(self) -> int:
        """Bytes of the gradients that tiles of a layer sum, whatever the tokens are."""
        return max(held.fixed for layer in self.kinds for held in layer.tiled)

    def tiles_pay_from(self) -> int | None:
        """Tokens of a rank from which `train.tiled_mlp` lowers what one layer holds; None where it never does."""

        def pays(tokens: int) -> bool:
            return self.working_set(tokens, is_tiled=True) < self.working_set(tokens)

        return bisect_left(range(_MOST_TOKENS), x=True, key=pays) if pays(_MOST_TOKENS) else None

    def kept_by_layers(self, *, is_tiled: bool = False) -> int:
        """What layers keep that are not recomputed, with their inputs."""
        inputs = self.inputs() if self.keeps_inputs else 0
        return inputs + sum(layer.kept - (layer.mlp if is_tiled else 0) for layer in self.layers)

    def kept_at_most(self, tokens: int, *, is_tiled: bool = False) -> int:
        """Bytes of layers that are not recomputed: what earlier ones keep, and what one holds in its backward."""
        earlier = most = self.inputs() * tokens if self.keeps_inputs else 0
        fullest, kept = {}, {}
        for layer in self.kinds:
            unreleased = 0 if is_tiled else layer.unreleased * tokens
            fullest[id(layer)] = layer.most(tokens, is_tiled=is_tiled) + unreleased
            kept[id(layer)] = (layer.kept - (layer.mlp if is_tiled else 0)) * tokens
        for layer in self.layers:
            most = max(most, earlier + fullest[id(layer)])
            earlier += kept[id(layer)]
        return max(most, earlier + self.last_norm * tokens)


@dataclass(frozen=True)
class AdaptedLayers:
    """The adapters of a run with LoRA: their rank, and for each layer the names within it of the modules that have
    them.
    """

    rank: int
    by_layer: tuple[frozenset[str], ...]


def activation_bytes(  # noqa: PLR0913 - what a rank computes, and with which kernels
    model: Mapping[str, Any],
    *,
    precision: str,
    tp: int = 1,
    ep: int = 1,
    is_packed: bool = False,
    device: str = "cuda",
    adapters: AdaptedLayers | None = None,
) -> ActivationBytes:
    """The activations of a model of the table of families, whose config.json is given, in a `precision` on `tp` tensor
    parallel ranks, of which `ep` divide the experts. With `is_packed` attention to all documents is one call.
    With `adapters` all other weights are frozen.
    """
    widths = Widths(4 if precision == "fp32" else 2, tp, ep, is_packed)
    hidden, rules = model["hidden_size"], family_of(str(model["model_type"])).parameters
    assert rules is not None, model["model_type"]
    kinds = [
        (rules.is_sparse(model, number), adapters.by_layer[number] if adapters is not None else frozenset())
        for number in range(model["num_hidden_layers"])
    ]
    rank = adapters.rank if adapters is not None else 0
    layers = {
        (is_sparse, adapted): layer_bytes(model, replace(widths, rank=rank, adapted=adapted), is_sparse=is_sparse)
        for is_sparse, adapted in set(kinds)
    }
    return ActivationBytes(
        layer_input=widths.number * hidden,
        layers=tuple(layers[kind] for kind in kinds),
        head=_head(model, widths, precision, device),
        last_norm=6 * WIDE * hidden,
        keeps_inputs=widths.number == WIDE,
    )


def _head(model: Mapping[str, Any], widths: Widths, precision: str, device: str) -> HeadBytes:
    hidden, rows, width = model["hidden_size"], model.get("vocab_size", 0) // widths.tp, widths.number
    # On CPUs the softmax of 16-bit logits takes a few rows at a time (model/loss/head_chunks.py, ChunkBlocks).
    is_by_blocks = device == "cpu" and width < WIDE
    return HeadBytes(
        by_token=norm_bytes(hidden, widths),
        by_supervised=2 * width * hidden,
        chunk=head_chunk(rows, precision=precision, device=device) if rows else 0,
        columns=rows,
        logits=width * rows if is_by_blocks else logits_bytes(rows, precision=precision),
        gradient=WIDE * rows * hidden,
        rounded=0 if width == WIDE else width * rows * hidden,
        block=WIDE * CPU_BLOCK_NUMBERS if is_by_blocks else 0,
    )
