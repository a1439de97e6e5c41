"""Tensor, sequence, pipeline and expert parallel modules, and which part of a tensor a rank holds."""
