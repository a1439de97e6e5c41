"""What a row of the table of model families says about a model type: its capabilities and the names of its tensors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_finetune.families.layer_rules import ExpertKeys, entry_tokens


@dataclass(frozen=True)
class MlpNames:
    """Names of MLPs and experts in published checkpoints; the defaults are the names in transformers 5.23."""

    module: str = "mlp"
    """Name of the MLP module in a layer."""
    gate: str = "gate_proj"
    """Projection of an expert to which the activation function applies."""
    up: str = "up_proj"
    down: str = "down_proj"


AS_BUILT = MlpNames()
MIXTRAL_NAMES = MlpNames(module="block_sparse_moe", gate="w1", up="w3", down="w2")
"""Names of MLPs and experts in Mixtral's checkpoints (transformers 5.23, conversion_mapping.py:1270-1296)."""
Renames = tuple[tuple[str, str], ...]
"""Renames of tensors: pairs of a regular expression on names and its replacement, applied in order."""
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
"""Renames of DeepSeek-V4's tensors from transformers 5.23 to the published checkpoint (conversion_mapping.py:649-686).
They also apply to names that transformers itself writes, with `model.` and with `attn.norm` for `attn.kv_norm`.
"""


@dataclass(frozen=True)
class OnnxGraph:
    """Kinds of attention, router and rotary embedding in a family's ONNX graph (built by `export/onnx`)."""

    attention: Literal["latent", "grouped_query", "post_norm", "pre_norm"]
    """Kind of attention. `post_norm` and `pre_norm` belong to encoders, which are normalised after or before attention
    and MLP and only classify.
    """
    router: Literal["sigmoid", "softmax", "grouped_softmax"] | None = None
    """Scores by which experts are chosen; None for a family without routed experts."""
    is_rotary_interleaved: bool = False
    """Whether rotary embeddings rotate pairs of adjacent columns, whatever `rope_interleave` of the config is."""


@dataclass(frozen=True)
class Gguf:
    """Support of a family in llama.cpp, which `export/gguf` writes and `tests/export/gguf` compares."""

    name: str
    """Name of the architecture in GGUF."""
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Supported values of some config.json keys, the usual value first. Other keys may have any value."""
    rotates_pairs: bool = False
    """Whether llama.cpp rotates pairs of adjacent columns of queries and keys, also with scaling as in Llama 3."""


@dataclass(frozen=True)
class RouterKind:
    """How the router of a layer scores its experts. The router's module returns logits [tokens, experts], and weights
    and indices of the chosen experts, [tokens, chosen] each."""

    scores: Literal["sigmoid", "softmax", "sqrtsoftplus"]
    module: str = "mlp.gate"
    """Name of the router's module within a layer."""
    parameters: tuple[str, ...] = ("weight",)
    bias: str | None = None
    """Buffer of a layer that is added to scores only for choosing experts (arXiv 2408.15664); None without one."""
    reads_ids: bool = False
    """Whether some layers choose experts by token id. They have a table of experts instead of a bias."""
    rounds_weights: bool = True
    """Whether routing weights from an fp32 softmax are rounded to the dtype of hidden states."""


@dataclass(frozen=True)
class TinyModels:
    """Tiny configurations for tests of a family: a few layers with every kind of layer, and a small vocabulary."""

    config: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further tiny configurations, by name."""
    in_standard_selftest: bool = False
    """Whether `ds-finetune selftest` checks the family when no families are named."""


@dataclass(frozen=True)
class Encoder:
    """How an encoder (a model with bidirectional attention) numbers positions and classifies documents."""

    head: tuple[str, ...]
    """Modules that turn the vector of a document into scores, in order, by their names in transformers' class for
    classification. Modules missing in a model folder are randomly initialised.
    """
    rotates: bool = False
    """Whether the encoder has a rotary embedding."""
    has_token_types: bool = False
    """Whether tokens of the second text of a pair have another token type than those of the first."""
    positions_follow_padding: bool = False
    """Whether positions start at the config's `pad_token_id` + 1 instead of 0, so that fewer positions are left."""
    pooling_key: str | None = None
    """Config key of the pooling that gives the vector of a document: `cls`, the hidden state of the first token, or
    `mean`, the mean over tokens. None means that it is always the first token's.
    """


@dataclass(frozen=True)
class Indexer:
    """How an indexer chooses the tokens that a query attends to (DeepSeek sparse attention, DeepSeek-V3.2).

    In documents of at most `index_topk` tokens it chooses all earlier tokens. The choice has no gradient, so only a
    loss of its own trains the indexer.
    """

    rotates_pairs: bool = False
    """Whether the indexer's rotary embedding rotates pairs of adjacent columns instead of the two halves."""
    is_shared: bool = False
    """Whether layers pass the chosen tokens to the next layer, as an output beside the hidden states (transformers
    5.23, glm_moe_dsa/modeling_glm_moe_dsa.py)."""
    chooses_entries: bool = False
    """Whether the indexer chooses compressed entries of `compress_rates` tokens instead of tokens (DeepSeek-V4)."""

    def longest_document(self, config: Mapping[str, Any]) -> int:
        """Maximum number of tokens of a document in which the indexer leaves no token out."""
        chosen = int(config["index_topk"])
        rate = entry_tokens(config) if self.chooses_entries else 1
        return chosen * rate + rate - 1


FUSED = "RMSNorm, rotary embedding and SwiGLU are one kernel each"


