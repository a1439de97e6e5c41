"""A patch of bitsandbytes' 4-bit linear modules on CPUs."""

from typing import Any

from ds_finetune.foreign.guard import Foreign

_PACKING = Foreign("bitsandbytes", "nn/modules.py:573, 613")


def without_cpu_packing(linear: Any) -> None:  # noqa: ANN401 - a Linear4bit
    """Stop bitsandbytes from repacking the quantised weights of a Linear4bit on a CPU with AVX512-BF16.

    It repacks them at the first forward in evaluation mode. Products with repacked weights have no gradient
    (autograd/_functions.py:422).
    """
    _PACKING.attribute(linear, "support_avx512bf16_for_cpu")
    linear.support_avx512bf16_for_cpu = False
