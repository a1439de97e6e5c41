"""A row of the table of model families."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_finetune.families.layer_rules import ExpertKeys, entry_tokens


@dataclass(frozen=True)
class MlpNames:
    """Names of MLPs and experts in published checkpoints; the defaults are also those of transformers 5.23."""

    module: str = "mlp"
    """The module in a layer."""
    gate: str = "gate_proj"
    """The projection of an expert that the activation function follows."""
    up: str = "up_proj"
    down: str = "down_proj"


AS_BUILT = MlpNames()
MIXTRAL_NAMES = MlpNames(module="block_sparse_moe", gate="w1", up="w3", down="w2")
"""transformers 5.23, conversion_mapping.py:1270-1296."""
Renames = tuple[tuple[str, str], ...]
"""Regular expressions on names and what takes the place of their matches, in the order in which they are applied."""
DEEPSEEK_V4_RENAMES: Renames = (
    (r"^model\.layers\.\d+\.mtp\.", "mtp.0."),
    (r"(mtp\.0)\.hc_head\.", r"\1.hc_head_"),
    (r"hc_head_hc_", "hc_head_"),
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.", ""),
    (r"^hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"^model\.", ""),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(\w+)$", r".hc_\1_\2"),
    (r"\.self_attn\.compressor\.indexer\.(scorer\.)?(q_b_proj|weights_proj)\.", r".self_attn.indexer.\2."),
    (r"\.self_attn\.compressor\.indexer\.", ".self_attn.indexer.compressor."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.position_bias$", ".ape"),
    (r"\.self_attn\.sinks$", ".self_attn.attn_sink"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.(q_a|q_b|o_a|o_b)_proj\.", r".w\1."),
    (r"(\.self_attn(\.\w+)*)\.(kv|gate)_proj\.", r"\1.w\3."),
    (r"\.self_attn\.", ".attn."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.mlp\.", ".ffn."),
)
"""From names of transformers 5.23 to those of the published checkpoint (conversion_mapping.py:649-686), and from
the names that transformers itself writes, with `model.` and with `attn.norm` for `attn.kv_norm`.
"""


@dataclass(frozen=True)
class OnnxGraph:
    """The kinds of attention, router and rotary embedding in a family's ONNX graph (built by `export/onnx`)."""

    attention: Literal["latent", "grouped_query", "post_norm", "pre_norm"]
    """The last two are encoders, whose layers normalise after or before attention and MLP; they only classify."""
    router: Literal["sigmoid", "softmax", "grouped_softmax"] | None = None
    """How experts are chosen; None where a family has no routed experts."""
    is_rotary_interleaved: bool = False
    """Rotary embeddings read and write pairs of neighbouring columns, whatever `rope_interleave` of the config is."""


@dataclass(frozen=True)
class Gguf:
    """What llama.cpp computes of a family, which `export/gguf` writes and `tests/export/gguf` compares."""

    name: str
    """Name of its architecture."""
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values of keys of config.json that it computes, the usual one first; of other keys it computes any."""
    rotates_pairs: bool = False
    """Rotary embeddings turn pairs of neighbouring columns of queries and keys, and may be scaled as Llama 3's."""


@dataclass(frozen=True)
class RouterKind:
    """How the router of a layer scores its experts. It is a module that returns logits [tokens, experts], weights and
    numbers of the chosen experts [tokens, chosen]."""

    scores: Literal["sigmoid", "softmax", "sqrtsoftplus"]
    module: str = "mlp.gate"
    """Its name within a layer."""
    parameters: tuple[str, ...] = ("weight",)
    bias: str | None = None
    """Buffer of the module that is added to scores to choose experts, and to nothing else (arXiv 2408.15664)."""
    reads_ids: bool = False
    """Whether some layers choose experts by the ids of tokens, for which they have a table instead of a bias."""
    rounds_weights: bool = True
    """Whether weights from a softmax in fp32 are rounded to the precision of hidden states."""


@dataclass(frozen=True)
class TinyModels:
    """Configurations for tests of a family: a few layers, a small vocabulary, one of each kind of layer."""

    config: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further configurations by name."""
    in_standard_selftest: bool = False
    """Whether `ds-finetune selftest` checks the family when no families are named."""


@dataclass(frozen=True)
class Encoder:
    """How a model that attends in both directions numbers its positions and classifies a document."""

    head: tuple[str, ...]
    """Modules that turn the vector of a document into its scores, in order, by their names in transformers' class for
    classification. Those that a model folder does not have are drawn."""
    rotates: bool = False
    """Whether it has a rotary embedding."""
    has_token_types: bool = False
    """Whether the second text of a pair has another type of token than the first."""
    positions_follow_padding: bool = False
    """Positions begin one after `pad_token_id` of the config instead of at 0, and there are as many fewer of them."""
    pooling_key: str | None = None
    """Key of the config that says which hidden states become the vector of a document: `cls`, the first token's, or
    `mean`, the mean of all. None where it is always the first token's."""


@dataclass(frozen=True)
class Indexer:
    """How an indexer chooses the tokens that a query attends to (DeepSeek sparse attention, DeepSeek-V3.2).

    Documents of at most `index_topk` tokens are attended whole whatever it chooses. Its choice has no gradient: a loss
    of its own trains it, or none does.
    """

    rotates_pairs: bool = False
    """Whether its rotary embedding turns pairs of neighbouring columns, not the two halves."""
    is_shared: bool = False
    """Whether layers hand the chosen tokens on to the next one: they return them beside the hidden states
    (transformers 5.23, glm_moe_dsa/modeling_glm_moe_dsa.py)."""
    chooses_entries: bool = False
    """Whether it chooses entries, each of `compress_rates` tokens compressed, instead of tokens (DeepSeek-V4)."""

    def longest_document(self, config: Mapping[str, Any]) -> int:
        """Maximum tokens of a document that is attended whole whatever is chosen."""
        chosen = int(config["index_topk"])
        rate = entry_tokens(config) if self.chooses_entries else 1
        return chosen * rate + rate - 1