@dataclass(frozen=True)
class Family:
    """A model type and its capabilities. A capability that is None, empty or False is not supported."""

    model_type: str
    is_generic: bool = False
    """Whether the model type has no row of its own in the table of families."""
    built_as: str | None = None
    """Model type whose classes are used if transformers has none for this model type. Configurations and exports keep
    the name of this type.
    """

    expert_keys: ExpertKeys | None = None
    """Keys of config.json for the sizes of routed experts; None for a model without routed experts."""
    fused_experts: bool = False
    """Whether a layer's experts are one 3-D tensor in transformers 5, but one matrix each in published checkpoints.
    They use torch's grouped product."""
    transposed_experts: bool = False
    """Whether a layer's experts are one tensor in published checkpoints too: [experts, inputs, outputs], with a bias
    per output and alternating columns of gate and up (gpt_oss). They use torch's grouped product."""
    published_mlp: MlpNames = AS_BUILT
    """Names of MLPs and experts in published checkpoints."""
    published_renames: Renames = ()
    """Renames from names in transformers to published names, in addition to those of MLPs and experts."""
    drops_layers_beyond: bool = False
    """Whether published multi-token prediction layers, numbered from `num_hidden_layers` on, are not built."""
    has_mtp: bool = False
    """Whether a multi-token prediction layer can be trained. It is published as `model.layers.N` with `enorm`,
    `hnorm`, `eh_proj` and `shared_head.norm` beside an ordinary decoder layer, and counted by
    `num_nextn_predict_layers`. With several residual streams it is `mtp.0` and has other parts (model/mtp.py)."""
    may_be_unexpected: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    """Regular expressions of checkpoint keys that the model does not load."""
    extends_context: bool = True
    """Whether `model.context` is tested; false where transformers reads another kind of rotary scaling."""
    fp32_buffers: tuple[str, ...] = ()
    """Last parts of the names of untrained tensors that stay in fp32 whatever the run's precision is."""
    fp32_weights: str | None = None
    """Regular expression of parameters that forwards use in fp32 whatever the run's precision is. It matches the
    model's names and those of published checkpoints.
    """
    fp8_linear: str | None = r"\.(self_attn|mlp)\.([\w.]+\.)?\w+_proj(_with_mqa)?\.weight$"
    """Regular expression of checkpoint keys with weights published in FP8. The default is DeepSeek-V3's: attention,
    MLPs, shared and routed experts. None means that the keys must be read from the base model.
    """
    fp8_scale: str = ".weight_scale_inv"
    """Suffix of a module's name that gives the name of its FP8 or FP4 scales."""
    export_config: Mapping[str, object] = field(default_factory=dict)
    """Keys of `config.json` that servers need, added to exports where the base model lacks them."""

    has_sinks: bool = False
    """Whether the softmax of attention has a learned logit per head in its denominator. Attention by document supports
    it; transformers' sdpa and FlashAttention 2 do not, and its eager attention does not separate packed documents
    (gpt_oss/modeling_gpt_oss.py:460)."""
    indexer: Indexer | None = None
    """How an indexer chooses tokens; None where queries attend to all earlier tokens or a sliding window."""
    window_in_mask: bool = False
    """Whether transformers 5.23 applies the sliding window only in masks, which FlashAttention does not use
    (qwen2_moe/modeling_qwen2_moe.py:254)."""
    has_state: bool = False
    """Whether layers carry a state from token to token (gated delta nets). Attention by document resets it at each
    document. Sampling answers is not supported.
    """
    normalises_over_heads: bool = False
    """Whether queries are normalised over the columns of all heads together. Keys are then normalised likewise."""
    parallel_axes: frozenset[str] = frozenset()
    """Axes of `parallel` in the run file that are tested with the family: tp, sp, pp, ep."""
    experts_class: str | None = None
    """Class of the routed experts in transformers, which expert parallelism needs."""
    router: RouterKind | None = None
    """How routers score experts. None if no layer has a router whose balance can be trained and measured."""
    has_lora: bool = False
    """Whether LoRA is tested with the family."""

    fused: str = FUSED
    """Which operations fused kernels (`model.kernels`) compute, in words. Empty where they compute none."""

    encoder: Encoder | None = None
    """Properties of an encoder; None for causal models."""

    onnx: OnnxGraph | None = None
    gguf: Gguf | None = None
    tiny_models: TinyModels | None = None

    @property
    def mtp_module(self) -> str:
        """Prefix of tensor names within a multi-token prediction layer. DeepSeek-V4's layer is wrapped in a module
        `mtp`.
        """
        return "mtp." if self.compresses else ""

    @property
    def compresses(self) -> bool:
        """Whether attention reads compressed entries of tokens."""
        return self.indexer is not None and self.indexer.chooses_entries

    def is_of_indexer(self, name: str) -> bool:
        """Whether the parameter `name` belongs to an indexer, which an objective's loss does not reach."""
        return self.indexer is not None and ".self_attn." in name and ".indexer." in name

    def is_in_fp32(self, name: str) -> bool:
        """Whether forwards use the parameter `name` in fp32 whatever the run's precision is."""
        return self.fp32_weights is not None and re.search(self.fp32_weights, name) is not None

    def may_skip(self, key: str, *, layers: int) -> bool:
        """Whether a model of `layers` layers may leave the checkpoint tensor `key` unread: the key matches
        `may_be_unexpected`, or belongs to a layer past the last one.
        """
        if any(re.search(pattern, key) for pattern in self.may_be_unexpected):
            return True
        return self.drops_layers_beyond and layer_of(key) >= layers


def layer_of(key: str) -> int:
    """Index of the layer that a checkpoint key names; -1 for a tensor outside of layers."""
    layer = re.match(r"^model\.layers\.(\d+)\.", key)
    return int(layer[1]) if layer else -1
