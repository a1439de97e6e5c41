"""The table of model families. A new family needs an entry in this table, and code only for new capabilities."""

from collections.abc import Mapping
from dataclasses import replace

from ds_finetune.families import configs
from ds_finetune.families.family import (
    DEEPSEEK_V4_RENAMES,
    EXAONE_RENAMES,
    FUSED,
    MINIMAX_M3_RENAMES,
    MIXTRAL_NAMES,
    SARVAM_MOE_RENAMES,
    Encoder,
    Family,
    Gguf,
    Indexer,
    MlpNames,
    NewerType,
    OnnxGraph,
    RouterKind,
    TinyModels,
)
from ds_finetune.families.layer_rules import (
    QWEN_EXPERTS,
    ExpertKeys,
    ModelConfig,
)

_DENSE_AXES = frozenset({"tp", "sp", "pp"})
_ALL_AXES = _DENSE_AXES | {"ep"}
_ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the biases that are added to router scores to choose experts. They stay in fp32, because the differences
between published biases are too small for bf16.
"""
_POSITION_IDS = r"(^|\.)embeddings\.position_ids$"
"""Pattern of names of position ids, which old versions of transformers saved in checkpoints as a constant."""

_SHARED: dict[str, tuple[object, ...]] = {"n_shared_experts": tuple(range(1, 65))}
_ALL_SPARSE: dict[str, tuple[object, ...]] = {
    "norm_topk_prob": (True,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
}
_PLAIN_ATTENTION: dict[str, tuple[object, ...]] = {"use_sliding_window": (False,), "attention_bias": (False,)}
_DEEP = {"num_hidden_layers": 4}


def _tiny(name: str, config: ModelConfig, *, in_standard_selftest: bool = False, **changes: ModelConfig) -> TinyModels:
    variants = {f"{name}_{variant}": {**config, **changed} for variant, changed in changes.items()}
    return TinyModels(config, variants, in_standard_selftest=in_standard_selftest)


_DENSE = Family("", parallel_axes=_DENSE_AXES, has_lora=True, onnx=OnnxGraph("grouped_query"))
_TRAINED = replace(_DENSE, onnx=None, fp8_linear=None)
"""Table entry of dense model types that can be exported only as Hugging Face folders in 16 or 32 bits."""
_MIXTURE = Family(
    "",
    fused_experts=True,
    router=RouterKind("softmax"),
    parallel_axes=_ALL_AXES,
    has_lora=True,
    onnx=OnnxGraph("grouped_query", router="softmax"),
)
_MIXTRAL_EXPERTS = ExpertKeys(number_keys=("num_local_experts",), width_key="intermediate_size")
_DEEPSEEK_V3 = replace(
    _MIXTURE,
    model_type="deepseek_v3",
    expert_keys=ExpertKeys(),
    drops_layers_beyond=True,
    has_mtp=True,
    fp32_buffers=_ROUTER_BIASES,
    export_config={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    config_values={"topk_method": ("noaux_tc", None), "scoring_func": ("sigmoid", None), "moe_layer_freq": (1, None)},
    experts_class="DeepseekV3Experts",
    router=RouterKind("sigmoid", bias="mlp.gate.e_score_correction_bias"),
    onnx=OnnxGraph("latent", router="sigmoid"),
    tiny_models=_tiny(
        "deepseek_v3",
        configs.GROUPED_ROUTING,
        deep=_DEEP,
        biases={"attention_bias": True},
        biases_deep={"attention_bias": True, **_DEEP},
        moonlight={**configs.ONE_GROUP, "q_lora_rank": None},
        moonlight_deep={**configs.ONE_GROUP, "q_lora_rank": None, **_DEEP},
        in_standard_selftest=True,
    ),
)
_EXAONE = NewerType(
    "5.24.0",
    keys={"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"},
    defaults={
        "vocab_size": 102400,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "eos_token_id": 361,
        "rope_theta": 500000.0,
    },
)
_SARVAM_MLA = NewerType(
    "5.24.0",
    keys={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    defaults={
        "vocab_size": 262144,
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "n_routed_experts": 128,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "initializer_range": 0.006,
        "num_nextn_predict_layers": 0,
    },
    unused=("head_dim", "q_head_dim"),
)
_SARVAM_MOE = NewerType(
    "5.24.0",
    keys={**_SARVAM_MLA.keys, "use_qkv_bias": "attention_bias"},
    defaults={
        "vocab_size": 262144,
        "intermediate_size": 8192,
        "num_hidden_layers": 19,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "initializer_range": 0.006,
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "rope_theta": 8000000.0,
        "partial_rotary_factor": 1.0,
    },
)
_DEEPSEEK2 = Gguf("deepseek2", _SHARED | {"attention_bias": (False,), "rope_interleave": (True,)})
_QWEN3_NEXT = replace(
    _MIXTURE,
    model_type="qwen3_next",
    expert_keys=QWEN_EXPERTS,
    may_be_unexpected=(r"^mtp\.",),
    extends_context=False,
    fp8_linear=None,
    has_state=True,
    fused=f"{FUSED}, except in gated delta nets",
    parallel_axes=frozenset({"ep", "pp"}),
    experts_class="Qwen3NextExperts",
    onnx=None,
    tiny_models=_tiny("qwen3_next", configs.QWEN3_NEXT, deep=_DEEP),
)
_ROWS = (
    replace(
        _MIXTURE,
        model_type="deepseek_v2",
        gguf=Gguf(
            "deepseek2", _SHARED | {"topk_method": ("greedy",), "attention_bias": (False,), "mlp_bias": (False,)}
        ),
        config_values={
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax", None),
            "norm_topk_prob": (False, None),
            "moe_layer_freq": (1, None),
        },
        expert_keys=ExpertKeys(),
        experts_class="DeepseekV2Experts",
        onnx=OnnxGraph("latent", router="grouped_softmax", is_rotary_interleaved=True),
        tiny_models=TinyModels(
            {**configs.GROUPED_ROUTING, "topk_method": "group_limited_greedy"},
            {
                "deepseek_v2_deep": {**configs.LATENT, "topk_method": "greedy", **_DEEP},
                "deepseek_v2_lite": {**configs.LATENT, "topk_method": "greedy", "q_lora_rank": None},
                "deepseek_v2_lite_deep": {**configs.LATENT, "topk_method": "greedy", "q_lora_rank": None, **_DEEP},
            },
        ),
    ),
    replace(_DEEPSEEK_V3, gguf=_DEEPSEEK2),
    replace(
        _DEEPSEEK_V3,
        model_type="kimi_k2",
        built_as="deepseek_v3",
        gguf=_DEEPSEEK2,
        tiny_models=_tiny("kimi_k2", configs.ONE_GROUP, deep=_DEEP),
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe_lite",
        gguf=_DEEPSEEK2,
        experts_class="Glm4MoeLiteExperts",
        tiny_models=_tiny(
            "glm4_moe_lite",
            configs.WIDE_VALUES,
            deep=_DEEP,
            types={"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        ),
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="glm4_moe",
        gguf=Gguf("glm4moe", _SHARED),
        experts_class="Glm4MoeExperts",
        onnx=OnnxGraph("grouped_query", router="sigmoid"),
        tiny_models=TinyModels(
            {**configs.GROUPED_QUERY_EXPERTS, "use_qk_norm": True},
            {
                "glm4_moe_deep": {**configs.GROUPED_QUERY_EXPERTS, "use_qk_norm": True, **_DEEP},
                "glm4_moe_air": configs.GROUPED_QUERY_EXPERTS,
                "glm4_moe_air_deep": {**configs.GROUPED_QUERY_EXPERTS, **_DEEP},
            },
        ),
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="deepseek_v32",
        # DeepSeek-V3.2-Exp does not quantise weights_proj (inference/model.py:441-444).
        fp8_linear=(
            r"\.(self_attn|mlp)\.((?!indexer\.)[\w.]+\.)?\w+_proj(_with_mqa)?\.weight$"
            r"|\.indexer\.(wq_b|wk)\.weight$"
        ),
        indexer=Indexer(),
        experts_class="DeepseekV32Experts",
        onnx=None,
        tiny_models=_tiny("deepseek_v32", configs.INDEXED, deep=_DEEP, sparse={**configs.SPARSE, **_DEEP}),
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="glm_moe_dsa",
        fp8_linear=None,
        indexer=Indexer(rotates_pairs=True, is_shared=True),
        experts_class="GlmMoeDsaExperts",
        onnx=None,
        tiny_models=_tiny("glm_moe_dsa", configs.SHARED_INDEX, deep=_DEEP, sparse={**configs.SPARSE, **_DEEP}),
    ),
    replace(
        _DENSE,
        model_type="qwen2",
        gguf=Gguf("qwen2", {"use_sliding_window": (False,)}),
        tiny_models=_tiny("qwen2", {**configs.DENSE, "tie_word_embeddings": True}, deep=_DEEP),
    ),
    replace(
        _DENSE,
        model_type="qwen3",
        gguf=Gguf("qwen3", _PLAIN_ATTENTION),
        tiny_models=_tiny("qwen3", {**configs.DENSE, "head_dim": 12}, deep=_DEEP),
    ),
    Family("qwen2_moe", expert_keys=QWEN_EXPERTS, fused_experts=True, window_in_mask=True),
    replace(
        _MIXTURE,
        model_type="qwen3_moe",
        gguf=Gguf("qwen3moe", _PLAIN_ATTENTION | _ALL_SPARSE),
        expert_keys=QWEN_EXPERTS,
        experts_class="Qwen3MoeExperts",
        tiny_models=_tiny("qwen3_moe", configs.QWEN3_MOE, deep=_DEEP),
    ),
    _QWEN3_NEXT,
    replace(
        _QWEN3_NEXT,
        model_type="qwen3_5_moe_text",
        experts_class="Qwen3_5MoeExperts",
        tiny_models=_tiny("qwen3_5_moe_text", configs.QWEN3_NEXT, deep=_DEEP),
    ),
    replace(
        _TRAINED,
        model_type="qwen3_5_text",
        may_be_unexpected=(r"^mtp\.",),
        extends_context=False,
        has_state=True,
        fused=f"{FUSED}, except in gated delta nets",
        parallel_axes=frozenset({"pp"}),
        tiny_models=_tiny("qwen3_5_text", configs.DELTA, deep=_DEEP),
    ),
    replace(
        _MIXTURE,
        model_type="mixtral",
        gguf=Gguf("llama", {"sliding_window": (None,)}, rotates_pairs=True),
        expert_keys=_MIXTRAL_EXPERTS,
        published_mlp=MIXTRAL_NAMES,
        fp8_linear=None,
        experts_class="MixtralExperts",
        router=RouterKind("softmax"),
        tiny_models=_tiny("mixtral", configs.MIXTRAL, deep=_DEEP),
    ),
    replace(
        _MIXTURE,
        model_type="minimax_m2",
        expert_keys=_MIXTRAL_EXPERTS,
        published_mlp=MIXTRAL_NAMES,
        extends_context=False,
        fp32_buffers=_ROUTER_BIASES,
        fp8_linear=None,
        normalises_over_heads=True,
        experts_class="MiniMaxM2Experts",
        router=RouterKind("sigmoid", bias="mlp.e_score_correction_bias"),
        onnx=None,
        tiny_models=_tiny("minimax_m2", configs.MINIMAX_M2, deep=_DEEP),
    ),
    replace(
        _MIXTURE,
        model_type="olmoe",
        expert_keys=ExpertKeys(number_keys=("num_experts",), width_key="intermediate_size"),
        fp8_linear=None,
        normalises_over_heads=True,
        experts_class="OlmoeExperts",
        tiny_models=_tiny("olmoe", configs.OLMOE, deep=_DEEP),
    ),
    replace(
        _DENSE,
        model_type="llama",
        gguf=Gguf("llama", rotates_pairs=True),
        tiny_models=_tiny(
            "llama",
            configs.DENSE,
            deep={"num_hidden_layers": 5},
            deeper={"num_hidden_layers": 8},
            biases={"attention_bias": True},
            in_standard_selftest=True,
        ),
    ),
    Family(
        "gpt_oss",
        gguf=Gguf("gpt-oss", {"swiglu_limit": (7.0,), "attention_bias": (True,), "tie_word_embeddings": (False,)}),
        expert_keys=_MIXTRAL_EXPERTS,
        transposed_experts=True,
        fp8_linear=None,
        has_sinks=True,
        fused="RMSNorm and rotary embedding are one kernel each, and clamped SwiGLU is not",
        parallel_axes=_ALL_AXES,
        experts_class="GptOssExperts",
        router=RouterKind("softmax", module="mlp.router", parameters=("weight", "bias")),
        has_lora=True,
        tiny_models=_tiny("gpt_oss", configs.GPT_OSS, deep=_DEEP),
    ),
    Family(
        "deepseek_v4",
        expert_keys=ExpertKeys(),
        fused_experts=True,
        published_mlp=MlpNames(module="ffn", gate="w1", up="w3", down="w2"),
        published_renames=DEEPSEEK_V4_RENAMES,
        may_be_unexpected=(r"^(model\.layers\.\d+\.)?mtp\.",),
        has_mtp=True,
        # Without this key vLLM 0.32 creates no router biases (models/deepseek_v4/cpu/model.py:166).
        export_config={"topk_method": "noaux_tc"},
        config_values={
            "num_key_value_heads": (1,),
            "attention_bias": (False,),
            "attention_dropout": (0,),
            "scoring_func": ("sqrtsoftplus",),
            "topk_method": ("noaux_tc",),
            "norm_topk_prob": (True,),
            "n_shared_experts": (1,),
        },
        fp8_linear=None,
        fp8_scale=".scale",
        fp32_buffers=_ROUTER_BIASES,
        # transformers keeps these parameters in fp32 (transformers 5.23,
        # deepseek_v4/modeling_deepseek_v4.py:1242-1254).
        fp32_weights=r"^(?!mtp\.).*(norm\.weight|hc(_head)?[._]\w+|\.(sinks|attn_sink|position_bias|ape))$",
        has_sinks=True,
        fused=f"{FUSED}, but for norms without weights and the clamps before SwiGLU",
        parallel_axes=_ALL_AXES,
        experts_class="DeepseekV4Experts",
        router=RouterKind("sqrtsoftplus", bias="mlp.gate.e_score_correction_bias", reads_ids=True),
        has_lora=True,
        indexer=Indexer(chooses_entries=True),
        tiny_models=_tiny("deepseek_v4", configs.COMPRESSED, deep=configs.HASHED, sparse={"index_topk": 4}),
    ),
    replace(_TRAINED, model_type="mistral", tiny_models=_tiny("mistral", configs.MISTRAL, deep=_DEEP)),
    replace(
        _TRAINED,
        model_type="ministral3",
        extends_context=False,
        tiny_models=_tiny("ministral3", configs.MINISTRAL3, deep=_DEEP),
    ),
    replace(
        _TRAINED,
        model_type="phi3",
        extends_context=False,
        parallel_axes=_DENSE_AXES - {"tp"},
        tiny_models=_tiny("phi3", configs.PHI3, deep=_DEEP),
    ),
    replace(
        _TRAINED,
        model_type="gemma3_text",
        extends_context=False,
        fused="RMSNorm and rotary embedding are one kernel each, and GELU is not",
        tiny_models=_tiny("gemma3_text", configs.GEMMA3, deep=_DEEP),
    ),
    replace(
        _TRAINED,
        model_type="gemma4_text",
        # Checkpoints have unused key and value projections in layers that use the keys and values of another layer.
        may_be_unexpected=(r"\.self_attn\.([kv]_proj|[kv]_norm)\.weight$",),
        extends_context=False,
        fused="RMSNorm is one kernel, and rotary embedding and GELU are not",
        # Later pipeline stages would need the first stage's embeddings, keys and values, which are not sent.
        parallel_axes=frozenset({"sp"}),
        tiny_models=TinyModels(
            configs.GEMMA4, {"gemma4_text_inputs": configs.GEMMA4_INPUTS, "gemma4_text_experts": configs.GEMMA4_EXPERTS}
        ),
    ),
    replace(
        _TRAINED,
        model_type="exaone",
        built_as="llama",
        newer=_EXAONE,
        published_renames=EXAONE_RENAMES,
        tiny_models=_tiny("exaone", configs.DENSE, deep=_DEEP),
    ),
    replace(
        _TRAINED,
        model_type="exaone4",
        extends_context=False,
        tiny_models=_tiny("exaone4", configs.EXAONE4, deep=_DEEP),
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="sarvam_mla",
        built_as="deepseek_v3",
        newer=_SARVAM_MLA,
        expert_keys=ExpertKeys(number_keys=("num_experts", "n_routed_experts")),
        has_mtp=False,
        onnx=None,
        fp8_linear=None,
        tiny_models=_tiny("sarvam_mla", configs.PLAIN_QUERIES, deep=_DEEP),
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="sarvam_moe",
        built_as="glm4_moe",
        newer=_SARVAM_MOE,
        expert_keys=ExpertKeys(number_keys=("num_experts", "n_routed_experts")),
        has_mtp=False,
        published_renames=SARVAM_MOE_RENAMES,
        published_qkv="query_key_value",
        export_config={},
        onnx=None,
        fp8_linear=None,
        experts_class="Glm4MoeExperts",
        tiny_models=_tiny("sarvam_moe", configs.JOINED_QUERIES, deep=_DEEP),
    ),
    Family(
        "bert",
        may_be_unexpected=(r"^cls\.", _POSITION_IDS),
        fp8_linear=None,
        fused="",
        encoder=Encoder(("bert.pooler", "dropout", "classifier"), has_token_types=True),
        onnx=OnnxGraph("post_norm"),
    ),
    Family(
        "roberta",
        may_be_unexpected=(r"^lm_head\.", r"^(roberta\.)?pooler\.", _POSITION_IDS),
        fp8_linear=None,
        fused="",
        encoder=Encoder(("classifier",), positions_follow_padding=True),
        onnx=OnnxGraph("post_norm"),
    ),
    Family(
        "modernbert",
        may_be_unexpected=(r"^decoder\.",),
        fp8_linear=None,
        fused="rotary embedding is one kernel, and LayerNorm and GELU are not",
        encoder=Encoder(("head", "drop", "classifier"), pooling_key="classifier_pooling"),
        onnx=OnnxGraph("pre_norm"),
    ),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ROWS}
"""Families by model type. R1 and Moonlight are deepseek_v3; R1's distills are qwen2, qwen3 and llama."""
_GENERIC = Family("", fp32_buffers=_ROUTER_BIASES, fp8_linear=None, is_generic=True, fused="")
_NAMED: Mapping[str, Family] = {
    "minimax_m3_text": replace(
        _GENERIC,
        model_type="minimax_m3_text",
        built_as="minimax_m3_vl_text",
        fused_experts=True,
        joined_mlp=True,
        published_mlp=replace(MIXTRAL_NAMES, module="mlp"),
        published_renames=MINIMAX_M3_RENAMES,
        may_be_unexpected=(r"^model\.mtp\.",),
    ),
    "mistral4_text": replace(_GENERIC, model_type="mistral4_text", built_as="mistral4"),
}
"""Text parts that are trained under a model type of their own, and are not in the table of families."""
BUILT_AS: Mapping[str, str] = {name: row.built_as for name, row in {**FAMILIES, **_NAMED}.items() if row.built_as}
"""Model types unknown to transformers or to older releases, with the model type whose classes build the model."""
TEXT_PARTS: Mapping[str, str] = {
    "qwen3_vl_text": "qwen3",
    "glm4v_moe_text": "glm4_moe",
    "minimax_m3_vl_text": "minimax_m3_text",
    "mistral4": "mistral4_text",
}
"""Model types of text parts of multimodal models for which AutoModelForCausalLM has no class, or one that cannot load
the published tensors, each with the model type that is trained instead. Both types compute the same on plain text.
"""
WITH_TINY_MODELS = tuple(name for name, family in FAMILIES.items() if family.tiny_models is not None)
"""Model types whose tiny models are compared with transformers."""
FULLY_TESTED = tuple(name for name in WITH_TINY_MODELS if not FAMILIES[name].compresses)
"""Model types with which `train.activation_offload` and `train.tiled_mlp` are tested."""
WITH_CONTEXT = tuple(name for name in FULLY_TESTED if FAMILIES[name].extends_context)
"""Model types with which `model.context` is tested."""
STANDARD_SELFTEST = tuple(
    name for name, family in FAMILIES.items() if family.tiny_models and family.tiny_models.in_standard_selftest
)
"""Families that `ds-finetune selftest` checks by default. It checks the first one in every parallel layout."""


def family_of(model_type: str) -> Family:
    """Properties of a model type. A model type that is not in the table gets the defaults: its checkpoints have
    transformers' tensor names, every tensor is loaded, and no optional capability is supported.
    """
    return FAMILIES.get(model_type) or _NAMED.get(model_type) or replace(_GENERIC, model_type=model_type)
