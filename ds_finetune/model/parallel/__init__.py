"""Tensor, sequence, pipeline and expert parallel modules, and the shard of each tensor that a rank holds."""
