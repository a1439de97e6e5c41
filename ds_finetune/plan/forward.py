"""Decides how a forward computes: kernels of attention and experts, tiles of MLPs, chunks of the head, and batches of
sampled answers.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from ds_finetune.config.sections import OWN_ATTENTIONS
from ds_finetune.config.units import GIB
from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of
from ds_finetune.plan.kernels import triton_problem
from ds_finetune.plan.model_tensors import DescribedModel

MAX_WIDTH = 256
"""Maximum head width in columns of FlashAttention in torch 2.11 and 2.13
(aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd)."""
HALF_PRECISIONS = ("bf16", "fp16")
"""Precisions that FlashAttention supports."""
_OLDEST = (8, 0)
"""Minimum compute capability of FlashAttention."""
_HOPPER = 9
"""Major compute capability of the GPUs on which FlashAttention 3 runs (torch 2.13, nn/attention/_fa3.py:155)."""
_NO_BACKWARD = {(8, 6), (8, 7), (8, 9), (12, 0), (12, 1)}
"""Compute capabilities whose shared memory is too small for FlashAttention's backward at 193 to 224 columns (torch
2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp:531)."""


Arch = tuple[int, int]
"""Compute capability; (8, 0) is sm_80."""


class HeadWidths(NamedTuple):
    """Widths of an attention head in columns."""

    keys: int
    """Width of an attention head's queries and keys."""
    values: int

    @property
    def widest(self) -> int:
        """The larger width: that of queries and keys, or that of values. FlashAttention computes with this width."""
        return max(self)


def head_widths(tree: Mapping[str, Any]) -> HeadWidths:
    """Head widths from config.json as transformers reads it; the widest where layers differ."""
    if tree.get("qk_nope_head_dim"):
        return HeadWidths(tree["qk_nope_head_dim"] + tree["qk_rope_head_dim"], tree["v_head_dim"])
    width = tree.get("head_dim") or tree["hidden_size"] // tree["num_attention_heads"]
    width = max([width, *(layer.get("head_dim", 0) for layer in (tree.get("per_layer_config") or {}).values())])
    return HeadWidths(width, width)


def varlen_problem(tree: Mapping[str, Any], *, precision: str, capability: Arch = _OLDEST) -> str:
    """Why FlashAttention cannot attend to all documents of a forward in one call; empty where it can.

    `tree` is the model's config.json, `capability` the GPU's compute capability.
    """
    family = family_of(tree["model_type"])
    if family.is_generic:
        return "transformers' own attention is used for model types outside the table"
    width, gpu = head_widths(tree).widest, _dotted(capability)
    halves = " and ".join(HALF_PRECISIONS)
    problems = (
        (precision not in HALF_PRECISIONS, f"train.precision {precision}, and the kernel computes in {halves}"),
        (family.has_sinks, "its attention has sinks, which the kernel does not know"),
        (width > MAX_WIDTH, f"heads of {width} columns, and the kernel takes at most {MAX_WIDTH}"),
        (capability < _OLDEST, f"compute capability {gpu}, and the kernel needs {_dotted(_OLDEST)}"),
        (
            capability in _NO_BACKWARD and 192 < width <= 224,
            f"heads of {width} columns, and the kernel has no backward pass for 193 to 224 on {gpu}",
        ),
    )
    return next((text for is_set, text in problems if is_set), "")


def flash_3_problem(tree: Mapping[str, Any], *, capability: Arch, is_installed: bool) -> str:
    """Why FlashAttention 3 is not used for the attention of packed documents; empty where it is."""
    if capability[0] != _HOPPER:
        return f"FlashAttention 3 is for compute capability {_HOPPER}.x"
    if dropout := _dropout(tree):
        return f"FlashAttention 3 has no dropout, and the attention has {dropout}"
    return "" if is_installed else "FlashAttention 3 needs a torch that takes it, and its module flash_attn_interface"


def attention_lines(
    attention: str, model: DescribedModel, *, device: str, precision: str, flash_3: str | None = None
) -> list[tuple[str, str]]:
    """Plan line about the attention kernel; none on CPUs or for transformers' kernels.

    `flash_3` is the result of `flash_3_problem` for this GPU, or None without a GPU.
    """
    family = model.family
    if device == "cpu" or attention not in OWN_ATTENTIONS or family.is_generic:
        return []
    if family.compresses:
        return [("attention", "queries of all documents, some at a time, by products of matrices")]
    if attention == "by_document":
        return [("attention", "a call for each document")]
    if problem := varlen_problem(model, precision=precision):
        return [("attention", f"a call for each document: {problem}")]
    version = "" if flash_3 is None else f", by FlashAttention 2: {flash_3}" if flash_3 else ", by FlashAttention 3"
    return [("attention", f"one call for all documents{version}")]


