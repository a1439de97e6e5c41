"""Bytes of activations for each token, from the config.json of a model: what autograd keeps of its layers, and where.

Counted is what transformers 5.23's modules and this program's attention keep; tests/estimate/test_activation_memory.py
holds every family against the tensors that autograd saves. Kernels of GPUs may keep less, and so do experts on CPUs
(model/experts.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_finetune.families.table import family_of
from ds_finetune.plan.activations import mlp_tiles

_WIDE = 4
"""Bytes of a number in fp32, in which norms and routers compute at any precision."""
_INDEX = 8
SINK_COLUMNS = 8
"""Columns that queries and keys get for attention sinks (model/attention.py)."""


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of a token within one layer, on a rank that computes the token."""

    attention: int
    """Kept for backward by the norms and by attention."""
    router: int
    """Kept by the router of experts."""
    mlp: int
    """Kept within the MLP, or within routed and shared experts."""
    mlp_gradients: int
    """Gradients within the MLP at most, while all of the layer is still kept."""
    attention_gradients: int
    """Gradients within attention at most."""

    @property
    def kept(self) -> int:
        """All that backward needs of the layer beside its input."""
        return self.attention + self.router + self.mlp


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes of activations for each token of a rank; with sequence parallelism a rank has its part of the tokens."""

    layer_input: int
    """One hidden state."""
    layers: tuple[LayerBytes, ...]
    tiles: int
    """Tiles of an MLP with `train.tiled_mlp`."""
    head: int
    """A supervised token's hidden state, its copy and their gradients, while the loss is computed."""

    def inputs(self) -> int:
        """The inputs of all layers, which recomputation keeps: on the device, or on the host where they are
        offloaded.
        """
        return self.layer_input * len(self.layers)

    def working_set(self, *, is_tiled: bool = False) -> int:
        """What the backward of one recomputed layer holds at most beside the inputs of layers."""
        return max(self._of_layer(layer, self.tiles if is_tiled else 1) for layer in self.layers)

    def peak(self, *, recomputes: bool = True, is_offloaded: bool = False, is_tiled: bool = False) -> int:
        """Bytes on the device at most. Without recomputation all layers are kept. Where inputs are offloaded, that of
        the last layer stays, and two others are on their way at most.
        """
        if not recomputes:
            most = max(layer.mlp_gradients for layer in self.layers)
            return self.inputs() + sum(layer.kept for layer in self.layers) + most + self.head
        inputs = min(3, len(self.layers)) * self.layer_input if is_offloaded else self.inputs()
        return inputs + max(self.head, self.working_set(is_tiled=is_tiled))

    def _of_layer(self, layer: LayerBytes, tiles: int) -> int:
        within = (layer.mlp + layer.mlp_gradients) // tiles
        # The output's gradient arrives, and that of the input is made, for all tokens at once.
        within += 2 * self.layer_input if tiles > 1 else 0
        return layer.attention + max(layer.router + within, layer.attention_gradients)


def activation_bytes(model: Mapping[str, Any], *, precision: str, tp: int = 1) -> ActivationBytes:
    """The activations of a model of the table of families, whose config.json is given, in a `precision` on `tp` tensor
    parallel ranks.
    """
    width = 4 if precision == "fp32" else 2
    hidden, rules = model["hidden_size"], family_of(str(model["model_type"])).parameters
    assert rules is not None, model["model_type"]
    kinds = {
        is_sparse: _layer(model, is_sparse=is_sparse, width=width, tp=tp)
        for is_sparse in {rules.is_sparse(model, number) for number in range(model["num_hidden_layers"])}
    }
    return ActivationBytes(
        layer_input=width * hidden,
        layers=tuple(kinds[rules.is_sparse(model, number)] for number in range(model["num_hidden_layers"])),
        tiles=mlp_tiles(model),
        head=4 * width * hidden,
    )


