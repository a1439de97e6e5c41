"""Properties of a model family: its supported capabilities, and the names of its tensors in published checkpoints."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ds_finetune.families.layer_rules import ExpertKeys, entry_tokens


@dataclass(frozen=True)
class MlpNames:
    """Names of a layer's MLP and experts in published checkpoints; by default those of transformers 5.23."""

    module: str = "mlp"
    """Name of a layer's MLP."""
    gate: str = "gate_proj"
    """Name of the gate projection, to whose output the activation function is applied."""
    up: str = "up_proj"
    down: str = "down_proj"


AS_BUILT = MlpNames()
MIXTRAL_NAMES = MlpNames(module="block_sparse_moe", gate="w1", up="w3", down="w2")
"""Names of MLPs and experts in Mixtral's checkpoints (transformers 5.23, conversion_mapping.py:1270-1296)."""
Renames = tuple[tuple[str, str], ...]
"""Rules that rename tensors: pairs (regular expression, replacement), which are applied one after the other."""
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
"""Rules from the names of DeepSeek-V4's tensors in transformers 5.23 to published names
(conversion_mapping.py:649-686). They also accept the names under which transformers saves: with the prefix `model.`,
and `attn.norm` instead of `attn.kv_norm`.
"""


EXAONE_RENAMES: Renames = (
    ("model.embed_tokens.", "transformer.wte."),
    ("model.layers.", "transformer.h."),
    ("model.norm.", "transformer.ln_f."),
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    (".self_attn.", ".attn.attention."),
    (".input_layernorm.", ".ln_1."),
    (".post_attention_layernorm.", ".ln_2."),
    (".mlp.gate_proj.", ".mlp.c_fc_0."),
    (".mlp.up_proj.", ".mlp.c_fc_1."),
    (".mlp.down_proj.", ".mlp.c_proj."),
)
"""Rules from names of Llama's tensors to published names of EXAONE 3 (transformers 5.24, conversion_mapping.py)."""
SARVAM_MOE_RENAMES: Renames = (
    ("model.embed_tokens.", "model.word_embeddings."),
    (".self_attn.o_proj.", ".self_attn.dense."),
    (".self_attn.q_norm.", ".self_attn.query_layernorm."),
    (".self_attn.k_norm.", ".self_attn.key_layernorm."),
    (".self_attn.", ".attention."),
    (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"),
)
"""Rules from names of GLM-4.5's tensors to published names of Sarvam 30B (transformers 5.24, conversion_mapping.py)."""
MINIMAX_M3_RENAMES: Renames = (
    (r"\.mlp\.gate\.e_score_correction_bias$", ".block_sparse_moe.e_score_correction_bias"),
    (r"\.mlp\.experts(?=\.\d|$)", ".block_sparse_moe.experts"),
    (r"\.mlp\.(gate|shared_experts)\.", r".block_sparse_moe.\1."),
    (r"\.self_attn\.indexer\.([qk])_", r".self_attn.index_\1_"),
)
"""Rules from the names of MiniMax M3's tensors in transformers 5.23 to published names (conversion_mapping.py:756-825).
A tensor with all experts of a layer keeps its name.
"""


@dataclass(frozen=True)
class NewerType:
    """A model type that only newer releases of transformers have. Older ones build it by the classes of
    `Family.built_as`, from a config.json that `NewerType.older_config` translates.
    """

    since: str
    """First release of transformers that has the model type."""
    keys: Mapping[str, str]
    """Keys of the published config.json, each with the name that the classes of `Family.built_as` use for it."""
    defaults: Mapping[str, Any]
    """Values of config.json keys that newer transformers use for the model type if its config.json lacks the keys."""
    unused: tuple[str, ...] = ()
    """Keys of the published config.json that are removed, as classes of `Family.built_as` read them differently."""

    def older_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a published config.json to the keys that `Family.built_as` reads. `model_type` stays unchanged."""
        older = {self.keys.get(key, key): config[key] for key in config if key not in self.unused}
        for section in ("rope_scaling", "rope_parameters"):
            rope = older.get(section)
            if isinstance(rope, Mapping) and "deepseek_yarn" in (rope.get("type"), rope.get("rope_type")):
                # DeepSeek calls YaRN `deepseek_yarn` (transformers 5.24, sarvam_mla/configuration_sarvam_mla.py).
                older[section] = {**{key: rope[key] for key in rope if key != "type"}, "rope_type": "yarn"}
        return {**self.defaults, **older}


@dataclass(frozen=True)
class OnnxGraph:
    """How `export/onnx` writes a family: its kinds of attention, router and rotary embedding."""

    attention: Literal["latent", "grouped_query", "post_norm", "pre_norm"]
    """Kind of attention; for an encoder, whether norms follow attention and MLP (`post_norm`) or precede them."""
    router: Literal["sigmoid", "softmax", "grouped_softmax"] | None = None
    """How a router turns logits into expert scores; None for a family without routed experts."""
    is_rotary_interleaved: bool = False
    """Whether rotary embeddings always rotate adjacent columns. config.json's `rope_interleave` is then ignored."""


@dataclass(frozen=True)
class Gguf:
    """How llama.cpp supports a family, for exports in GGUF."""

    name: str
    """llama.cpp's name of the model architecture."""
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """config.json keys with the values that llama.cpp supports, the default first. Other keys may have any value."""
    rotates_pairs: bool = False
    """Whether llama.cpp rotates adjacent columns of queries and keys. Only then exports support Llama 3's scaling."""


@dataclass(frozen=True)
class RouterKind:
    """How a family's routers score experts. A router's forward returns logits [tokens, experts], and weights and
    indices of the chosen experts, both [tokens, chosen].
    """

    scores: Literal["sigmoid", "softmax", "sqrtsoftplus"]
    module: str = "mlp.gate"
    """Name of the router in a layer."""
    parameters: tuple[str, ...] = ("weight",)
    bias: str | None = None
    """Name of the buffer with biases that only influence the choice of experts (arXiv 2408.15664), or None."""
    reads_ids: bool = False
    """Whether some layers choose experts by token id, from a table that replaces scores and biases."""


@dataclass(frozen=True)
class TinyModels:
    """Tiny configurations of a family for tests: few layers, but every kind of layer, and a small vocabulary."""

    config: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More tiny configurations of the family, by name."""
    in_standard_selftest: bool = False
    """Whether `ds-finetune selftest` checks this family if the user names none."""


@dataclass(frozen=True)
class Encoder:
    """How an encoder, a model with bidirectional attention, numbers positions and classifies documents."""

    head: tuple[str, ...]
    """Modules that classify a document's pooled vector, in order, by their names in transformers. Modules that the
    model's folder lacks are randomly initialised.
    """
    has_token_types: bool = False
    """Whether token types mark the texts of a pair: 0 for tokens of the first text, 1 for tokens of the second."""
    positions_follow_padding: bool = False
    """Whether position numbers start at `pad_token_id` + 1 instead of 0, which leaves fewer positions for tokens."""
    pooling_key: str | None = None
    """Key of config.json for the pooling of a document's hidden states into one vector: `cls` takes the first token's
    state, `mean` the mean over tokens. With None the family always takes the first token's state.
    """


@dataclass(frozen=True)
class Indexer:
    """How an indexer chooses the tokens that a query attends to (DeepSeek sparse attention, DeepSeek-V3.2).

    In a document of at most `index_topk` tokens it chooses all earlier tokens. The choice is not differentiable, so
    only an auxiliary loss trains an indexer.
    """

    rotates_pairs: bool = False
    """Whether the indexer's rotary embedding rotates pairs of adjacent columns instead of the two halves."""
    is_shared: bool = False
    """Whether a layer without an indexer attends to the tokens that an earlier layer chose and returned (transformers
    5.23, glm_moe_dsa/modeling_glm_moe_dsa.py).
    """
    chooses_entries: bool = False
    """Whether the indexer chooses compressed entries, means of several keys, instead of tokens (DeepSeek-V4)."""

    def longest_document(self, config: Mapping[str, Any]) -> int:
        """Length, in tokens, up to which the indexer chooses all earlier tokens of a document."""
        chosen = int(config["index_topk"])
        rate = entry_tokens(config) if self.chooses_entries else 1
        return chosen * rate + rate - 1


FUSED = "RMSNorm, rotary embedding and SwiGLU are one kernel each"


@dataclass(frozen=True)
class Family:
    """What is supported for a model type. A capability with the value None, empty or False is not supported."""

    model_type: str
    is_generic: bool = False
    """Whether the model type is not in the table of families. Then only what works for all models is supported."""
    built_as: str | None = None
    """For a type that transformers does not know: the type whose classes build it. Exports keep the unknown type."""
    newer: NewerType | None = None
    """How older releases of transformers build a type that only newer releases have; None for other model types."""

    expert_keys: ExpertKeys | None = None
    """Keys of config.json with the number and size of routed experts; None for a family without routed experts."""
    fused_experts: bool = False
    """Whether transformers 5 stores a layer's experts in one 3-D tensor, but published checkpoints in a matrix per
    expert. Experts then run as torch's grouped matrix product.
    """
    transposed_experts: bool = False
    """Whether published checkpoints, like the model in transformers, have a layer's experts in one tensor [experts,
    inputs, outputs] with biases, and columns of gate and up projection in turn (gpt_oss).
    """
    published_mlp: MlpNames = AS_BUILT
    """Names of MLPs and experts in the family's published checkpoints."""
    published_renames: Renames = ()
    """Further renames of tensors from transformers' names to published names."""
    joined_mlp: bool = False
    """Whether transformers joins an MLP's gate and up projections in one layer, `gate_up_proj`, but published
    checkpoints have the layers `gate_proj` and `up_proj`.
    """
    published_qkv: str | None = None
    """Name of the linear layer that joins the rows of `q_proj`, `k_proj` and `v_proj`, in this order, in published
    checkpoints. None if checkpoints have the three layers.
    """
    drops_layers_beyond: bool = False
    """Whether only the first `num_hidden_layers` layers of a checkpoint are loaded, without multi-token prediction."""
    has_mtp: bool = False
    """Whether a multi-token prediction layer can be trained. In checkpoints it is the decoder layer `model.layers.N`
    with additional `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`; `num_nextn_predict_layers` counts such layers.
    In DeepSeek-V4 it is `mtp.0` and has other modules (model/mtp.py).
    """
    may_be_unexpected: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)
    """Regular expressions for names of checkpoint tensors that the model does not need."""
    extends_context: bool = True
    """Whether `model.context` is tested. It cannot extend rotary scaling other than `default` or `yarn`."""
    fp32_buffers: tuple[str, ...] = ()
    """Buffers that stay in fp32, whatever the run's precision is, by the last part of their names."""
    fp32_weights: str | None = None
    """Parameters that forwards use in fp32, whatever the run's precision is: a regular expression that matches their
    names in the model and in published checkpoints.
    """
    fp8_linear: str | None = r"\.(self_attn|mlp)\.([\w.]+\.)?\w+_proj(_with_mqa)?\.weight$"
    """Regular expression for names of the weights that published FP8 checkpoints quantise. The default is
    DeepSeek-V3's: attention, MLPs and experts. None: FP8 exports quantise the weights that are FP8 in the base model.
    """
    fp8_scale: str = ".weight_scale_inv"
    """Suffix that turns a module's name into the name of the tensor with its FP8 or FP4 scales."""
    export_config: Mapping[str, object] = field(default_factory=dict)
    """Keys that servers need in config.json. Exports add them if the base model's config.json lacks them."""

    config_values: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """config.json keys with their supported values. Others are refused: transformers would ignore the key or fail."""

    has_sinks: bool = False
    """Whether attention heads have sinks: a learned logit in the softmax's denominator. Attention by document supports
    them; transformers' sdpa and FlashAttention 2 do not, and its eager attention does not separate packed documents
    (gpt_oss/modeling_gpt_oss.py:460).
    """
    indexer: Indexer | None = None
    """How the family's indexers choose tokens; None for a family without indexers."""
    window_in_mask: bool = False
    """Whether transformers 5.23 applies the sliding window in masks only, which FlashAttention does not read
    (qwen2_moe/modeling_qwen2_moe.py:254).
    """
    has_state: bool = False
    """Whether layers carry a recurrent state from token to token (gated delta nets). Attention by document resets the
    state at each document. Objectives that sample answers are not supported.
    """
    normalises_over_heads: bool = False
    """Whether the RMSNorm of queries and keys spans all heads instead of each head."""
    parallel_axes: frozenset[str] = frozenset()
    """Tested kinds of parallelism, as keys of the run file's section `parallel`: tp, sp, pp, ep."""
    experts_class: str | None = None
    """Name of transformers' class of routed experts, which expert parallelism changes."""
    router: RouterKind | None = None
    """How routers score experts; None if the experts' load cannot be measured and balanced."""
    has_lora: bool = False
    """Whether LoRA is tested with the family."""

    fused: str = FUSED
    """Text for users on the operations that fused kernels (`model.kernels`) compute; empty if there are none."""

    encoder: Encoder | None = None
    """How an encoder numbers positions and classifies; None for causal models."""

    onnx: OnnxGraph | None = None
    gguf: Gguf | None = None
    tiny_models: TinyModels | None = None

    @property
    def mtp_module(self) -> str:
        """Prefix of tensor names in a multi-token prediction layer: `mtp.` in DeepSeek-V4, else empty."""
        return "mtp." if self.compresses else ""

    @property
    def compresses(self) -> bool:
        """Whether attention reads compressed entries (weighted means of several keys), as in DeepSeek-V4."""
        return self.indexer is not None and self.indexer.chooses_entries

    def is_of_indexer(self, name: str) -> bool:
        """Whether the parameter `name` belongs to an indexer, which gets no gradient from the objective's loss."""
        return self.indexer is not None and ".self_attn." in name and ".indexer." in name

    def is_in_fp32(self, name: str) -> bool:
        """Whether forwards use the parameter `name` in fp32, whatever the run's precision is."""
        return self.fp32_weights is not None and re.search(self.fp32_weights, name) is not None

    def may_skip(self, key: str, *, layers: int) -> bool:
        """Whether a model of `layers` layers does not need the checkpoint's tensor `key`, because `may_be_unexpected`
        matches it or its layer number is too large.
        """
        if any(re.search(pattern, key) for pattern in self.may_be_unexpected):
            return True
        return self.drops_layers_beyond and layer_of(key) >= layers


def layer_of(key: str) -> int:
    """Layer number in the name of a checkpoint tensor; -1 for a tensor outside of the layers."""
    layer = re.match(r"^model\.layers\.(\d+)\.", key)
    return int(layer[1]) if layer else -1
