"""Which program has computed with which model types of which format, and in which test: every cell of the docs' table.

The tests are parametrised by these rows, from which `scripts/reference.py` makes the table.
"""

from collections.abc import Mapping
from typing import NamedTuple

_GROUPED = ("glm4_moe", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2")
_DECODERS = (*_GROUPED, *_LATENT, "olmoe")
_SAME = "36 greedy tokens of 3 prompts are equal"


class Cells(NamedTuple):
    """Model types of a format with which a program has computed."""

    format: str
    program: str
    result: str
    test: str
    """Its file below `tests/`."""
    types: tuple[str, ...]
    note: str = ""


CELLS = (
    Cells(
        "safetensors",
        "transformers 5.23",
        "tensors and logits are equal",
        "export/test_safetensors_folder.py",
        (
            *_DECODERS,
            "deepseek_v32",
            "exaone",
            "exaone4",
            "gemma3_text",
            "gemma4_text",
            "glm_moe_dsa",
            "gpt_oss",
            "minimax_m2",
            "ministral3",
            "mistral",
            "phi3",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "sarvam_mla",
            "sarvam_moe",
        ),
    ),
    Cells(
        "safetensors",
        "transformers 5.23",
        "every name is loaded",
        "export/test_formats.py",
        ("bert", "modernbert", "qwen2_moe", "roberta"),
    ),
    Cells("safetensors", "transformers 5.23", "tensors are equal", "trainer/test_deepseek_v4.py", ("deepseek_v4",)),
    Cells(
        "safetensors",
        "vLLM 0.32 on a CPU",
        "8 greedy tokens of 2 prompts are equal",
        "test_round_trip.py",
        _DECODERS,
        "; latent attention with YaRN, since other rotary embeddings are wrong there, and olmoe without norm_topk_prob",
    ),
    Cells(
        "safetensors",
        "vLLM 0.32 on a CPU",
        "log-probabilities within 0.08 on average, also in FP8 and FP4",
        "export/test_vllm_deepseek_v4.py",
        ("deepseek_v4",),
    ),
    Cells(
        "safetensors",
        "mlx_lm 0.32 on a CPU",
        _SAME,
        "export/test_mlx.py",
        tuple(name for name in _DECODERS if name != "kimi_k2"),
    ),
    Cells(
        "onnx",
        "ONNX Runtime 1.31",
        "logits within 1e-4, 8 greedy tokens of 4 prompts",
        "export/onnx/test_onnx.py",
        _DECODERS,
    ),
    Cells(
        "onnx",
        "ONNX Runtime 1.31",
        "logits of classifiers within 1e-4",
        "export/onnx/test_classifiers.py",
        ("bert", "deepseek_v3", "llama", "modernbert", "qwen2", "roberta"),
    ),
    Cells(
        "onnx",
        "onnxruntime-genai 0.18",
        _SAME,
        "export/onnx/test_consumers.py",
        _GROUPED,
        "; latent attention is refused",
    ),
    Cells(
        "onnx",
        "transformers.js 4.3",
        _SAME,
        "export/onnx/test_consumers.py",
        ("deepseek_v3", "llama", "qwen2", "qwen3", "qwen3_moe"),
        "; it has no other classes",
    ),
    Cells(
        "gguf",
        "llama.cpp (xllamacpp 2026.10)",
        f"{_SAME} in f32",
        "export/gguf/test_llama_cpp.py",
        (*_GROUPED, *_LATENT, "gpt_oss"),
    ),
    Cells(
        "compressed-tensors",
        "transformers 5.23 (compressed-tensors 0.20)",
        "weights within their rounding, KL divergence printed",
        "export/test_compressed.py",
        _DECODERS,
    ),
    Cells(
        "compressed-tensors",
        "vLLM 0.32 on a CPU",
        "log-probabilities within 0.1 (w4a16), or what fp8 itself changes; w8a16 has no kernel there",
        "export/test_compressed.py",
        ("qwen2",),
    ),
    Cells(
        "adapter",
        "names of vLLM 0.32",
        "merged weights are equal, and every name is looked up",
        "export/test_server_adapter.py",
        (*_DECODERS, "deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
    ),
    Cells(
        "adapter",
        "vLLM 0.32 by names",
        "peft's adapters keep their names and values",
        "export/test_server_adapter.py",
        ("gpt_oss", "qwen2_moe"),
        ", which are not trained with LoRA here",
    ),
)


def types_of(test: str, program: str = "") -> tuple[str, ...]:
    """The model types that the test in the file `test` goes through with a program whose name begins so."""
    (types,) = [row.types for row in CELLS if row.test == test and row.program.startswith(program)]
    return types


def names_of(types: tuple[str, ...], models: Mapping[str, str]) -> list[str]:
    """Names of the models, whose types `models` has by name, that have these types; each type has one at least."""
    assert {*types} <= {*models.values()}, types
    return [name for name, model_type in models.items() if model_type in types]
