"""Bytes of activations of all layers of a rank, and of its head, from the config.json of a model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ds_finetune.families.layer_rules import compressed_types
from ds_finetune.families.table import family_of
from ds_finetune.plan.estimate.compressed_layers import (
    compressed_attention_bytes,
    last_streams_bytes,
    mixing_bytes,
    mixing_moments,
    one_stream_bytes,
    streams_of,
)
from ds_finetune.plan.estimate.rank_weights import remembered
from ds_finetune.plan.estimate.widths import WIDE, Held, LayerBytes, Widths, norm_bytes
from ds_finetune.plan.forward import CPU_BLOCK_NUMBERS, head_chunk, head_widths, logits_bytes, mlp_tiles
from ds_finetune.plan.model_tensors import DescribedModel

_INDEX = 8
_OUT = "self_attn.o_proj"
_KEYS_A = "self_attn.kv_a_proj_with_mqa"
_READERS = (*(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_a_proj")), _KEYS_A)
_READERS += tuple(f"self_attn.{name}" for name in ("kv_proj", "compressor.kv_proj", "compressor.gate_proj"))
_INNER = ("self_attn.q_b_proj", "self_attn.kv_b_proj")
_MLP_READERS = tuple(f"mlp.{name}" for name in ("gate_proj", "up_proj", "gate"))
_MLP_READERS += ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
"""Modules of a layer by what they read: the first norm, latents, and the second norm, of which routed experts read
copies of rows.
"""
_ATTENTION = (*_READERS, *_INNER, _OUT)
SINK_COLUMNS = 8
"""Columns that queries and keys get for attention sinks (model/attention/by_document.py)."""


def layer_bytes(model: Mapping[str, Any], widths: Widths, *, is_sparse: bool) -> LayerBytes:
    """What a layer holds, with routed experts where it `is_sparse`."""
    hidden, width, streams = model["hidden_size"], widths.number, streams_of(model)
    norm_width = WIDE if family_of(str(model["model_type"])).has_sinks else width
    norms = _norm(hidden, widths, (), _READERS, normalised=norm_width)
    norms += _norm(hidden, widths, _ATTENTION, _MLP_READERS, normalised=norm_width)
    # The first norm may keep the layer's input itself, and hyper-connections keep that.
    keeps_input = widths.reaches() and (widths.keeps_inputs or streams > 1)
    norms -= width * hidden if keeps_input and streams == 1 else 0
    row, inner = _expert_rows(model, widths) if is_sparse else (0, 0)
    attention, gradients = _attention(model, widths)
    kept = norms + attention + mixing_bytes(model, widths)
    router, mlp = (_router(model, widths), _experts(model, widths)) if is_sparse else (0, _dense(model, widths))
    # The gradient of the layer's output is there until its input has one; that of streams beside the sublayer's.
    of_output = width * hidden * (1 if streams == 1 else 1 + streams)
    outside, tiles = kept + router + of_output, mlp_tiles(model)
    in_attention = Held(kept + gradients + of_output)
    moments = [Held(outside + held.by_token, held.fixed) for held in mlp.moments]
    moments += [Held(kept + held) for held in mixing_moments(model, widths, router + mlp.kept)]
    tiled = [
        Held(outside + held.by_token // tiles + 2 * width * hidden, (WIDE + width) * numel)
        for held, numel in zip(mlp.moments, mlp.tiled, strict=False)
    ]
    tiled += [Held(outside + 2 * width * hidden, (WIDE + 2 * width) * numel) for numel in mlp.tiled]
    return LayerBytes(
        attention=kept,
        router=router,
        mlp=mlp.kept,
        moments=(*moments, in_attention),
        tiled=(*tiled, in_attention),
        keeps_input=keeps_input,
        forward=_forward_bytes(model, widths, is_sparse=is_sparse),
        attention_out=_attention_out(model, widths),
        # With expert parallelism also the rows that arrive.
        products=2 * inner + (row if widths.ep > 1 else 0),
        repeated=row + _repeated(model, widths) if is_sparse and kept else 0,
        # With what they are made of, and hidden states: of the embedding, before and after experts, and of the layer's
        # beginning and middle where norms keep copies.
        combined=2 * row
        + (0 if widths.keeps("mlp.experts") else inner)
        + width * hidden * (4 if keeps_input else 6) * is_sparse,
    )


def _repeated(model: Mapping[str, Any], widths: Widths) -> int:
    """The gradient of the layer's output, the first norm, attention and its output."""
    # Turned columns of queries, and values without padding, which gradients need.
    columns = model["qk_rope_head_dim"] + model["v_head_dim"] if model.get("kv_lora_rank") is not None else 0
    attention = _attention_forward(model, widths) + widths.number * model["num_attention_heads"] // widths.tp * columns
    return attention + (3 * widths.number + (0 if widths.keeps_inputs else WIDE)) * int(model["hidden_size"])


