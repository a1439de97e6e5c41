"""How routed experts are multiplied on GPUs, for people to read in the plan."""

from collections.abc import Mapping
from typing import Any

from ds_finetune.families.table import family_of

FUSED_PRECISION = "bf16"
"""The precision in which torch has one kernel for the products of all experts (torch 2.11 and 2.13,
aten/src/ATen/native/cuda/GroupedBlas.cpp, `_grouped_mm_cuda`)."""
_FUSED = (9, 10)
"""Major compute capabilities that have it (the same file, `_scaled_mm_allowed_device`)."""
_OLDEST = (8, 0)
"""Compute capability from which transformers calls torch's grouped product; it loops over experts itself on older GPUs
(transformers 5.23, integrations/moe.py:338-348)."""
_LOOP = "a product for each expert, whose numbers of rows the host reads first"


def experts_lines(
    tree: Mapping[str, Any], *, device: str, precision: str, capability: tuple[int, int] | None = None
) -> list[tuple[str, str]]:
    """Name and text of the implementation for a model with routed experts of a known family; none on CPUs.

    `tree` is config.json, `capability` the GPU's, or None where no GPU is here, as in a dry run.
    """
    family = family_of(str(tree["model_type"]))
    if device == "cpu" or not (family.fused_experts or family.transposed_experts):
        return []
    return [("experts", _implementation(precision, capability))]


def _implementation(precision: str, capability: tuple[int, int] | None) -> str:
    if precision != FUSED_PRECISION:
        return f"{_LOOP}: torch's kernel for all experts computes in {FUSED_PRECISION}, not in {precision}"
    majors = " and ".join(f"{major}.x" for major in _FUSED)
    if capability is None:
        return f"one kernel for all on compute capability {majors}; {_LOOP} on others"
    if capability[0] in _FUSED:
        return "torch's kernel for all experts"
    whose = "" if capability >= _OLDEST else ", by transformers' loop"
    gpu = ".".join(map(str, capability))
    return f"{_LOOP}{whose}: torch's kernel for all experts runs on compute capability {majors}, and this is {gpu}"
