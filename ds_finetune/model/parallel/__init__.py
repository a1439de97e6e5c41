"""Tensor, sequence, pipeline and expert parallel modules, and which shard of each tensor a rank holds."""