def _layer(model: Mapping[str, Any], *, is_sparse: bool, width: int, tp: int) -> LayerBytes:
    hidden = model["hidden_size"]
    norm_width = _WIDE if family_of(str(model["model_type"])).has_sinks else width
    # In fp32 the first norm keeps the layer's input itself.
    norms = 2 * _norm(hidden, width, normalised=norm_width) - (_WIDE * hidden if width == _WIDE else 0)
    attention, attention_gradients = _attention(model, width, tp)
    router, mlp, mlp_gradients = _experts(model, width, tp) if is_sparse else (0, *_dense(model, width, tp))
    return LayerBytes(norms + attention, router, mlp, mlp_gradients, attention_gradients + width * hidden)


def _norm(
    columns: int, width: int, *, normalised: int | None = None, feeds_product: bool = True, roots: int = 1
) -> int:
    """Bytes that an RMSNorm keeps: its input in fp32, the normalised one, a root for each group of columns, and its
    output where a matrix is multiplied with it.
    """
    kept = _WIDE * columns + (normalised or width) * columns + _WIDE * roots
    return kept + (width * columns if feeds_product else 0)


def _attention(model: Mapping[str, Any], width: int, tp: int) -> tuple[int, int]:
    """Bytes that attention keeps, and those of its gradients."""
    latent = model.get("kv_lora_rank") is not None
    return _latent_attention(model, width, tp) if latent else _grouped_attention(model, width, tp)


def _latent_attention(model: Mapping[str, Any], width: int, tp: int) -> tuple[int, int]:
    heads, rope, nope = model["num_attention_heads"] // tp, model["qk_rope_head_dim"], model["qk_nope_head_dim"]
    query_key, value, rank = nope + rope, model["v_head_dim"], model["kv_lora_rank"]
    latents = _norm(rank, width) + (_WIDE * rope if width == _WIDE else 0)
    latents += _norm(model["q_lora_rank"], width) if model.get("q_lora_rank") else 0
    # Values narrower than keys are padded; others are kept with the product that they are columns of.
    values, out = (query_key, query_key) if value < query_key else (nope + value, value)
    columns = heads * (2 * query_key + values + out + value)
    return latents + width * columns + _WIDE * heads, width * heads * (3 * query_key + 2 * value)


def _grouped_attention(model: Mapping[str, Any], width: int, tp: int) -> tuple[int, int]:
    family = family_of(str(model["model_type"]))
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    heads = model["num_attention_heads"] // tp
    key_heads = (model.get("num_key_value_heads") or model["num_attention_heads"]) // tp
    kept = width * heads * head_dim
    if family.has_sinks:
        kept += 4 * width * heads * (head_dim + SINK_COLUMNS)
    else:
        kept += 4 * width * heads * head_dim
    assert family.parameters is not None
    if family.parameters.attention(model).norms and not family.has_sinks:
        for count in (heads, key_heads):
            roots = 1 if family.normalises_over_heads else count
            kept += _norm(count * head_dim, width, feeds_product=False, roots=roots)
    return kept + _WIDE * heads, 5 * width * heads * head_dim


def _dense(model: Mapping[str, Any], width: int, tp: int) -> tuple[int, int]:
    """Gate, up, the activated gate and the product of both; and gradients of three of them."""
    inner = model["intermediate_size"] // tp
    return 4 * width * inner, width * (2 * model["hidden_size"] + 3 * inner)


def _experts(model: Mapping[str, Any], width: int, tp: int) -> tuple[int, int, int]:
    """Bytes that the router keeps, and those that routed and shared experts keep and their gradients have."""
    family = family_of(str(model["model_type"]))
    keys, hidden = family.expert_keys, model["hidden_size"]
    assert keys is not None
    chosen, inner = keys.per_token(model), keys.width(model) // tp
    router = _WIDE * keys.number(model) + chosen * (_INDEX + _WIDE)
    is_wide = family.router is not None and family.router.scores == "sigmoid"
    if width < _WIDE and (is_wide or "kv_lora_rank" in model):
        # Those routers multiply in fp32, with a copy of the hidden state.
        router += _WIDE * hidden
    # Rows by expert, gate and up, what is made of them, and rows to be weighted; in gpt_oss also clamped ones.
    inner_parts = 7 if family.transposed_experts else 4
    routed = chosen * (width * (2 * hidden + inner_parts * inner) + 3 * _INDEX + width)
    shared = 4 * width * (model.get("n_shared_experts") or 0) * inner
    return router, routed + shared, chosen * width * (2 * hidden + 3 * inner)
