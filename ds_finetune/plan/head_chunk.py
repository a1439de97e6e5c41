"""How many supervised tokens have logits at a time, and the memory of these."""

from ds_finetune.config.units import GIB

CPU_TOKENS = 1024
DISTILLATION_TOKENS = 512
"""Of a distillation, half of those of the cross entropy, as there are logits of two models."""
CPU_BLOCK_NUMBERS = 2**19
"""Logits for each thread that a CPU turns into fp32 at a time where products are 16 bits, 2 MiB: they stay in its
caches. Loss and gradients of 2,600 tokens, width 256 and vocabulary 102,400 take 1.8 s in place of 2.5 (bf16, torch
2.13, one core with AVX512-BF16); between 2**17 and 2**22 times differ by 6%.
"""
_GPU_BYTES = 2 * GIB
_GPU_TOKENS = (1024, 8192)
"""Least and most tokens of a chunk on a GPU."""


def logits_bytes(vocabulary: int, *, precision: str) -> int:
    """Bytes of the logits of one token: products in the run's precision, and their softmax in fp32."""
    return vocabulary * (4 if precision == "fp32" else 2 + 4)


def head_chunk(vocabulary: int, *, precision: str, device: str) -> int:
    """Supervised tokens of a chunk, for a head of `vocabulary` rows on each rank.

    Each chunk reads and writes the whole fp32 gradient of the head. So on a GPU a chunk has as many tokens, a multiple
    of 1,024, as have logits in 2 GiB. On a CPU more than 1,024 were no faster and take more memory.
    """
    if device == "cpu":
        return CPU_TOKENS
    least, most = _GPU_TOKENS
    fitting = _GPU_BYTES // logits_bytes(vocabulary, precision=precision)
    return min(max(fitting // least * least, least), most)


def head_line(vocabulary: int, *, precision: str, device: str) -> tuple[str, str]:
    """Name and text of this decision."""
    tokens = head_chunk(vocabulary, precision=precision, device=device)
    memory = tokens * logits_bytes(vocabulary, precision=precision) / GIB
    return "head", f"logits of {tokens:,} supervised tokens at a time, {memory:.2f} GiB"
