"""Activations and FLOPs of a rank, from the program's own modules on fake tensors."""