def _expert_rows(model: Mapping[str, Any], widths: Widths) -> tuple[int, int]:
    """Bytes of a token's rows for its routed experts, as wide as the model and as wide as experts."""
    keys = family_of(str(model["model_type"])).expert_keys
    assert keys is not None
    chosen = widths.number * keys.per_token(model)
    return int(chosen * model["hidden_size"]), int(chosen * keys.width(model) // widths.tp)


def _attention_out(model: Mapping[str, Any], widths: Widths) -> int:
    """The output of attention, padded where keys are wider than values, and the logarithm of a sum for each head."""
    heads = model["num_attention_heads"] // widths.tp
    family = family_of(str(model["model_type"]))
    columns = head_widths(model).widest + (SINK_COLUMNS if family.has_sinks and not family.compresses else 0)
    return int(heads * (widths.number * columns + WIDE))


def _forward_bytes(model: Mapping[str, Any], widths: Widths, *, is_sparse: bool) -> int:
    """Bytes that a layer without gradients holds at most beside its input, with the embedding's output: in a norm, in
    attention, or in its MLP.
    """
    state, streams = widths.number * model["hidden_size"], streams_of(model)
    # Norms that are not fused hold their input in fp32 and a product of it.
    norm, attention = (
        state if widths.is_fused else 2 * WIDE * model["hidden_size"],
        state + _attention_forward(model, widths),
    )
    mlp = _experts_forward(model, widths) if is_sparse else 3 * widths.number * model["intermediate_size"] // widths.tp
    if streams > 1:
        # Streams are one after the other in fp32, or three of them are added up to the next ones.
        mixed = max(3 * state, WIDE * model["hidden_size"] * (widths.number < WIDE)) * streams
        return state + max(mixed, state * streams + max(attention, mlp + state))
    # The second norm reads the sum of the layer's input and attention.
    return state + max(norm + state, attention, mlp + 2 * state)


def _attention_forward(model: Mapping[str, Any], widths: Widths) -> int:
    """Queries, keys and values, copies with positions, for a call over all documents also one after the other in
    memory, and the output.
    """
    heads, is_packed = model["num_attention_heads"] // widths.tp, widths.is_packed
    if model.get("kv_lora_rank") is not None:
        nope, (query_key, value) = model["qk_nope_head_dim"], head_widths(model)
        latents = (model.get("q_lora_rank") or 0) + model["kv_lora_rank"]
        columns = 7 * query_key + nope + value if is_packed else 3 * query_key + nope + 3 * value
        return widths.number * (heads * columns + 2 * latents)
    head_dim = head_widths(model).values
    key_heads = (model.get("num_key_value_heads") or model["num_attention_heads"]) // widths.tp
    family = family_of(str(model["model_type"]))
    if family.compresses:
        return heads * head_dim * (widths.number + (2 if widths.number < WIDE else 1) * WIDE)
    if family.has_sinks:
        return widths.number * heads * (5 * (head_dim + SINK_COLUMNS) + 2 * head_dim)
    return widths.number * head_dim * (4 * heads + (5 if is_packed else 2) * key_heads)


def _experts_forward(model: Mapping[str, Any], widths: Widths) -> int:
    """Rows by expert, with gate, up and what is made of them, or outputs, also in another order."""
    family = family_of(str(model["model_type"]))
    row, inner = _expert_rows(model, widths)
    # Those with transposed weights copy biases for each row, and clamp gate and up.
    return max(row + (9 if family.transposed_experts else 4) * inner, 2 * row)


class _Mlp(NamedTuple):
    """Bytes within an MLP."""

    kept: int
    moments: tuple[Held, ...]
    """Bytes within it at moments of its backward."""
    tiled: tuple[int, ...]
    """Parameters of its modules that are computed in tiles, in the order of the moments."""


def _norm(
    columns: int, widths: Widths, before: Sequence[str], readers: Sequence[str], *, normalised: int | None = None
) -> int:
    """Bytes of an RMSNorm after the modules `before`, and of its output where one of `readers` keeps it."""
    kept = norm_bytes(columns, widths, normalised=normalised) if widths.reaches(*before) else 0
    return kept + (widths.number * columns if widths.keeps(*readers) else 0)


def _attention(model: Mapping[str, Any], widths: Widths) -> tuple[int, int]:
    """Bytes that attention keeps, and those of its gradients."""
    if not widths.reaches(*_READERS, *_INNER):
        read = model["num_attention_heads"] // widths.tp * head_widths(model).values if widths.keeps(_OUT) else 0
        return widths.number * read + widths.low_rank(_OUT), 0
    if model.get("kv_lora_rank") is not None:
        return _latent_attention(model, widths)
    if family_of(str(model["model_type"])).compresses:
        return compressed_attention_bytes(model, widths)
    return _grouped_attention(model, widths)


def _latent_attention(model: Mapping[str, Any], widths: Widths) -> tuple[int, int]:
    width, tp = widths.number, widths.tp
    heads, rope, nope = model["num_attention_heads"] // tp, model["qk_rope_head_dim"], model["qk_nope_head_dim"]
    query_key, value, rank = nope + rope, model["v_head_dim"], model["kv_lora_rank"]
    latents = _norm(rank, widths, (_KEYS_A,), ("self_attn.kv_b_proj",))
    latents += width * rope if widths.keeps_inputs and widths.reaches(_KEYS_A) else 0
    if model.get("q_lora_rank"):
        latents += _norm(model["q_lora_rank"], widths, ("self_attn.q_a_proj",), ("self_attn.q_b_proj",))
    # Values narrower than keys are padded; others are kept with the product that they are columns of.
    values, out = (query_key, query_key) if value < query_key else (nope + value, value)
    columns = heads * (2 * query_key + values + out + (value if widths.keeps(_OUT) else 0))
    kept = latents + width * columns + WIDE * heads + widths.low_rank(*_READERS, *_INNER, _OUT)
    return kept, width * heads * (3 * query_key + 2 * value)


def _grouped_attention(model: Mapping[str, Any], widths: Widths) -> tuple[int, int]:
    family, width = family_of(str(model["model_type"])), widths.number
    head_dim = head_widths(model).values
    heads = model["num_attention_heads"] // widths.tp
    key_heads = (model.get("num_key_value_heads") or model["num_attention_heads"]) // widths.tp
    if widths.is_packed:
        # Queries, output, keys and values; the kernel itself gives each key to several heads.
        kept = width * head_dim * (2 * heads + 2 * key_heads)
    elif family.has_sinks:
        kept = width * heads * (head_dim + 4 * (head_dim + SINK_COLUMNS))
    else:
        kept = (5 if widths.keeps(_OUT) else 4) * width * heads * head_dim
    if widths.has_head_norms and not family.has_sinks:
        for name, count in (("q_proj", heads), ("k_proj", key_heads)):
            roots = 1 if family.normalises_over_heads else count
            norm = norm_bytes(count * head_dim, widths, roots=roots)
            kept += norm if widths.reaches(f"self_attn.{name}") else 0
    return kept + widths.low_rank(*_READERS, _OUT) + WIDE * heads, 5 * width * heads * head_dim


def _dense(model: Mapping[str, Any], widths: Widths, *, inner: int | None = None, name: str = "mlp") -> _Mlp:
    """Gate, up, the activated gate and the product of both are kept. When the product is gone, its gradient and those
    of both factors are there. Fused kernels keep no activated gate, and Liger's write gradients over gate and up.
    """
    inner = (model["intermediate_size"] if inner is None else inner) // widths.tp
    row, matrix = widths.number * inner, widths.number * inner * model["hidden_size"]
    # Where gate and up are clamped, both are kept before and after.
    between = (1 if widths.is_fused else 0) - 2 * family_of(str(model["model_type"])).compresses
    # That of the input of an adapted matrix is the sum of two.
    is_kept = widths.keeps(f"{name}.down_proj")
    gradients = (2 if is_kept else 1 if widths.kernels == "liger" else 3) * row
    if not widths.rank:
        held = Held((6 - between) * row), Held((5 - between) * row, matrix)
        return _Mlp((4 - between) * row, held, (3 * inner * model["hidden_size"],))
    inputs = [f"{name}.{each}_proj" for each in ("gate", "up")]
    low = widths.low_rank(*inputs, f"{name}.down_proj")
    if not widths.reaches(*_ATTENTION, *inputs):
        kept = is_kept * row + low
        return _Mlp(kept, (Held(kept),), (0,))
    kept = (4 - between if is_kept else 3 - between) * row + low
    return _Mlp(kept, (Held(kept + gradients),), (0,))


def _router(model: Mapping[str, Any], widths: Widths) -> int:
    """Bytes that the router keeps."""
    if not widths.reaches(*_ATTENTION, "mlp.gate"):
        return 0
    family = family_of(str(model["model_type"]))
    assert family.expert_keys is not None
    chosen = family.expert_keys.per_token(model)
    if family.compresses:
        # Logits and scores, and the weights of the chosen with their sum.
        numbers = 2 * family.expert_keys.number(model) + chosen + 1
        return widths.number * numbers + _INDEX * chosen
    router = WIDE * family.expert_keys.number(model) + chosen * (_INDEX + WIDE)
    # Those routers multiply in fp32, with a copy of the hidden state.
    copies = widths.number < WIDE and _routes_in_fp32(model) and widths.keeps("mlp.gate")
    return router + (WIDE * model["hidden_size"] if copies else 0)


def _routes_in_fp32(model: Mapping[str, Any]) -> bool:
    """Whether routers multiply hidden states in fp32."""
    family = family_of(str(model["model_type"]))
    return "kv_lora_rank" in model or (family.router is not None and family.router.scores == "sigmoid")


def weighted_bytes(model: Mapping[str, Any], width: int) -> int:
    """Bytes of a number of routing weights, and of what is multiplied with them, which becomes fp32 where they are."""
    router = family_of(str(model["model_type"])).router
    # transformers 5.23, mixtral/modeling_mixtral.py:106-110 does not round them.
    is_wide = _routes_in_fp32(model) or (router is not None and not router.rounds_weights)
    return WIDE if is_wide else width


def _experts(model: Mapping[str, Any], widths: Widths) -> _Mlp:
    """Routed experts, and shared ones, whose backward comes first."""
    family = family_of(str(model["model_type"]))
    keys, hidden, width = family.expert_keys, model["hidden_size"], widths.number
    assert keys is not None
    chosen, inner = keys.per_token(model), keys.width(model) // widths.tp
    row, inner_row = _expert_rows(model, widths)
    # Rows by expert, gate and up, what is made of them, and its product with routing weights; in gpt_oss also clamped
    # ones.
    among = 8 if family.transposed_experts else (4 if widths.is_fused else 5) + 2 * family.compresses
    routed = row + among * inner_row + chosen * (3 * _INDEX + width)
    is_kept, are_routed = widths.keeps("mlp.experts"), widths.reaches(*_ATTENTION, "mlp.gate")
    routed -= 0 if is_kept else row + inner_row
    # Routing weights without a gradient need no product.
    routed -= 0 if are_routed else inner_row
    routed = (routed + 2 * chosen * widths.low_rank("mlp.experts")) if is_kept or are_routed else 0
    inner_shared = (model.get("n_shared_experts") or 0) * keys.width(model)
    shared = _dense(model, widths, inner=inner_shared, name="mlp.shared_experts")
    wide_inner = chosen * inner * weighted_bytes(model, width)
    matrices = 0 if widths.rank else width * keys.number(model) // widths.ep * inner * hidden
    moments = (
        # The gradient of each token's sum, once for each expert and once more for an adapter, and that of the down
        # projection's input and weight.
        Held(routed + shared.kept + (2 if widths.rank and is_kept else 1) * row + inner_row, matrices),
        # That input is gone. Its gradient and a copy times routing weights, fp32 in most families.
        Held(routed + shared.kept + inner_row + wide_inner - is_kept * inner_row, matrices),
        Held(shared.kept + 2 * row + 2 * inner_row, 2 * matrices),
        *shared.moments,
    )
    tiled = (3 * matrices // width, *(shared.tiled if shared.kept else ()))
    return _Mlp(routed + shared.kept, moments, tiled)


class HeadBytes(NamedTuple):
    """What the last norm and a language-model head hold, with the loss of tokens in this program's kernel."""

    by_token: int
    """Kept by the last norm for each token."""
    by_supervised: int
    """For each supervised token: its hidden state, and the gradient of it."""
    chunk: int
    """Tokens of a chunk at most."""
    columns: int
    """Tokens of the vocabulary on this rank."""
    logits: int
    """The logits of a token in it."""
    gradient: int
    """The fp32 gradient of the head's weight."""
    rounded: int
    """That gradient in the run's precision, which backward makes of it when the logits are gone."""
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
    """One hidden state, or all of its streams."""
    layers: tuple[LayerBytes, ...]
    head: HeadBytes
    last_norm: int
    """At most in the backward of the last norm, which computes in fp32."""

    @cached_property
    def kinds(self) -> tuple[LayerBytes, ...]:
        """Each kind of layers once."""
        return tuple({id(layer): layer for layer in self.layers}.values())

    def inputs(self) -> int:
        """The inputs of all layers that have a backward, which recomputation keeps: on the device, or on the host where
        they are offloaded.
        """
        return self.layer_input * sum(layer.kept > 0 for layer in self.layers)

    def kept_selectively(self, *, is_tiled: bool = False) -> int:
        """What selective recomputation keeps of all layers beside their inputs."""
        return sum(layer.kept_selectively(is_tiled=is_tiled) for layer in self.layers)

    def working_set(self, tokens: int, *, is_tiled: bool = False, is_selective: bool = False) -> int:
        """What the backward of one recomputed layer, or of the last norm, holds at most beside the inputs of layers,
        and beside what `is_selective` recomputation keeps.
        """
        most = self.last_norm * tokens
        for layer in self.kinds:
            kept = is_selective * tokens * layer.kept_selectively(is_tiled=is_tiled)
            repeated = 0 if is_tiled else (layer.repeated - is_selective * layer.attention_out) * tokens
            most = max(most, layer.most(tokens, is_tiled=is_tiled) - kept, repeated)
        return most

    def peak(
        self, tokens: int, *, recomputation: str = "full", is_offloaded: bool = False, is_tiled: bool = False
    ) -> int:
        """Bytes on the device at most in layers. Without recomputation all layers are kept."""
        if recomputation == "none":
            return self.kept_at_most(tokens, is_tiled=is_tiled)
        is_selective = recomputation == "selective"
        kept = self.inputs_on_device() if is_offloaded else self.inputs()
        kept += self.kept_selectively(is_tiled=is_tiled) if is_selective else 0
        return kept * tokens + self.working_set(tokens, is_tiled=is_tiled, is_selective=is_selective)

    def inputs_on_device(self) -> int:
        """Bytes of layer inputs on the device for each token where they are offloaded: that of one layer."""
        return min(self.layer_input, self.inputs())

    def kept_by_layers(self, *, is_tiled: bool = False) -> int:
        """What layers keep that are not recomputed, with their inputs."""
        own = sum(layer.kept - (layer.mlp if is_tiled else 0) for layer in self.layers)
        return own + self.layer_input * sum(layer.keeps_input for layer in self.layers)

    def kept_at_most(self, tokens: int, *, is_tiled: bool = False) -> int:
        """Bytes of layers that are not recomputed: what earlier ones keep, and what one holds in its backward."""
        earlier = most = self.layer_input * sum(layer.keeps_input for layer in self.layers) * tokens
        fullest = {id(layer): layer.most(tokens, is_tiled=is_tiled) for layer in self.kinds}
        for layer in self.layers:
            own, combined = (layer.kept - layer.mlp, 0) if is_tiled else (layer.kept, layer.combined)
            most = max(most, earlier + fullest[id(layer)], earlier + (own + combined) * tokens)
            earlier += own * tokens
        return max(most, earlier + self.last_norm * tokens)


@dataclass(frozen=True)
class AdaptedLayers:
    """The adapters of a run with LoRA: their rank, and for each layer the names within it of the modules that have
    them.
    """

    rank: int
    by_layer: tuple[frozenset[str], ...]


@remembered
def activation_bytes(  # noqa: PLR0913 - what a rank computes, and with which kernels
    model: DescribedModel,
    *,
    precision: str,
    tp: int = 1,
    ep: int = 1,
    is_packed: bool = False,
    device: str = "cuda",
    adapters: AdaptedLayers | None = None,
    kernels: str = "torch",
) -> ActivationBytes:
    """The activations of a model of the table of families in a `precision` on `tp` tensor
    parallel ranks, of which `ep` divide the experts. With `is_packed` attention to all documents is one call.
    With `adapters` all other weights are frozen.
    """
    family, hidden = family_of(str(model["model_type"])), model["hidden_size"]
    number, layers_of_model = 4 if precision == "fp32" else 2, model.tensors.layers[: model["num_hidden_layers"]]
    has_norms = any(name.startswith("self_attn.q_norm") for name, _ in layers_of_model[0].tensors)
    widths = Widths(number, tp, ep, is_packed, kernels=kernels, has_head_norms=has_norms, keeps_rows=family.compresses)
    kinds = [
        (layer.is_sparse, adapters.by_layer[number] if adapters is not None else frozenset())
        for number, layer in enumerate(layers_of_model)
    ]
    rank = adapters.rank if adapters is not None else 0
    first = next((number for number, (_, adapted) in enumerate(kinds) if adapted), -1)
    types = compressed_types(model) if family.compresses else ("",) * len(kinds)
    places = [(*kind, number <= first, types[number]) for number, kind in enumerate(kinds)]
    layers = {}
    for place in set(places):
        is_sparse, adapted, is_beginning, kind = place
        own = replace(widths, rank=rank, adapted=adapted, is_beginning=is_beginning, kind=kind)
        layers[place] = layer_bytes(model, own, is_sparse=is_sparse)
    return ActivationBytes(
        layer_input=widths.number * hidden * streams_of(model),
        layers=tuple(layers[place] for place in places),
        head=_head(model, widths, precision, device),
        last_norm=last_streams_bytes(model, widths) or (4 * widths.number if widths.is_fused else 6 * WIDE) * hidden,
    )


def _head(model: Mapping[str, Any], widths: Widths, precision: str, device: str) -> HeadBytes:
    hidden, rows, width = model["hidden_size"], model.get("vocab_size", 0) // widths.tp, widths.number
    # On CPUs the softmax of 16-bit logits takes a few rows at a time (model/loss/head_chunks.py, ChunkBlocks).
    is_by_blocks = device == "cpu" and width < WIDE
    return HeadBytes(
        by_token=norm_bytes(hidden, widths) + width * hidden + one_stream_bytes(model, widths),
        by_supervised=2 * width * hidden,
        chunk=head_chunk(rows, precision=precision, device=device) if rows else 0,
        columns=rows,
        logits=width * rows if is_by_blocks else logits_bytes(rows, precision=precision),
        gradient=WIDE * rows * hidden,
        rounded=0 if width == WIDE else width * rows * hidden,
        block=WIDE * CPU_BLOCK_NUMBERS if is_by_blocks else 0,
    )