@dataclass(frozen=True)
class Family:
    """One model type. A capability that is None, empty or False is not available for it."""

    model_type: str
    is_generic: bool = False
    """Whether the model type has no row of its own."""
    built_as: str | None = None
    """The model type whose classes are used, where transformers does not know this one. The name is kept in
    configurations and exports."""

    expert_keys: ExpertKeys | None = None
    """Where config.json has the sizes of its routed experts; None where it has none."""
    fused_experts: bool = False
    """Experts are one 3-D tensor per layer in transformers 5 and one matrix each in published checkpoints. They go
    through torch's grouped product."""
    transposed_experts: bool = False
    """Experts are one tensor per layer in published checkpoints too: [experts, inputs, outputs] with a bias for each
    output, and columns of gate and up by turns (gpt_oss). They go through torch's grouped product."""
    published_mlp: MlpNames = AS_BUILT
    """Names of its MLPs and experts in published checkpoints."""
    published_renames: Renames = ()
    """How the names of all other tensors change in published checkpoints."""
    drops_layers_beyond: bool = False
    """Layers numbered past `num_hidden_layers` (DeepSeek-V3's multi-token prediction) are published and not built."""
    has_mtp: bool = False
    """Such a layer can be trained: it is published as `model.layers.N` with `enorm`, `hnorm`, `eh_proj` and
    `shared_head.norm` beside an ordinary decoder layer, and `num_nextn_predict_layers` of config.json counts it. With
    several residual streams it is `mtp.0`, and has other parts (model/mtp.py)."""
    may_be_unexpected: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    """Regular expressions of checkpoint keys that the model does not load."""
    extends_context: bool = True
    """Whether `model.context` is tested with it; false where transformers reads rotary scaling of another kind."""
    fp32_buffers: tuple[str, ...] = ()
    """Last parts of the names of untrained tensors that are kept in fp32 at any precision."""
    fp32_weights: str | None = None
    """Regular expression of parameters that forwards use in fp32 at any precision, by the model's names and those of
    published checkpoints."""
    fp8_linear: str | None = r"\.(self_attn|mlp)\.([\w.]+\.)?\w+_proj(_with_mqa)?\.weight$"
    """Regular expression of the checkpoint keys whose weights are published in FP8; the default is DeepSeek-V3's:
    attention, MLPs, shared and routed experts. None where it is unknown and has to be read from the base model."""
    fp8_scale: str = ".weight_scale_inv"
    """What follows the name of a module in the name of the scales of its weight in FP8 or FP4."""
    export_config: Mapping[str, object] = field(default_factory=dict)
    """Keys that servers need in `config.json`, added where the base model has none."""

    has_sinks: bool = False
    """The softmax of attention has a learned logit per head in its denominator. Attention by document computes it;
    transformers' sdpa and FlashAttention 2 do not, and its eager attention does not separate packed documents
    (gpt_oss/modeling_gpt_oss.py:460)."""
    indexer: Indexer | None = None
    """None where queries attend to all earlier tokens, or to those in a window."""
    window_in_mask: bool = False
    """transformers 5.23 applies its sliding window in masks only, which FlashAttention does not use
    (qwen2_moe/modeling_qwen2_moe.py:254)."""
    normalises_over_heads: bool = False
    """Queries are normalised over the columns of all heads together, and so are keys."""
    parallel_axes: frozenset[str] = frozenset()
    """Sizes of `parallel` in the run file that are tested with it: tp, sp, pp, ep."""
    experts_class: str | None = None
    """Class of its routed experts in transformers; expert parallelism needs it."""
    router: RouterKind | None = None
    """None where no layer has a router whose balance can be trained and counted."""
    has_lora: bool = False
    """Whether LoRA is tested with it."""

    encoder: Encoder | None = None
    """None for causal models."""

    onnx: OnnxGraph | None = None
    gguf: Gguf | None = None
    tiny_models: TinyModels | None = None

    @property
    def mtp_module(self) -> str:
        """What comes before names within such a layer: the module of a layer that the model's own forward passes by."""
        return "mtp." if self.compresses else ""

    @property
    def compresses(self) -> bool:
        """Whether its attention reads entries of compressed tokens."""
        return self.indexer is not None and self.indexer.chooses_entries

    def is_of_indexer(self, name: str) -> bool:
        """Whether the parameter `name` is an indexer's, which the loss of an objective does not reach."""
        return self.indexer is not None and ".self_attn." in name and ".indexer." in name

    def is_in_fp32(self, name: str) -> bool:
        """Whether forwards use the parameter `name` in fp32 at any precision."""
        return self.fp32_weights is not None and re.search(self.fp32_weights, name) is not None

    def may_skip(self, key: str, *, layers: int) -> bool:
        """Whether a model of `layers` layers need not load the checkpoint tensor `key`: it matches `may_be_unexpected`,
        or belongs to a layer past the last one.
        """
        if any(re.search(pattern, key) for pattern in self.may_be_unexpected):
            return True
        return self.drops_layers_beyond and layer_of(key) >= layers


def layer_of(key: str) -> int:
    """Number of the layer that the checkpoint tensor `key` belongs to; -1 where it belongs to none."""
    layer = re.match(r"^model\.layers\.(\d+)\.", key)
    return int(layer[1]) if layer else -1