def problem_of_calls(tree: Mapping[str, Any], longest: int) -> str:
    """Why some attention calls would not use FlashAttention although it supports the model; empty if all calls use it.
    `longest` is the maximum number of tokens of a document.
    """
    if dropout := _dropout(tree):
        return f"dropout {dropout} of its attention, which the kernel does not have"
    chosen = tree.get("index_topk") if family_of(tree["model_type"]).indexer is not None else None
    if chosen and longest > chosen:
        return f"documents of {longest} tokens, whose queries attend to the {chosen} that an indexer chooses"
    return ""


def _dropout(tree: Mapping[str, Any]) -> float:
    return tree.get("attention_dropout") or tree.get("attention_probs_dropout_prob") or 0.0


def _dotted(capability: Arch) -> str:
    return ".".join(map(str, capability))


FUSED_PRECISION = "bf16"
"""Precision in which torch has one kernel for the products of all experts (torch 2.11 and 2.13,
aten/src/ATen/native/cuda/GroupedBlas.cpp, `_grouped_mm_cuda`)."""
_FUSED = (9, 10)
"""Major compute capabilities of GPUs on which torch has one kernel for the products of all experts
(aten/src/ATen/native/cuda/GroupedBlas.cpp, `_scaled_mm_allowed_device`).
"""
_OLDEST_GROUPED = (8, 0)
"""Compute capability from which transformers calls torch's grouped product; on older GPUs it loops over experts
(transformers 5.23, integrations/moe.py:338-348)."""
TORCH_ONLY = "model.kernels is torch"
"""Text of plan lines: why FlashAttention 3 and the Triton kernel of experts are not used."""
_LOOP = "a product for each expert, whose numbers of rows the host reads first"


def experts_lines(
    family: Family, *, device: str, precision: str, capability: Arch | None = None, has_triton: bool = True
) -> list[tuple[str, str]]:
    """Plan line about the products of routed experts of a known family; none on CPUs.

    `capability` is the GPU's compute capability; None without a GPU, as in a dry run.
    """
    if device == "cpu" or not (family.fused_experts or family.transposed_experts):
        return []
    torchs = f"torch's, in {FUSED_PRECISION} on compute capability {' and '.join(f'{major}.x' for major in _FUSED)}"
    no_triton = TORCH_ONLY if not has_triton else triton_problem()[0] if capability is not None else ""
    torchs += f"; not Triton's: {no_triton}" if no_triton else ""
    if capability is None:
        halves, oldest = " and ".join(HALF_PRECISIONS), _dotted(_OLDEST_GROUPED)
        tritons = "" if no_triton else f"else Triton's, in {halves} from {oldest} on; "
        return [("experts", f"one kernel for all: {torchs}; {tritons}{_LOOP} on others")]
    product, gpu = product_of_experts(precision, capability, has_triton=has_triton), _dotted(capability)
    whose = "" if capability >= _OLDEST_GROUPED else ", by transformers' loop"
    none = f"no kernel for all experts is here in {precision} on compute capability {gpu} ({torchs})"
    texts = {
        "torch": "torch's kernel for all experts",
        "triton": f"a Triton kernel for all experts, in {precision} on compute capability {gpu} ({torchs})",
        "loop": f"{_LOOP}{whose}: {none}",
    }
    return [("experts", texts[product])]


def product_of_experts(
    precision: str, capability: Arch, *, has_triton: bool = True
) -> Literal["torch", "triton", "loop"]:
    """How a GPU multiplies rows with the weights of all experts: by torch's grouped kernel, by this program's Triton
    kernel (model/grouped_kernel.py), or in a loop over experts. `model.kernels: torch` rules out the Triton kernel.
    """
    if precision == FUSED_PRECISION and capability[0] in _FUSED:
        return "torch"
    fits = precision in HALF_PRECISIONS and capability >= _OLDEST_GROUPED
    return "triton" if fits and has_triton and not triton_problem()[0] else "loop"


def mlp_tiles(model: Mapping[str, Any]) -> int:
    """Number of tiles into which `train.tiled_mlp` divides the tokens of a forward, from the model's config.json.

    The activations inside the MLP of one tile then take no more memory than the hidden states of all tokens. All ranks
    have the same number of tiles, because it does not depend on the tokens.
    """
    dense = 4 * model.get("intermediate_size", 0)
    keys = family_of(str(model["model_type"])).expert_keys
    experts = keys.per_token(model) * (2 * model["hidden_size"] + 4 * keys.width(model)) if keys else 0
    return max(1, math.ceil(max(dense, experts) / model["hidden_size"]))


CPU_TOKENS = 1024
DISTILLATION_TOKENS = 512
"""Tokens of a chunk in distillation: half of CPU_TOKENS, because logits of two models exist at once."""
CPU_BLOCK_NUMBERS = 2**19
"""Logits that each thread of a CPU converts from 16 bits to fp32 at a time. They take 2 MiB and fit in caches. Loss and
gradients of 2,600 tokens, width 256 and vocabulary 102,400 take 1.8 s instead of 2.5 (bf16, torch 2.13, one core with
AVX512-BF16); between 2**17 and 2**22 times differ by 6%.
"""
_GPU_BYTES = 2 * GIB
_GPU_TOKENS = (1024, 8192)
"""Minimum and maximum tokens of a chunk on a GPU."""


def logits_bytes(vocabulary: int, *, precision: str) -> int:
    """Bytes of one token's logits in the run's precision, and of their softmax in fp32."""
    return vocabulary * (4 if precision == "fp32" else 2 + 4)


def head_chunk(vocabulary: int, *, precision: str, device: str) -> int:
    """Supervised tokens of a chunk, for a head of `vocabulary` rows on each rank.

    Each chunk reads and writes the whole fp32 gradient of the head, so large chunks are faster. On a GPU a chunk is
    the largest multiple of 1,024 tokens, up to 8,192, whose logits take at most 2 GiB. On a CPU more than 1,024 tokens
    were no faster and take more memory.
    """
    if device == "cpu":
        return CPU_TOKENS
    least, most = _GPU_TOKENS
    fitting = _GPU_BYTES // logits_bytes(vocabulary, precision=precision)
    return min(max(fitting // least * least, least), most)


def head_line(vocabulary: int, *, precision: str, device: str) -> tuple[str, str]:
    """Plan line about the chunks of tokens in which the head computes logits."""
    tokens = head_chunk(vocabulary, precision=precision, device=device)
    memory = tokens * logits_bytes(vocabulary, precision=precision) / GIB
    return "head", f"logits of {tokens:,} supervised tokens at a time, {memory:.2f} GiB"


WEIGHTS_SHARE = 0.5
"""Fraction of a rank's free memory that gathered ZeRO-3 weights may take while answers are sampled."""
_CACHE_SHARE = 0.4
"""Fraction of a rank's free memory, without gathered weights, that keys, values and logits of a batch of answers may
take.
"""
_MOST_ANSWERS = 256
"""Maximum number of answers sampled in one batch if `rollout.batch_rows` is auto."""
_COPIES_OF_LOGITS = 6
"""fp32 copies of the logits that exist while tokens are sampled."""
PROMPT_TOKENS = 2**14
"""Maximum number of prompt tokens, including padding, in one forward of sampling. A single prompt may be longer."""
_DRAWN_AT_ONCE = {"cpu": 2**17, "cuda": 2**25}
"""Number of logits for which sampling noise is computed at a time. On a CPU they fit in a core's cache; on a GPU they
take 256 MiB per tensor.
"""


def rows_of_batch(free_bytes: float, *, tokens: int, token_bytes: int, vocabulary: int) -> int:
    """Number of answers that fit into `free_bytes` while they are sampled in one batch. `tokens` counts prompt and
    answer.
    """
    bytes_of_row = tokens * token_bytes + _COPIES_OF_LOGITS * 4 * vocabulary
    return max(1, min(_MOST_ANSWERS, int(_CACHE_SHARE * free_bytes / bytes_of_row)))


def rows_sampled_at_once(device: str, *, vocabulary: int) -> int:
    """Number of answers whose sampling noise is computed at a time."""
    return max(1, _DRAWN_AT_ONCE.get(device, 2**17) // vocabulary)
